"""Whether a run follows the reference: the same losses, but for rounding.

Another layout adds the same numbers up in another order. That changes the last bits of the first
losses, and training lets such differences grow, in fp32 some tenfold every ten steps once the rate
is high. An error changes the first updates by far more: a rate that is wrong by one percent shows
in the second loss at 6e-5. So the first steps are compared strictly, and with them the gradient
norm of every module, which shows a wrong gradient that the optimizer scales away. After that the
bound grows as rounding may.

After some hundred steps rounding alone has led to other weights, and the losses of single steps say
nothing any more: those of right layouts differ by 160 %. From there on means over many steps are
compared, which shows only whether a run learns about as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mimo.report.experiment.runs import Record

STRICT_STEPS = 10
_STEPS_TO_DOUBLE = 10
_LIMIT = 0.05
# Of the means over so many steps; right layouts of the quickstart differed by up to 7 %.
_WINDOW, _MEAN_LIMIT = 100, 0.25
# Relative differences that rounding may make in the first steps, by the precision of the weights.
_FIRST = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 0.02}


@dataclass(frozen=True)
class Followed:
    """How a run compares with the reference.

    difference: the largest relative one of the losses of single steps that have a bound, at the
    step ``at``. problem: where it first leaves the bound, in words; empty if it never does.
    """

    difference: float
    at: int
    problem: str = ""


def bound(step: int, precision: str) -> float | None:
    """The relative difference of two losses at a step, counted from 0, that rounding explains.

    None where that is any.
    """
    doubled = max(0, step + 1 - STRICT_STEPS) / _STEPS_TO_DOUBLE
    allowed = _FIRST[precision] * 2.0 ** min(doubled, 64.0)
    return allowed if allowed <= _LIMIT else None


def difference(ours: float | None, theirs: float | None) -> float:
    """Relative to the reference's, ``theirs``; none of two that are both not finite."""
    if ours is None or theirs is None:  # as JSON has what is not finite
        return 0.0 if ours is theirs else math.inf
    return abs(ours - theirs) / abs(theirs) if ours != theirs and theirs else abs(ours - theirs)


def follow(records: Sequence[Record], reference: Sequence[Record], precision: str) -> Followed:
    """Compare a run's steps with the reference's; both have all of them."""
    largest, at, problem = 0.0, 0, ""
    for own, other in zip(records, reference, strict=True):
        step, name = own["step"], "loss"
        if (allowed := bound(step, precision)) is None:
            allowed, name = _MEAN_LIMIT, f"the mean loss of {_WINDOW} steps"
            found = difference(_mean(records, step), _mean(reference, step))
        else:
            found = difference(own["loss"], other["loss"])
            if found > largest:
                largest, at = found, step
        if step < STRICT_STEPS:
            norms = [norm for norm in other if norm.startswith("grad_norm")]
            off = {norm: difference(own.get(norm), other[norm]) for norm in norms}
            found, name = max((found, name), *((value, norm) for norm, value in off.items()))
        if not problem and found > allowed:
            problem = f"{name} of step {step + 1} is off by {found:.1e}, beyond {allowed:.1e}"
    return Followed(largest, at, problem)


def _mean(records: Sequence[Record], step: int) -> float | None:
    """Of the finite losses of the last steps up to this one."""
    found = [one["loss"] for one in records[max(0, step + 1 - _WINDOW) : step + 1]]
    finite = [loss for loss in found if loss is not None]
    return fmean(finite) if finite else None
