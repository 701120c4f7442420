"""The folder of a run's checkpoints: which exist, which is the latest, which may be deleted.

A checkpoint is `step_<n>`. What is being written or removed has a hidden name, `.step_<n>.*`: so
a run that is killed at any moment leaves complete checkpoints; the next save removes the rest.
`manifest.json` has the size and the checksums of every other file.

Needs no engine, so the launcher can use it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from data.order import Mixture, Stream
from data.packing import Used
from mimo.checkpoint.manifest import (
    MANIFEST,
    Sum,
    Unreadable,
    read_document,
    reading,
    sync_names,
    synced_sum,
    write_manifest,
    write_synced,
)
from mimo.config.phases import PHASE_FOLDER
from mimo.errors import InputError

_LATEST = "latest"
_PROGRESS = "progress.json"
_STEP_FOLDER = re.compile(r"step_[0-9]{1,18}")


@dataclass(frozen=True)
class Progress:
    """Where a run stands. The schedule follows from the step, the data from the samples.

    samples, passed_over: which samples of the order are used, as of `data.packing.Used`; a run with
    another batch size or budget continues with the others.
    skipped: (data source, sample) of each sample that could not be read, numbered as in the order
    of samples, so independent of layout and batch size.
    skipped_samples: how many there are. It is larger than the number in `skipped` if an older
    checkpoint had only the count.
    mixtures: the order of samples, of all positions so far; none in an older checkpoint.
    skipped_steps: how many steps updated no module, because a number was not finite.
    """

    step: int
    samples: int
    skipped_samples: int = 0
    skipped: frozenset[tuple[int, int]] = frozenset()
    passed_over: tuple[int, ...] = ()
    mixtures: tuple[Mixture, ...] = ()
    skipped_steps: int = 0

    @property
    def updates(self) -> int:
        """How many steps updated the modules."""
        return self.step - self.skipped_steps

    @property
    def used(self) -> Used:
        """The samples of the order that are used."""
        return Used(self.samples, self.passed_over)

    def after_step(self, step: int, used: Used, is_skipped: bool) -> Progress:
        """The same once this step is done, or skipped, which leaves these samples used."""
        return replace(
            self,
            step=step + 1,
            samples=used.samples,
            passed_over=used.passed_over,
            skipped_steps=self.skipped_steps + is_skipped,
        )

    def with_skipped(self, found: Set[tuple[int, int]]) -> Progress:
        """The same with these samples skipped; each counts once, however often it comes up."""
        new = found - self.skipped
        return replace(
            self,
            skipped_samples=self.skipped_samples + len(new),
            skipped=self.skipped | new,
        )


_NO_SUMS: Mapping[str, Sum] = MappingProxyType({})


def write_progress(folder: Path, progress: Progress) -> None:
    """Record in a checkpoint's folder where the run stood."""
    document = asdict(progress) | {"skipped": sorted(progress.skipped)}
    write_synced(folder / _PROGRESS, json.dumps(document))


def complete(
    folder: Path, progress: Progress, recipe_yaml: str, sums: Mapping[str, Sum] = _NO_SUMS
) -> None:
    """Add to a folder of tensors what makes it a checkpoint, the manifest last; all is on disk.

    sums: of files that are on disk already, by name; others are read and synced.
    """
    write_progress(folder, progress)
    write_synced(folder / "recipe.yaml", recipe_yaml)
    # A listing of a shared file system may lack files that other machines have written.
    files = dict(sums)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in files and name != MANIFEST:
            files[name] = synced_sum(path)
    write_manifest(folder, files)
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_names(inner)


def publish(
    partial: Path,
    progress: Progress,
    recipe_yaml: str,
    keep: int,
    keep_every: int | None = None,
    sums: Mapping[str, Sum] = _NO_SUMS,
    when_complete: Callable[[], None] = lambda: None,
) -> Path:
    """Turn a folder with all tensors in it into ``step_<n>``, the latest; one rank calls it.

    sums: as of `complete`. when_complete: called when only the right name is missing.
    """
    checkpoints = partial.parent
    final = checkpoints / f"step_{progress.step}"
    complete(partial, progress, recipe_yaml, sums)
    when_complete()
    if final.exists():  # of a run that went on from an earlier step; `latest` may name it
        if others := [path for path in _by_age(checkpoints) if path != final]:
            _point_latest_to(others[-1])
        _hide(final)
    partial.rename(final)
    sync_names(checkpoints)
    _point_latest_to(final)
    drop_old(checkpoints, keep, final, keep_every)
    return final


