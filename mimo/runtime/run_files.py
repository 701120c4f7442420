"""Files of a run folder that reports read: their names, incidents, the environment of starts."""

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
BAD_SAMPLES = "bad_samples.jsonl"
INCIDENTS = "incidents.jsonl"
"""One JSON object a line, oldest first."""
ENVIRONMENT = "environment.json"
"""Where the run ran: one entry for each start, oldest first."""
LAUNCH = "launch"
"""The folder of what starts jobs: script, recipe, placement, output."""

_TIME = "%Y-%m-%dT%H:%M:%S%z"
_PACKAGES = (
    *("mimo-toolkit", "torch", "megatron-core", "transformers", "numpy"),
    *("transformer-engine", "flash-attn"),
)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one a line, without cut lines; none if it is absent."""
    entries = []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            entries.append(json.loads(line))
    return [entry for entry in entries if isinstance(entry, dict)]


def record(run_dir: Path, kind: str, text: str, step: int | None = None, **facts: Any) -> None:
    """Append one incident, or warn on stderr that it cannot; one process per incident calls it.

    text: one sentence for people. step: from 0; None outside of steps. facts: JSON for programs.
    """
    now = time.strftime(_TIME)
    line = json.dumps({"time": now, "kind": kind, "step": step, "text": text, **facts})
    try:
        with (run_dir / INCIDENTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")  # one write, so that lines of two processes do not mix
    except OSError as error:
        print(f"warning: {run_dir / INCIDENTS}: {error}; not kept: {line}", file=sys.stderr)


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    """Return all incidents of a run, oldest first."""
    return json_lines(run_dir / INCIDENTS)


def write_environment(
    run_dir: Path, num_ranks: int, step: int, device: str, summary: Mapping[str, str]
) -> None:
    """Add this start of the run, at ``step``, to `ENVIRONMENT`; the reporting rank calls it."""
    start = {
        "time": time.strftime(_TIME),
        "step": step,
        "host": socket.gethostname(),
        "ranks": num_ranks,
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "summary": dict(summary),
    }
    partial = run_dir / f".{ENVIRONMENT}"
    partial.write_text(json.dumps([*starts_of(run_dir), start], indent=1) + "\n")
    os.replace(partial, run_dir / ENVIRONMENT)


def starts_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return all starts of a run, oldest first; none if the file is absent or no JSON."""
    try:
        return json.loads((run_dir / ENVIRONMENT).read_text(errors="replace"))
    except (OSError, ValueError):
        return []


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that matter, by name."""
    installed = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
