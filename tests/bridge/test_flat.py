"""A tower's rows per item are those of the plan, or are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridge import ItemRows, ItemRuns, UnexpectedRows, check_rows

# Two microbatches of three and two samples; lanes 0 and 1 encode their items in turn.
RUNS = [
    ItemRuns(
        sample=np.array([0, 0, 2, 2, 2]),
        source_lane=np.array([0, 1, 0, 1, 0]),
        destination_lane=np.zeros(5, np.int64),
        position=np.arange(5),
        rows=np.array([4, 9, 1, 2, 6]),
        num_samples=3,
    ),
    ItemRuns(
        sample=np.array([1, 1]),
        source_lane=np.array([0, 0]),
        destination_lane=np.zeros(2, np.int64),
        position=np.arange(2),
        rows=np.array([3, 5]),
        num_samples=2,
    ),
]


def check(*rows_per_item: int, runs: list[ItemRuns] = RUNS, lane: int = 0) -> None:
    """Check rows of size 2, as many as the items say."""
    plans: Any = [SimpleNamespace(runs=of_plan, source_parts=1) for of_plan in runs]
    end: Any = SimpleNamespace(name="vision", hidden_size=2)
    check_rows(end, 6, plans, lane, ItemRows(torch.zeros(sum(rows_per_item), 2), rows_per_item))


def test_rows_of_the_planned_items_of_all_microbatches_are_taken() -> None:
    check(4, 1, 6, 3, 5)
    check(9, 2, lane=1)
    check(4, 1, 6, runs=RUNS[:1])
    assert RUNS[0].rows_of_lane(0) == (4, 1, 6)


def test_a_lane_without_items_has_no_rows() -> None:
    check(runs=RUNS[1:], lane=1)


@pytest.mark.parametrize(
    ("produced", "message", "microbatch", "sample"),
    [
        # The sums of every sample and of the whole are right: only the order is wrong.
        ((4, 6, 1, 3, 5), "microbatch 6: .* 6 rows for item 1 of 3, .* planned are 1", 6, 2),
        ((4, 1, 6, 5, 3), "microbatch 7: .* 5 rows for item 0 of 2, .* planned are 3", 7, 1),
        ((4, 1, 6, 3, 4), "microbatch 7: .* 4 rows for item 1 of 2, .* planned are 5", 7, 1),
        ((4, 1, 5, 4, 5), "microbatch 6: .* 5 rows for item 2 of 3, .* planned are 6", 6, 2),
        ((3, 1, 6, 3, 5), "microbatch 6: .* 3 rows for item 0 of 3, .* planned are 4", 6, 0),
    ],
)
def test_the_first_item_with_other_rows_than_planned_is_named(
    produced: tuple[int, ...], message: str, microbatch: int, sample: int
) -> None:
    with pytest.raises(UnexpectedRows, match=f"^encoder vision, lane 0, {message}") as caught:
        check(*produced)
    assert (caught.value.microbatch, caught.value.sample) == (microbatch, sample)


@pytest.mark.parametrize("produced", [(), (4, 1, 6, 3), (4, 1, 6, 3, 5, 0)])
def test_rows_of_another_number_of_items_are_refused(produced: tuple[int, ...]) -> None:
    with pytest.raises(UnexpectedRows, match=rf"of {len(produced)} items .* planned are 5 \[4, 1,"):
        check(*produced)
