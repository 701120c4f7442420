"""What every benchmark ends with: bounds that are kept or missed, a picture, the figures."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from mimo.device import backend

_WIDTH = 140  # of tables in a file


class RanksFailed(RuntimeError):
    """The ranks of a comparison failed and said why; `exit_code` is theirs."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the ranks of the benchmark failed with exit code {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True)
class Bound:
    """One promise: `value` at most, or at least, `limit`."""

    name: str
    value: float
    limit: float
    at_most: bool

    @property
    def holds(self) -> bool:
        """Whether it was kept."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        """For example `plan for 1024 ranks, ms: 3.1, at most 5`."""
        way = "at most" if self.at_most else "at least"
        return f"{self.name}: {self.value:.4g}, {way} {self.limit:g}"


def machine() -> dict[str, Any]:
    """The machine and software that the figures depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
        "megatron-core": version("megatron-core"),
        "backend": backend(),
    }


def median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Median over alternating pairs of runs: how many times longer theirs took."""
    return statistics.median(t / o for t, o in zip(theirs, ours, strict=True))


def open_console() -> Console:
    """As wide as the terminal; in a file, tables may be wide."""
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


def conclude(
    bounds: Sequence[Bound],
    draw: Callable[[Path], object],
    picture: Path,
    figures: str,
    json_path: Path | None,
) -> int:
    """Draw the picture, write the figures if asked for, and return 1 when a bound is missed."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(picture)
    print(f"picture: {picture}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(figures)
        print(f"figures: {json_path}")
    missed = [bound for bound in bounds if not bound.holds]
    for bound in missed:
        print(f"missed: {bound}")
    print(f"bounds_kept={len(bounds) - len(missed)} bounds_missed={len(missed)}")
    return 1 if missed else 0
