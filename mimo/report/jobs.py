"""What jobs have left in the folder of their run: which there were, and what they printed.

It may be all that there is: a job whose recipe is wrong ends before any rank starts.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mimo.config.source import read_yaml
from mimo.errors import InputError, RecipeError
from mimo.train.run_files import LAUNCH, json_lines

BY_HAND = "by hand"
"""The kind of a job that has noted itself."""
_READ_BYTES = 2**16  # of a job's output, from its end


def jobs_of(folder: Path) -> list[dict[str, Any]]:
    """Those that SLURM was given, the oldest first: time, job_id, kind and script.

    Whoever submits a job notes it, and the job itself does, in case that a person submitted it:
    perhaps both. What `mimo launch` says of its kind counts.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in json_lines(folder / LAUNCH / "jobs.jsonl"):
        number = str(line.get("job_id"))
        if number not in found or found[number].get("kind") == BY_HAND:
            found[number] = line
    return [*found.values()]


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
    found: list[tuple[float, Path]] = []
    for path in (path for where in job_folders(folder) for path in where.glob("job_*.out")):
        with suppress(FileNotFoundError):  # somebody is tidying up
            found.append((path.stat().st_mtime, path))
    for _, newest in sorted(found, reverse=True):
        with suppress(FileNotFoundError), newest.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return newest, deque((line for line in lines if line.strip()), num_lines)
    return None
