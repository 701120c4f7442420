"""A trace of some steps of some ranks, for chrome://tracing or Perfetto: `train.profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch

from mimo.config.schema import Train
from mimo.device import traced_activities
from mimo.spans import SPANS

PROFILE = "profile"
"""The folder of traces, in the run folder."""


class Profiler:
    """Traces some steps of this rank, with the spans of mimo.spans as named ranges.

    steps: empty on a rank that is not traced, which then costs nothing.
    """

    def __init__(self, steps: range, path: Path) -> None:
        self._steps, self._path = steps, path
        self._running: torch.profiler.profile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def reaches(self, step: int) -> None:
        """The next step is ``step``."""
        if self._running is not None and step not in self._steps:
            self._stop()
        elif self._running is None and step in self._steps:
            activities = traced_activities()
            self._running = torch.profiler.profile(activities=activities, acc_events=True)
            self._running.start()
            SPANS.named = True

    def _stop(self) -> None:
        """Write what was traced."""
        if self._running is None:
            return
        running, self._running = self._running, None
        SPANS.named = False
        running.stop()
        self._path.parent.mkdir(exist_ok=True)
        running.export_chrome_trace(str(self._path))


def profiler_of(train: Train, rank: int, run_dir: Path) -> Profiler:
    """As the recipe says, for one rank."""
    wanted = train.profile
    if wanted is None or rank not in wanted.ranks:
        return Profiler(range(0), run_dir)
    first, last = wanted.steps
    name = f"rank_{rank}_steps_{first}_to_{last}.json"
    return Profiler(range(first, last + 1), run_dir / PROFILE / name)
