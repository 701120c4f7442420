"""Whether a run ends before its last step: all ranks agree on it, with the loss of a step."""

from __future__ import annotations

import time

import numpy as np

from mimo.runtime.signals import ASKING, asked

SAVE_FAILED = "a checkpoint that was not written"
_TIME_IS_UP = "train.max_minutes"
_REASONS = (*(signum.name for signum in ASKING), _TIME_IS_UP, SAVE_FAILED)


class Ending:
    """Why a run is to end after the current step, if it is.

    A signal may reach one rank only, and clocks differ. So each rank has `flags`, which travel with
    a sum over all ranks that there is anyway, and `agree` makes of the sums the same on all ranks.
    deadline: on this machine's monotonic clock; given on one rank, whose clock decides.
    own: further reasons of this rank.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self.own: tuple[str, ...] = ()
        self.reasons: tuple[str, ...] = ()

    def flags(self) -> np.ndarray:
        """(R,) for each reason, 1.0 if this rank has it."""
        own = (*asked(), *self.own)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            own = (*own, _TIME_IS_UP)
        return np.array([float(reason in own) for reason in _REASONS])

    def agree(self, sums: np.ndarray) -> None:
        """Take (R,) sums of `flags` over all ranks; what was once agreed on stays."""
        found = [reason for reason, count in zip(_REASONS, sums, strict=True) if count > 0]
        self.reasons = tuple(dict.fromkeys((*self.reasons, *found)))
