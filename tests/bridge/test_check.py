"""Checked mode on real ranks."""

from __future__ import annotations

import pytest

from bridge import BridgeError, check_plans
from tests.bridge.two_grids import Case, build_end
from tests.cases import quick
from tests.conftest import RunRanks

# ------------------------------------------------------- functions that run inside ranks


def compare_plans(rank: int, case: Case, other: str, odd_rank: int) -> str:
    """Rank ``odd_rank`` has other "transfers" or other "samples" in microbatch 2."""
    end, plans = build_end(rank, case).end, case.plans()
    keys = [[f"sample{m}{i}" for i in range(4)] for m in range(len(plans))]
    check_plans(end, plans, lambda m: keys[m])
    check_plans(end, plans)
    if rank == odd_rank and other == "transfers":
        plans[2] = plans[3]
    if rank == odd_rank and other == "samples":
        keys[2] = keys[3]
    with pytest.raises(BridgeError) as caught:
        check_plans(end, plans, lambda m: keys[m])
    assert caught.value.microbatch == 2
    return str(caught.value)


# ------------------------------------------------------------------------- on ranks


@pytest.mark.parametrize("other", quick(["transfers", "samples"], "samples"))
def test_check_of_plans_names_the_ranks_that_differ_and_the_microbatch(
    run_ranks: RunRanks, other: str
) -> None:
    messages = run_ranks(compare_plans, 3, Case(1, 1, 2, 1), other, 1)
    assert set(messages) == {
        "bridge vision, microbatch 2: ranks [0, 2] and ranks [1] planned different "
        f"{other}; they read different data indexes or recipes"
    }