def _point_latest_to(checkpoint: Path) -> None:
    checkpoints = checkpoint.parent
    pointer = checkpoints / f".{_LATEST}"
    write_synced(pointer, checkpoint.name)
    os.replace(pointer, checkpoints / _LATEST)
    sync_names(checkpoints)


def _hide(checkpoint: Path) -> Path:
    """Make it no checkpoint any more, at once; `drop_old` removes what is there then."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)  # half removed by a run that was killed
    return checkpoint.rename(hidden)


def _by_age(checkpoints: Path) -> list[Path]:
    """All checkpoints of a folder in the order in which they were written."""
    return sorted(_by_step(checkpoints).values(), key=lambda path: path.stat().st_mtime)


def to_remove(
    checkpoints: Path, keep: int, keep_every: int | None, newest: Path | None = None
) -> list[Path]:
    """The checkpoints that are too many, oldest first.

    There stay ``newest``, the ``keep`` - 1 written last before it, whatever their steps are, and
    those whose step ``keep_every`` divides. After resuming from an earlier step, later steps of
    the abandoned run may still be there. newest: None for the one that `latest` names.
    """
    newest = newest or latest_checkpoint(checkpoints)
    others = [path for path in _by_age(checkpoints) if path != newest]
    others = others[: max(0, len(others) - keep + (newest is not None))]
    steps = {path: int(path.name.removeprefix("step_")) for path in others}
    return [path for path in others if keep_every is None or steps[path] % keep_every]


def drop_old(checkpoints: Path, keep: int, newest: Path, keep_every: int | None = None) -> None:
    """Remove the checkpoints of `to_remove`, and what runs that were killed have left."""
    for path in to_remove(checkpoints, keep, keep_every, newest):
        with suppress(OSError):  # it stays, and is tried again
            _hide(path)
    for path in checkpoints.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


def phase_folders(run_dir: Path) -> dict[int, Path]:
    """The folders of a run's phases by number, in order, without those that were moved aside."""
    found = {
        int(match[1]): path
        for path in run_dir.glob("phase_*")
        if (match := PHASE_FOLDER.fullmatch(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def final_checkpoint(run_dir: Path, steps: int) -> Path:
    """The checkpoint that a run of ``steps`` steps ends with, whether or not it exists yet."""
    return run_dir / "checkpoints" / f"step_{steps}"


def latest_checkpoint(path: Path) -> Path | None:
    """The latest checkpoint in a run folder or a ``checkpoints`` folder, or ``path`` if it is one.

    Raises InputError if ``latest`` names anything but a checkpoint beside it.
    """
    for folder in (path, path / "checkpoints"):
        if (folder / _PROGRESS).is_file():
            return folder
        if (folder / _LATEST).is_file():
            name = (folder / _LATEST).read_text(encoding="utf-8", errors="replace").strip()
            if not _STEP_FOLDER.fullmatch(name):
                raise InputError(
                    f"{folder / _LATEST}: names {name[:80]!r}, which is no checkpoint of this "
                    f"folder; write the name of one there, such as step_100"
                )
            latest = folder / name
            if (latest / _PROGRESS).is_file():
                return latest
    return None


def newest_checkpoint(path: Path) -> Path | None:
    """Like `latest_checkpoint`; in a run with phases, the latest of the last phase that has any."""
    for folder in (path, *reversed(phase_folders(path).values())):
        if (checkpoint := latest_checkpoint(folder)) is not None:
            return checkpoint
    return None


def resumable(run_dir: Path) -> list[Path]:
    """The checkpoints from which a run could go on, the best first; some may be damaged.

    First what `latest` names, there or not; if there is no `latest`, the one written last. Then
    those of fewer steps: others are of a run that was given up.
    """
    folder = run_dir / "checkpoints"
    with reading(folder):
        found = _by_step(folder)
    best = folder / _named(folder)
    if best == folder:
        best = max(found.values(), key=lambda path: path.stat().st_mtime, default=folder)
    if best == folder:
        return []
    step = int(best.name.removeprefix("step_"))
    return [best, *(found[earlier] for earlier in sorted(found, reverse=True) if earlier < step)]


def _named(checkpoints: Path) -> str:
    """The checkpoint that `latest` names; empty if it says nothing of the kind."""
    path = checkpoints / _LATEST
    try:
        with reading(path):
            name = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    return name if _STEP_FOLDER.fullmatch(name) else ""


def go_back(checkpoint: Path, damaged: Iterable[Path]) -> None:
    """Make a checkpoint the latest, and move better ones that are damaged out of the way.

    Each becomes ``damaged_step_<n>``, so that it neither counts as one that is kept nor is lost.
    One process calls it, with the run's lock. Raises InputError where nothing can be written.
    """
    checkpoints = checkpoint.parent
    try:
        for path in damaged:
            aside = path.with_name(f"damaged_{path.name}")
            if path.is_dir():
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        if not named_by_latest(checkpoint):
            _point_latest_to(checkpoint)
    except OSError as error:
        raise InputError(f"{checkpoints}: cannot write there: {error}") from error


def belongs_to(checkpoint: Path, run_dir: Path) -> bool:
    """Whether it is one of the run's own checkpoints, which `latest` there may name."""
    real = checkpoint.resolve()
    own = real.parent == (run_dir / "checkpoints").resolve()
    return own and _STEP_FOLDER.fullmatch(real.name) is not None


def all_checkpoints(path: Path) -> list[Path]:
    """Those of a run folder and its phases, by step; or of a ``checkpoints`` folder, or ``path``.

    Damaged ones as well. Raises InputError if there are none.
    """
    if _STEP_FOLDER.fullmatch(path.name) or (path / _PROGRESS).is_file():
        return [path]
    found = [
        checkpoint
        for run in (path, *phase_folders(path).values())
        for folder in (run, run / "checkpoints")
        for checkpoint in sorted(_by_step(folder).items())
    ]
    if not found:
        raise InputError(f"{path}: no checkpoint there; give a run folder or a checkpoint folder")
    return [checkpoint for _, checkpoint in found]


def _by_step(checkpoints: Path) -> dict[int, Path]:
    return {
        int(path.name.removeprefix("step_")): path
        for path in checkpoints.glob("step_*")
        if _STEP_FOLDER.fullmatch(path.name) and path.is_dir()
    }


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint; when that is interrupted, what is left of it looks like none."""
    shutil.rmtree(_hide(checkpoint), ignore_errors=True)


def named_by_latest(checkpoint: Path) -> bool:
    """Whether `latest` beside a checkpoint names it."""
    return _named(checkpoint.parent) == checkpoint.name


def find_checkpoint(path: Path) -> Path:
    """Like `newest_checkpoint`. Raises InputError if there is none."""
    if (checkpoint := newest_checkpoint(path)) is not None:
        return checkpoint
    raise InputError(
        f"{path}: no checkpoint there; give a run folder or a checkpoint folder such as "
        f"runs/<name>/checkpoints/step_<n>"
    )


def read_progress(checkpoint: Path) -> Progress:
    """Where the run stood when ``checkpoint`` was written. Raises InputError if it is damaged."""
    try:
        document = read_document(checkpoint / _PROGRESS)
        skipped = frozenset((source, sample) for source, sample in document.pop("skipped", ()))
        passed_over = tuple(document.pop("passed_over", ()))
        mixtures = tuple(_mixture(**given) for given in document.pop("mixtures", ()))
        progress = Progress(**document, skipped=skipped, passed_over=passed_over, mixtures=mixtures)
        if type(progress.step) is not int or progress.step < 0:
            raise ValueError(f"step {str(progress.step)[:80]!r} is no number of steps")
        positions = (-1, *passed_over, progress.used.end)
        if any(here >= after for here, after in itertools.pairwise(positions)):
            raise ValueError("passed_over is not ascending positions of used samples")
        firsts = (-1, *(mixture.first for mixture in mixtures), progress.used.end + 1)
        if any(here >= after for here, after in itertools.pairwise(firsts)):
            raise ValueError("mixtures do not begin one after another")
    except Unreadable:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{checkpoint / _PROGRESS} is damaged ({error}); copy the checkpoint again"
        ) from error
    return progress


def _mixture(streams: Sequence[Mapping[str, Any]], **given: Any) -> Mixture:
    return Mixture(streams=tuple(Stream(**stream) for stream in streams), **given)
