"""The folder of a run's checkpoints: which exist, which is the latest, which may be deleted.

A checkpoint is `step_<n>`. While it is written or removed it has a hidden name, `.step_<n>.*`: a
run that is killed at any moment leaves complete checkpoints, and the next save removes the rest.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from data.order import Mixture
from data.packing import Used
from mimo.checkpoint.manifest import (
    MANIFEST,
    Sum,
    parsing,
    read_document,
    reading,
    sync_and_sum,
    sync_folder,
    write_manifest,
    write_synced,
)
from mimo.config.phases import PHASE_FOLDER
from mimo.config.schema import Recipe
from mimo.errors import InputError

_LATEST = "latest"
_PROGRESS = "progress.json"
_STEP_FOLDER = re.compile(r"step_[0-9]{1,18}")


@dataclass(frozen=True)
class Progress:
    """Where a run stands. The schedule follows from the step, the data from the samples.

    samples, passed_over: the samples of the order that are used, see `data.packing.Used`.
    skipped_samples: number of samples that could not be read, including those of removed sources.
    skipped: (data source, sample) of those in the present sources, independent of layout and batch
    size. mixtures: the order of samples so far. skipped_steps: number of steps that updated no
    module, because a number was not finite.
    """

    step: int
    samples: int
    skipped_samples: int = 0
    skipped: frozenset[tuple[int, int]] = frozenset()
    passed_over: tuple[int, ...] = ()
    mixtures: tuple[Mixture, ...] = ()
    skipped_steps: int = 0

    @property
    def used(self) -> Used:
        return Used(self.samples, self.passed_over)

    def after_step(self, step: int, used: Used, is_skipped: bool) -> "Progress":
        return replace(
            self,
            step=step + 1,
            samples=used.samples,
            passed_over=used.passed_over,
            skipped_steps=self.skipped_steps + is_skipped,
        )

    def with_skipped(self, samples: Set[tuple[int, int]]) -> "Progress":
        """Return the progress with these samples skipped too; each counts once."""
        count = self.skipped_samples + len(samples - self.skipped)
        return replace(self, skipped_samples=count, skipped=self.skipped | samples)


def write_progress(folder: Path, progress: Progress) -> None:
    """Record in a checkpoint's folder where the run stood."""
    document = asdict(progress) | {"skipped": sorted(progress.skipped)}
    write_synced(folder / _PROGRESS, json.dumps(document))


def read_progress(checkpoint: Path) -> Progress:
    """Return where the run stood when ``checkpoint`` was written. Raises InputError if damaged."""
    with parsing(checkpoint / _PROGRESS):
        return TypeAdapter(Progress).validate_python(read_document(checkpoint / _PROGRESS))


def complete(
    folder: Path, progress: Progress, recipe_yaml: str, sums: Mapping[str, Sum] | None = None
) -> None:
    """Make a folder of tensors a checkpoint, the manifest last. sums: of files already on disk."""
    write_progress(folder, progress)
    write_synced(folder / "recipe.yaml", recipe_yaml)
    # A listing of a shared file system may lack files that other machines have written.
    files = dict(sums or {})
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in files and name != MANIFEST:
            files[name] = sync_and_sum(path)
    write_manifest(folder, files)
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_folder(inner)


def publish(
    partial: Path,
    progress: Progress,
    recipe_yaml: str,
    keep: int,
    keep_every: int | None = None,
    sums: Mapping[str, Sum] | None = None,
    when_complete: Callable[[], None] = lambda: None,
) -> Path:
    """Turn a folder with all tensors in it into ``step_<n>``, the latest; one rank calls it.

    sums: see `complete`. when_complete: called when only the final name is missing.
    """
    checkpoints = partial.parent
    final = checkpoints / f"step_{progress.step}"
    complete(partial, progress, recipe_yaml, sums)
    when_complete()
    if final.exists():  # of a run that resumed from an earlier step; `latest` may name it
        if others := [path for path in _by_age(checkpoints) if path != final]:
            _point_latest_to(others[-1])
        _hide(final)
    partial.rename(final)
    sync_folder(checkpoints)
    _point_latest_to(final)
    drop_old(checkpoints, keep, final, keep_every)
    return final


def _point_latest_to(checkpoint: Path) -> None:
    write_synced(checkpoint.with_name(_LATEST), checkpoint.name)
    sync_folder(checkpoint.parent)


