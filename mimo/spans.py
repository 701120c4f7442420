"""Spans: what this process is doing, and seconds by module and part of the step.

Spans nest; time belongs to the innermost. Only time inside steps is measured: on a CPU the host's,
on a device that of its queue, which is known after the host has waited for it, one step later.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from torch.profiler import record_function

from mimo.device import Timestamp, record_time, seconds_between

RANK = ""
"""Stands for work that belongs to no module of the rank."""


class Span(NamedTuple):
    """Work for a module. phase: part of the step. edge: bridge, direction. number: microbatch."""

    module: str
    phase: str
    edge: str = ""
    number: int | None = None

    def __str__(self) -> str:
        number = "" if self.number is None else str(self.number)
        return " ".join(filter(None, (self.module, self.phase, self.edge, number)))


class Spans:
    """Spans of one process, which is one rank; threads that run a part of a step take turns.

    open: the current spans, the innermost last; any thread may read. named: whether a profiler
    records them.
    """

    def __init__(self) -> None:
        self.open: list[Span] = []
        self.named = False
        self._in_step = False
        self.forget(on_device=False)

    def forget(self, on_device: bool) -> None:
        """Start measuring afresh. on_device: use the clock of the device."""
        self._late = on_device
        self._measures = not self._late  # the first steps of a device are not measured
        self._since: Timestamp | None = None
        self._passed: list[tuple[Span, Timestamp, Timestamp]] = []
        self._waiting: list[tuple[Span, Timestamp, Timestamp]] = []
        self._seconds = defaultdict[tuple[str, str, str], float](float)
        self._num_periods = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step: all of its time belongs to some span."""
        self._in_step, self._since = True, None
        try:
            with self.span(RANK, "other"):
                yield
        finally:
            self._in_step = False

    @contextmanager
    def span(
        self, module: str, phase: str, edge: str = "", number: int | None = None
    ) -> Iterator[None]:
        span = Span(module, phase, edge, number)
        self._charge()
        self.open.append(span)
        try:
            with record_function(str(span)) if self.named else nullcontext():
                yield
        finally:
            self._charge()
            self.open.pop()

    def wait(self, phase: str, edge: str = "", number: int | None = None):
        """Enter a span of the current module."""
        return self.span(self.open[-1].module if self.open else RANK, phase, edge, number)

    def end_period(self, measures: bool) -> None:
        """Begin the next period; called once a step, before the host waits for the device.

        measures: whether to measure the next period; on a CPU all are measured.
        """
        self._charge()
        done = self._passed
        if self._late:
            done, self._waiting = self._waiting, self._passed
        self._passed = []
        for span, first, last in done:
            self._seconds[span[:3]] += seconds_between(first, last)
        self._num_periods += bool(done)
        self._measures = measures or not self._late

    def take(self) -> dict[tuple[str, str, str], float]:
        """Return mean seconds of a period by module, part and edge since the last call."""
        means = {key: value / self._num_periods for key, value in self._seconds.items()}
        self._seconds.clear()
        self._num_periods = 0
        return means

    def _charge(self) -> None:
        if not (self._in_step and self._measures):
            self._since = None
            return
        now = record_time()
        if self.open and self._since is not None:
            self._passed.append((self.open[-1], self._since, now))
        self._since = now


SPANS = Spans()
