"""What jobs have left in the folder of their run: which there were, and what they printed.

It may be all that there is: a job whose recipe is wrong ends before any rank starts.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mimo.errors import InputError, RecipeError
from mimo.recipe.source import read_yaml
from mimo.train.run_files import LAUNCH, json_lines

_READ_BYTES = 2**16  # of a job's output, from its end


def jobs_of(folder: Path) -> list[dict[str, Any]]:
    """Those that `mimo launch` submitted, the oldest first: time, job_id, kind and script."""
    return json_lines(folder / LAUNCH / "jobs.jsonl")


def job_folders(folder: Path) -> list[Path]:
    """Where jobs write: in the run folder, or where `cluster.log_dir` says."""
    own = folder / LAUNCH
    try:
        section = read_yaml(own / "recipe.yaml").data.get("cluster")
    except (RecipeError, InputError):  # no job was launched, or one is just being
        return [own]
    given = section.get("log_dir") if isinstance(section, dict) else None
    if not isinstance(given, str):
        return [own]
    # Jobs begin in the folder that relative paths, that of the run among them, begin in.
    # Each run has a folder of its own there.
    places = (above / given / folder.name for above in folder.resolve().parents)
    return [own, *(place for place in places if place.is_dir())]


def last_words(folder: Path, num_lines: int) -> tuple[Path, Sequence[str]] | None:
    """The output of the newest job, and its last lines, but for empty ones; None without any."""
    paths = [path for where in job_folders(folder) for path in where.glob("job_*.out")]
    if not paths:
        return None
    newest = max(paths, key=lambda path: path.stat().st_mtime)
    with newest.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return newest, deque((line for line in lines if line.strip()), num_lines)
