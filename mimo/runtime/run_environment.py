"""On what a run ran: ``environment.json`` in its folder, one entry for each start, oldest first."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ENVIRONMENT = "environment.json"
_PACKAGES = (
    *("mimo-toolkit", "torch", "megatron-core", "transformers", "numpy"),
    *("transformer-engine", "flash-attn"),
)


def write_environment(
    run_dir: Path, num_ranks: int, step: int, device: str, summary: Mapping[str, str]
) -> None:
    """Add this start of the run, which does ``step`` next; the rank that reports calls it.

    device: what it is called. (Whoever reads the file needs no torch, so this asks for none.)
    summary: facts by name, of `mimo.train.run_summary`.
    """
    start = {**_here(num_ranks, step, device), "summary": dict(summary)}
    starts = [*starts_of(run_dir), start]
    partial = run_dir / f".{ENVIRONMENT}"
    partial.write_text(json.dumps(starts, indent=1) + "\n")
    os.replace(partial, run_dir / ENVIRONMENT)


def starts_of(run_dir: Path) -> list[dict[str, Any]]:
    """All starts of a run, oldest first; none where the file is not there or damaged."""
    try:
        found = json.loads((run_dir / ENVIRONMENT).read_text(errors="replace"))
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def versions() -> dict[str, str]:
    """Of the installed packages that matter."""
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _here(num_ranks: int, step: int, device: str) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "host": socket.gethostname(),
        "ranks": num_ranks,
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }
