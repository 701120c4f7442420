"""Whole jobs through the launcher in this process, whose ranks are disturbed as a test says."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mimo.runtime.ranks import launch
from mimo.train import main as job
from tests.ranks import running

RANK = f"{__name__}:run_rank"
Train = Callable[..., int]


def disturbing(patch: pytest.MonkeyPatch, disturb: str, fault: Any) -> Train:
    """`train(recipe, overrides, **options)`, the command, returning its exit code.

    disturb: `module:function`; each rank calls it with ``fault``, the number of the attempt, the
    run folder and where the run starts, before it does anything else.
    """
    attempts = 0

    def launch_disturbed(target: str, args: tuple[Any, ...], *rest: Any) -> int:
        nonlocal attempts
        attempts += 1
        return launch(RANK, (disturb, fault, attempts - 1, args), *rest)

    patch.setattr(job, "launch", launch_disturbed)

    def train(recipe: Path, overrides: Sequence[str], **options: Any) -> int:
        return job.main(recipe, overrides, **options)

    return train


def run_rank(disturb: str, fault: Any, attempt: int, args: tuple[Any, ...]) -> int:
    """Runs inside ranks."""
    from mimo.train import entry

    run_dir, start = args[2:4]
    (run_dir / f"pid_{attempt}_{os.environ['RANK']}").write_text(str(os.getpid()))
    pkgutil.resolve_name(disturb)(fault, attempt, run_dir, start)
    return entry.run_rank(*args)


def running_ranks(run_dir: Path) -> list[int]:
    """Processes of the run's ranks that have not ended; at least one has begun."""
    pids = [int(path.read_text()) for path in run_dir.glob("pid_*")]
    assert pids
    return running(pids)


def when_at(step: int, activity: str, strike: Callable[[], object]) -> None:
    """Call ``strike`` when this rank begins the activity of that step, or of the next that has it.

    A step without a checkpoint has no such activity.
    """
    from mimo.runtime.hang_monitor import HangMonitor

    tell, struck = HangMonitor.at, False

    def at(self: HangMonitor, now: int, doing: str) -> None:
        nonlocal struck
        tell(self, now, doing)
        if now >= step and doing == activity and not struck:
            struck = True
            strike()

    HangMonitor.at = at  # type: ignore[method-assign]
