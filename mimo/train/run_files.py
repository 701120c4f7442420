"""Files of a run folder that others than its ranks read: their names, and what ranks last said.

Needs no engine, so looking at a run is quick.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mimo.train.hang import State

METRICS = "metrics.jsonl"
BAD_SAMPLES = "bad_samples.jsonl"
LAUNCH = "launch"
"""The folder, in the run folder, of what starts jobs: script, recipe, placement, output."""
RANKS = "ranks"
"""The folder of the files in which ranks say where they are, of `mimo.train.presence`."""
HANG = "hang"
"""The folder with the explanation of a hang; once it is there, all ranks tell and end."""
SUMMARY = "summary.txt"
CRASH = ".crash"
"""An empty file in the run folder, once the crash that it ends with is kept as an incident."""


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line; none if it is not there, and none of a cut line."""
    found = []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [one for one in found if isinstance(one, dict)]


def read_states(run_dir: Path, now: float, ranks: Iterable[int] | None = None) -> dict[int, State]:
    """What ranks last said, by rank; one that ended well, or has not come yet, has said nothing.

    now: seconds, by the file system's clock. ranks: those to read; None for all that are there.
    """
    folder = run_dir / RANKS
    if ranks is None:
        names = (path.stem.removeprefix("rank_") for path in folder.glob("rank_*.json"))
        ranks = sorted(int(name) for name in names if name.isdecimal())
    found = {}
    for rank in ranks:
        try:
            with (folder / f"rank_{rank}.json").open() as file:
                age = now - os.fstat(file.fileno()).st_mtime
                found[rank] = State(**{**json.load(file), "age_seconds": age})
        except (OSError, ValueError, TypeError):  # it has just ended, or was being written
            continue
    return found
