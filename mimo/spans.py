"""What this process does now, and how long it did what: spans, by module and part of the step.

Spans lie inside each other; time belongs to the innermost. Times are taken inside of steps alone.
On a CPU they are the host's. On a device they are those of its queue, which are known only after
the host has waited for it: the host waits once a step, so they come a step late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from torch.profiler import record_function

from mimo.device import Moment, moment, seconds_between

RANK = ""
"""In place of a module: what belongs to none of the rank's."""


class Span(NamedTuple):
    """What is done for a module.

    phase: the part of the step. edge: of a bridge, with a direction. number: of a microbatch.
    """

    module: str
    phase: str
    edge: str = ""
    number: int | None = None

    def __str__(self) -> str:
        number = "" if self.number is None else str(self.number)
        return " ".join(filter(None, (self.module, self.phase, self.edge, number)))


class Spans:
    """Of one process, which is one rank; threads that run a part of a step take turns.

    open: those that the process is in, the innermost last; any thread may look. named: whether a
    profiler wants to know them.
    """

    def __init__(self) -> None:
        self.open: list[Span] = []
        self.named = False
        self._in_step = False
        self.forget(on_device=False)

    def forget(self, on_device: bool) -> None:
        """Begin to measure; ``on_device``: whether by the clock of a device."""
        self._late = on_device
        self._measures = not self._late  # the first steps of a device are no measure
        self._since: Moment | None = None
        self._passed: list[tuple[Span, Moment, Moment]] = []
        self._waiting: list[tuple[Span, Moment, Moment]] = []
        self._seconds = defaultdict[tuple[str, str, str], float](float)
        self._num_periods = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step: all of its time belongs to some span."""
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
        """Inside it the process does this."""
        here = Span(module, phase, edge, number)
        self._charge()
        self.open.append(here)
        try:
            with record_function(str(here)) if self.named else nullcontext():
                yield
        finally:
            self._charge()
            self.open.pop()

    def wait(self, phase: str, edge: str = "", number: int | None = None):
        """A span of the module whose span the process is in."""
        return self.span(self.open[-1].module if self.open else RANK, phase, edge, number)

    def end_period(self, measures: bool) -> None:
        """Begin the next period; called once a step, before the host waits for the device.

        measures: the next one. On a CPU that costs nothing, so all are measured.
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
        """Mean seconds of a period by module, part and edge; what is known since the last call."""
        found = {key: value / self._num_periods for key, value in self._seconds.items()}
        self._seconds.clear()
        self._num_periods = 0
        return found

    def _charge(self) -> None:
        if not (self._in_step and self._measures):
            self._since = None
            return
        now = moment()
        if self.open and self._since is not None:
            self._passed.append((self.open[-1], self._since, now))
        self._since = now


SPANS = Spans()
