"""Whole jobs through the launcher in this process, whose ranks are disturbed as a test says."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mimo.runtime import processes
from mimo.runtime.ranks import launch
from mimo.train import main as job

RANK = f"{__name__}:run_rank"
Train = Callable[..., int]


def disturbing(patch: pytest.MonkeyPatch, disturb: str, given: Any) -> Train:
    """`train(recipe, overrides, **options)`, the command, returning its exit code.

    disturb: `module:function`; each rank calls it with ``given``, the number of the attempt, the
    run folder and where the run starts, before it does anything else.
    """
    attempts = 0

    def launch_disturbed(target: str, args: tuple[Any, ...], *rest: Any) -> int:
        nonlocal attempts
        attempts += 1
        return launch(RANK, (disturb, given, attempts - 1, args), *rest)

    # A rank that died silently is known to be the cause; what others say of it is not asked for.
    patch.setattr(processes, "_SILENT_CAUSE_SECONDS", 0.05)
    patch.setattr(job, "launch", launch_disturbed)

    def train(recipe: Path, overrides: Sequence[str], **options: Any) -> int:
        return job.main(recipe, overrides, **options)

    return train


def run_rank(disturb: str, given: Any, attempt: int, args: tuple[Any, ...]) -> int:
    """Runs inside ranks."""
    from mimo.train import rank

    pkgutil.resolve_name(disturb)(given, attempt, *args[2:4])
    return rank.run_rank(*args)


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
