"""What the bridge promises, judged by the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mimo.bench.bridge_balance import Balance
from mimo.bench.bridge_planning import PLAN_RANKS, StepTime
from mimo.bench.bridge_result import Contest
from mimo.bench.outcome import Bound, median_ratio

JUDGED_TP = 4  # of the language model, with SP
_BYTES_OVER_BOUND = 1.01
_FEWER_BYTES = 3.9
_FASTER_FORWARD = 5.0
_FASTER_BOTH = 3.0
_PLAN_MS = 50.0  # 1 % of a step of 5 seconds
_IMBALANCE_OVER_BOUND = 1.05


def bounds(
    contests: Sequence[Contest], plans: Sequence[StepTime], balances: Sequence[Balance]
) -> list[Bound]:
    """Every promise, kept or not.

    All layouts into tp 4 with SP are judged: bytes in both sizes, speed in the larger one, where
    bytes matter more than the latency of single calls. The tables show all layouts.
    """
    judged = [c for c in contests if c.rival == "megatron" and c.sp and c.language_tp == JUDGED_TP]
    most_rows = max((contest.rows for contest in judged), default=0)
    found: list[Bound] = []
    for contest in judged:
        found += _bytes(contest)
        if contest.rows == most_rows:
            found += _speed(contest)
    found += [
        Bound(f"a step's plan for {plan.num_ranks} ranks, ms", plan.ms, _PLAN_MS, True)
        for plan in plans
        if plan.num_ranks == PLAN_RANKS[0] and not plan.packed
    ]
    found += [
        Bound(
            f"imbalance of {balance.num_items} items / its lower bound, worst draw",
            balance.worst,
            _IMBALANCE_OVER_BOUND,
            True,
        )
        for balance in balances
    ]
    return found


def _bytes(contest: Contest) -> Iterator[Bound]:
    where = f"{contest.case}, {contest.rows} rows"
    received = contest.rows_received
    ours, theirs, least = sum(received.ours), sum(received.theirs), sum(received.bound)
    yield Bound(f"{where}: bytes / lower bound", ours / least, _BYTES_OVER_BOUND, True)
    yield Bound(f"{where}: Megatron's bytes / ours", theirs / ours, _FEWER_BYTES, False)


def _speed(contest: Contest) -> Iterator[Bound]:
    where = f"{contest.case}, {contest.rows} rows"
    forward = median_ratio(contest.forward_theirs_ms, contest.forward_ours_ms)
    yield Bound(f"{where}: forward, times faster", forward, _FASTER_FORWARD, False)
    both = median_ratio(contest.both_theirs_ms, contest.both_ours_ms)
    yield Bound(f"{where}: forward + backward, times faster", both, _FASTER_BOTH, False)
