"""Incidents of a run: ``incidents.jsonl`` in its folder, one JSON object a line, oldest first."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Literal

from mimo.train.run_files import json_lines

INCIDENTS = "incidents.jsonl"

Kind = Literal[
    "signal",
    "restart",
    "skipped step",
    "skipped samples",
    "not finite",
    "loss spike",
    "hang",
    "crash",
    "checkpoint",
]


def record(run_dir: Path, kind: Kind, text: str, step: int | None = None, **facts: Any) -> None:
    """Append one incident; one process per incident calls it.

    text: one sentence for people. step: counted from 0; None outside of steps. facts: whatever a
    program may want to know besides, as JSON.
    A folder that cannot be written to is said on stderr and is no reason to end.
    """
    moment = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    line = json.dumps({"time": moment, "kind": kind, "step": step, "text": text, **facts})
    try:
        with (run_dir / INCIDENTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")  # one write, so that lines of two processes do not mix
    except OSError as error:
        print(f"warning: {run_dir / INCIDENTS}: {error}; not kept: {line}", file=sys.stderr)


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    """All incidents of a run, oldest first; a line that was cut off is left out."""
    return json_lines(run_dir / INCIDENTS)
