"""Whether a run follows the reference: the same losses, but for rounding.

Another layout adds the same numbers up in another order. That changes the last bits of the first
losses, and training lets such differences grow, in fp32 some tenfold every ten steps once
the rate is high. An error changes the first updates by far more: a rate that is wrong by one
percent shows in the second loss at 6e-5. So the first steps are compared strictly, and with them
the gradient norm of every module, which shows a wrong gradient that the optimizer scales away.
After that the bound grows as rounding may, up to a limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mimo.experiment.runs import Record

STRICT_STEPS = 10
_STEPS_TO_DOUBLE = 10
_LIMIT = 0.05
# Relative differences that rounding may make in the first steps, by the precision of the weights.
_FIRST = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 0.02}


@dataclass(frozen=True)
class Followed:
    """How a run compares with the reference.

    difference: the largest relative one of the losses, at the step ``at``. problem: where it first
    leaves the bound, in words; empty if it never does.
    """

    difference: float
    at: int
    problem: str = ""


def bound(step: int, precision: str) -> float:
    """The relative difference of two losses at a step, counted from 0, that rounding explains."""
    doubled = max(0, step + 1 - STRICT_STEPS) / _STEPS_TO_DOUBLE
    return min(_FIRST[precision] * 2.0 ** min(doubled, 64.0), _LIMIT)


def difference(ours: float | None, theirs: float | None) -> float:
    """Relative to the reference's, ``theirs``; none of two that are both not finite."""
    if ours is None or theirs is None:  # as JSON has what is not finite
        return 0.0 if ours is theirs else math.inf
    return abs(ours - theirs) / abs(theirs) if ours != theirs and theirs else abs(ours - theirs)


def follow(records: Sequence[Record], reference: Sequence[Record], precision: str) -> Followed:
    """Compare a run's steps with the reference's; both have all of them."""
    largest, at, problem = 0.0, 0, ""
    for own, other in zip(records, reference, strict=True):
        step = own["step"]
        names = ["loss"]
        if step < STRICT_STEPS:
            names += [name for name in other if name.startswith("grad_norm")]
        for name in names:
            found = difference(own.get(name), other[name])
            if name == "loss" and found > largest:
                largest, at = found, step
            if not problem and found > (allowed := bound(step, precision)):
                problem = f"{name} of step {step + 1} is off by {found:.1e}, beyond {allowed:.1e}"
    return Followed(largest, at, problem)
