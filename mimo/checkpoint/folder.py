"""The folder of a run's checkpoints: which there are, which is the latest, which may go.

Needs no engine, so the launcher can look at it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path

from mimo.errors import InputError
from mimo.recipe.phases import PHASE_FOLDER

_LATEST = "latest"
_PROGRESS = "progress.json"
_STEP_FOLDER = re.compile(r"step_[0-9]{1,18}")


@dataclass(frozen=True)
class Progress:
    """Where a run stands. The schedule follows from the step, the data from the samples.

    skipped: (data source, sample) of those that could not be read, numbered as the order of
    samples numbers them, so that it does not depend on the layout or the batch size.
    skipped_samples: how many there are. It is more than `skipped` names where a checkpoint had
    the count alone.
    """

    step: int
    samples: int
    skipped_samples: int = 0
    skipped: frozenset[tuple[int, int]] = frozenset()

    def with_skipped(self, found: Set[tuple[int, int]]) -> Progress:
        """The same with these samples skipped; each counts once, however often its turn comes."""
        new = found - self.skipped
        return replace(
            self,
            skipped_samples=self.skipped_samples + len(new),
            skipped=self.skipped | new,
        )


def write_progress(folder: Path, progress: Progress) -> None:
    """Say in a checkpoint's folder where the run stood."""
    document = vars(progress) | {"skipped": sorted(progress.skipped)}
    (folder / _PROGRESS).write_text(json.dumps(document))


def publish(partial: Path, progress: Progress, recipe_yaml: str, keep: int) -> Path:
    """Turn a folder with all tensors written into ``step_<n>``, the latest; one rank calls it."""
    checkpoints = partial.parent
    final = checkpoints / f"step_{progress.step}"
    write_progress(partial, progress)
    (partial / "recipe.yaml").write_text(recipe_yaml)
    replaced = checkpoints / f".step_{progress.step}.replaced"
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    pointer = checkpoints / f".{_LATEST}"
    pointer.write_text(final.name)
    os.replace(pointer, checkpoints / _LATEST)
    drop_old(checkpoints, keep, newest=final)
    return final


def drop_old(checkpoints: Path, keep: int, newest: Path) -> None:
    """Keep ``newest`` and the ``keep`` - 1 written last before it, whatever their steps are.

    After resuming from an earlier step, later steps of the abandoned run may stand beside it.
    """
    others = [p for p in checkpoints.glob("step_*") if p.is_dir() and p != newest]
    others.sort(key=lambda path: path.stat().st_mtime)
    for path in others[: max(0, len(others) - (keep - 1))]:
        shutil.rmtree(path, ignore_errors=True)


def phase_folders(run_dir: Path) -> dict[int, Path]:
    """The folders of a run's phases by number, in order; those that were moved aside are none."""
    found = {
        int(match[1]): path
        for path in run_dir.glob("phase_*")
        if (match := PHASE_FOLDER.fullmatch(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def final_checkpoint(run_dir: Path, steps: int) -> Path:
    """The checkpoint that a run of ``steps`` steps ends with, whether it is there yet or not."""
    return run_dir / "checkpoints" / f"step_{steps}"


def latest_checkpoint(path: Path) -> Path | None:
    """A checkpoint folder from itself, a run folder or its ``checkpoints`` folder.

    Raises InputError where ``latest`` names anything else than a checkpoint beside it.
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
    """As `latest_checkpoint`; of a run with phases, the latest of the last phase that has any."""
    for folder in (path, *reversed(phase_folders(path).values())):
        if (checkpoint := latest_checkpoint(folder)) is not None:
            return checkpoint
    return None


def find_checkpoint(path: Path) -> Path:
    """As `newest_checkpoint`. Raises InputError when there is none."""
    if (checkpoint := newest_checkpoint(path)) is not None:
        return checkpoint
    raise InputError(
        f"{path}: no checkpoint there; give a run folder or a checkpoint folder such as "
        f"runs/<name>/checkpoints/step_<n>"
    )


def read_progress(checkpoint: Path) -> Progress:
    """Where the run stood when ``checkpoint`` was written."""
    document = json.loads((checkpoint / _PROGRESS).read_text())
    skipped = frozenset((source, sample) for source, sample in document.pop("skipped", ()))
    return Progress(**document, skipped=skipped)