def _hide(checkpoint: Path) -> Path:
    """Give a checkpoint a hidden name, atomically; `drop_old` removes it later."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)  # half removed by a run that was killed
    return checkpoint.rename(hidden)


def to_remove(
    checkpoints: Path, keep: int, keep_every: int | None, newest: Path | None = None
) -> list[Path]:
    """Return the surplus checkpoints, oldest first.

    ``newest`` (default: `latest`), ``keep`` - 1 before it and multiples of ``keep_every`` stay.
    """
    newest = newest or latest_checkpoint(checkpoints)
    others = [path for path in _by_age(checkpoints) if path != newest]
    others = others[: max(0, len(others) - keep + (newest is not None))]
    return [path for path in others if keep_every is None or _step_of(path) % keep_every]


def drop_old(checkpoints: Path, keep: int, newest: Path, keep_every: int | None = None) -> None:
    """Remove the checkpoints of `to_remove`, and what killed runs have left."""
    for path in to_remove(checkpoints, keep, keep_every, newest):
        with suppress(OSError):  # the next save tries again
            _hide(path)
    for path in checkpoints.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint; if interrupted, the rest of it does not look like a checkpoint."""
    shutil.rmtree(_hide(checkpoint), ignore_errors=True)


def return_to(checkpoint: Path, damaged: Iterable[Path]) -> None:
    """Make a checkpoint the latest, and rename damaged ones to ``damaged_step_<n>``.

    One process calls it, with the run's lock. Raises InputError if the folder is not writable.
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


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def _by_age(checkpoints: Path) -> list[Path]:
    named = (path for path in checkpoints.glob("step_*") if _STEP_FOLDER.fullmatch(path.name))
    return sorted(filter(Path.is_dir, named), key=lambda path: path.stat().st_mtime)


def phase_folders(run_dir: Path) -> dict[int, Path]:
    """Return the folders of a run's phases by number, in order, without those moved aside."""
    folders = {
        int(match[1]): path
        for path in run_dir.glob("phase_*")
        if (match := PHASE_FOLDER.fullmatch(path.name)) and path.is_dir()
    }
    return dict(sorted(folders.items()))


def final_checkpoint(recipe: Recipe) -> Path:
    """Return the path of a run's last checkpoint, whether or not it exists yet."""
    return recipe.run_dir / "checkpoints" / f"step_{recipe.train.steps}"


def latest_checkpoint(path: Path) -> Path | None:
    """Return the latest checkpoint of ``path``: a run, a ``checkpoints`` folder or a checkpoint.

    A run with phases gives that of its last phase with a checkpoint. None if there is none.
    """
    for run in (path, *reversed(phase_folders(path).values())):
        for folder in (run, run / "checkpoints"):
            if (folder / _PROGRESS).is_file():
                return folder
            if (name := _named_by_latest(folder)) and (folder / name / _PROGRESS).is_file():
                return folder / name
    return None


def find_checkpoint(path: Path) -> Path:
    """Like `latest_checkpoint`. Raises InputError if there is none."""
    if (checkpoint := latest_checkpoint(path)) is not None:
        return checkpoint
    raise InputError(
        f"{path}: no checkpoint there, or `latest` does not name one; give a run folder or a "
        f"checkpoint folder such as runs/<name>/checkpoints/step_<n>"
    )


def all_checkpoints(path: Path) -> list[Path]:
    """Return a run's checkpoints by step, damaged ones included. Raises InputError without any."""
    if _STEP_FOLDER.fullmatch(path.name) or (path / _PROGRESS).is_file():
        return [path]
    runs = (path, *phase_folders(path).values())
    folders = [folder for run in runs for folder in (run, run / "checkpoints")]
    checkpoints = [path for folder in folders for path in sorted(_by_age(folder), key=_step_of)]
    if not checkpoints:
        raise InputError(f"{path}: no checkpoint there; give a run folder or a checkpoint folder")
    return checkpoints


def resumable(run_dir: Path) -> list[Path]:
    """Return the checkpoints from which a run could continue, best first; some may be damaged.

    First what `latest` names, else the one written last; then those of fewer steps, as others
    belong to an abandoned run.
    """
    folder = run_dir / "checkpoints"
    with reading(folder):
        by_age = _by_age(folder)
    named = [folder / name] if (name := _named_by_latest(folder)) else []
    best = (named or by_age[-1:])[:1]
    before = (path for path in by_age if _step_of(path) < _step_of(best[0]))
    return best + sorted(before, key=_step_of, reverse=True)


def _named_by_latest(checkpoints: Path) -> str:
    """Return the name of a checkpoint in ``latest``; empty if there is none."""
    name = ""
    with suppress(OSError), reading(checkpoints / _LATEST):
        name = (checkpoints / _LATEST).read_text(encoding="utf-8", errors="replace").strip()
    return name if _STEP_FOLDER.fullmatch(name) else ""


def named_by_latest(checkpoint: Path) -> bool:
    """Return whether `latest` beside a checkpoint names it."""
    return _named_by_latest(checkpoint.parent) == checkpoint.name


def belongs_to(checkpoint: Path, run_dir: Path) -> bool:
    """Return whether it is one of the run's own checkpoints, which `latest` there may name."""
    real = checkpoint.resolve()
    is_inside = real.parent == (run_dir / "checkpoints").resolve()
    return is_inside and _STEP_FOLDER.fullmatch(real.name) is not None
