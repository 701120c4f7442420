"""The folder of a run's checkpoints: which there are, which is the latest, which may go.

Needs no engine, so the launcher can look at it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from mimo.recipe_errors import InputError

_LATEST = "latest"
_PROGRESS = "progress.json"
_STEP_FOLDER = re.compile(r"step_[0-9]{1,18}")
_STAGE_FOLDER = re.compile(r"stage_(\d+)_[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Progress:
    """Where a run stands. The schedule follows from the step, the data from the samples."""

    step: int
    samples: int
    skipped_samples: int = 0


def write_progress(folder: Path, progress: Progress) -> None:
    """Say in a checkpoint's folder where the run stood."""
    (folder / _PROGRESS).write_text(json.dumps(asdict(progress)))


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


def stage_folder(number: int, name: str) -> str:
    """The name of the folder in which stage ``number``, counted from 1, has its run."""
    return f"stage_{number}_{name}"


def stage_folders(run_dir: Path) -> dict[int, Path]:
    """The folders of a run's stages by number, in order; those that were moved aside are none."""
    found = {
        int(match[1]): path
        for path in run_dir.glob("stage_*")
        if (match := _STAGE_FOLDER.fullmatch(path.name)) and path.is_dir()
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


def find_checkpoint(path: Path) -> Path:
    """A checkpoint folder from itself, a run folder or its ``checkpoints`` folder.

    Of a run with stages, the latest of the last stage that has any.
    Raises InputError when there is none.
    """
    for folder in (path, *reversed(stage_folders(path).values())):
        if (checkpoint := latest_checkpoint(folder)) is not None:
            return checkpoint
    raise InputError(
        f"{path}: no checkpoint there; give a run folder or a checkpoint folder such as "
        f"runs/<name>/checkpoints/step_<n>"
    )


def read_progress(checkpoint: Path) -> Progress:
    """Where the run stood when ``checkpoint`` was written."""
    return Progress(**json.loads((checkpoint / _PROGRESS).read_text()))
