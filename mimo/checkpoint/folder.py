"""The folder of a run's checkpoints: which exist, which is the latest, which may be deleted.

Needs no engine, so the launcher can use it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data.order import Mixture, Stream
from data.packing import Used
from mimo.errors import InputError
from mimo.recipe.phases import PHASE_FOLDER

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


def write_synced(path: Path, text: str) -> None:
    """Write a file that is on disk on return, so that older checkpoints may be deleted."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_progress(folder: Path, progress: Progress) -> None:
    """Record in a checkpoint's folder where the run stood."""
    document = asdict(progress) | {"skipped": sorted(progress.skipped)}
    write_synced(folder / _PROGRESS, json.dumps(document))


def publish(partial: Path, progress: Progress, recipe_yaml: str, keep: int) -> Path:
    """Turn a folder with all tensors in it into ``step_<n>``, the latest; one rank calls it."""
    checkpoints = partial.parent
    final = checkpoints / f"step_{progress.step}"
    write_progress(partial, progress)
    write_synced(partial / "recipe.yaml", recipe_yaml)
    replaced = checkpoints / f".step_{progress.step}.replaced"
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    pointer = checkpoints / f".{_LATEST}"
    write_synced(pointer, final.name)
    os.replace(pointer, checkpoints / _LATEST)
    for folder in (final, checkpoints):
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)  # the names in it
        os.close(descriptor)
    drop_old(checkpoints, keep, newest=final)
    return final


def drop_old(checkpoints: Path, keep: int, newest: Path) -> None:
    """Keep ``newest`` and the ``keep`` - 1 written last before it, whatever their steps are.

    After resuming from an earlier step, later steps of the abandoned run may still be there.
    """
    others = [p for p in checkpoints.glob("step_*") if p.is_dir() and p != newest]
    others.sort(key=lambda path: path.stat().st_mtime)
    for path in others[: max(0, len(others) - (keep - 1))]:
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
        document = json.loads((checkpoint / _PROGRESS).read_text())
        skipped = frozenset((source, sample) for source, sample in document.pop("skipped", ()))
        passed_over = tuple(document.pop("passed_over", ()))
        mixtures = tuple(_mixture(**given) for given in document.pop("mixtures", ()))
        progress = Progress(**document, skipped=skipped, passed_over=passed_over, mixtures=mixtures)
        positions = (-1, *passed_over, progress.used.end)
        if any(here >= after for here, after in itertools.pairwise(positions)):
            raise ValueError("passed_over is not ascending positions of used samples")
        firsts = (-1, *(mixture.first for mixture in mixtures), progress.used.end + 1)
        if any(here >= after for here, after in itertools.pairwise(firsts)):
            raise ValueError("mixtures do not begin one after another")
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{checkpoint / _PROGRESS} is damaged ({error}); copy the checkpoint again"
        ) from error
    return progress


def _mixture(streams: Sequence[Mapping[str, Any]], **given: Any) -> Mixture:
    return Mixture(streams=tuple(Stream(**stream) for stream in streams), **given)
