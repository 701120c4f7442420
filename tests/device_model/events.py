"""Events of a rank that a device would notice, with their lines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["error", "wait", "blocking copy", "object collective"]

_ROOT = Path(__file__).parents[2]
# Frames of torch and of helpers; their callers say more.
_SKIPPED_FRAMES = (
    "/torch/",
    "/tests/device_model/shadow",
    "/tests/device_model/events",
    "/engines/megatron/cpu.py",
    "/mimo/device.py",
)


@dataclass(frozen=True)
class Event:
    """Something that a device would have noticed.

    what: the operation. site: the innermost line of Megatron's, if it is one, and of ours.
    step, activity: what the rank was doing, see `mimo.train.step`.
    """

    kind: Kind
    what: str
    site: str
    step: int
    activity: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} at {self.site} (step {self.step}, {self.activity})"


@dataclass
class Record:
    """Counts of one rank's events, and the rank's present activity."""

    events: Counter[Event] = field(default_factory=Counter)
    step: int = -1
    activity: str = "setup"

    def note(self, kind: Kind, what: str) -> None:
        """Count one event at the current line."""
        self.events[Event(kind, what, _site(), self.step, self.activity)] += 1


def _site() -> str:
    """Like ``megatron/core/x.py:1 < mimo/y.py:2``, innermost first."""
    lines: list[str] = []
    for frame in frames():
        name = frame.f_code.co_filename
        if any(part in name for part in _SKIPPED_FRAMES):
            continue
        if name.startswith(str(_ROOT)) and "site-packages" not in name:
            lines.append(f"{Path(name).relative_to(_ROOT)}:{frame.f_lineno}")
            break
        if not lines:
            lines.append(f"{name.split('site-packages/')[-1]}:{frame.f_lineno}")
    return " < ".join(lines)


def frames() -> Iterator[Any]:
    """The caller's frames, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
