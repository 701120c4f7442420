"""Levels side by side in one message, taken by chunks that run at different times.

Letters: n rows, H hidden.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bridge import (
    BridgePlan,
    BridgeReceiver,
    BridgeSender,
    ItemRows,
    ItemRuns,
    LevelReceiver,
    ReplicatedSource,
    sharded_destination,
    split_levels,
    take_chunk,
)
from tests.bridge.layouts import lanes_of
from tests.bridge.two_grids import make_end
from tests.conftest import RunRanks

HIDDEN = 3
CHUNKS = (0, 0, 1)  # the chunk that needs each of three levels


def test_each_link_gets_the_columns_of_its_levels_and_gradients_go_back_to_them() -> None:
    rows = torch.arange(5.0 * 8).view(5, 8).requires_grad_()
    first, second = split_levels(rows, [(0, 1, 3), (2,)])
    assert torch.equal(first, rows[:, [0, 1, 2, 3, 6, 7]])
    assert torch.equal(second, rows[:, [4, 5]])
    torch.autograd.backward([first, second], [first.detach(), 10 * second.detach()])
    scale = torch.tensor([1, 1, 1, 1, 10, 10, 1, 1])
    assert torch.equal(cast("torch.Tensor", rows.grad), rows.detach() * scale)


def test_rows_for_a_single_link_are_not_touched() -> None:
    rows = torch.zeros(2, 6)
    assert split_levels(rows, [(0, 1, 2)])[0] is rows
    assert take_chunk(rows, (1, 1, 1), 1) is rows


def test_rows_whose_width_is_no_multiple_of_the_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 7 numbers are not 3 levels"):
        split_levels(torch.zeros(2, 7), [(0, 1), (2,)])


def plan_of(rows: int) -> BridgePlan:
    """One item of ``rows`` rows at position 2, from rank 0 to rank 1; none with no rows."""
    item = np.zeros(min(rows, 1), np.int64)
    runs = ItemRuns(item, item, item, item + 2, item + rows, num_samples=1)
    source = ReplicatedSource(np.array([rows]), np.array([[0]]))
    segments = lanes_of([[16]])
    destination = sharded_destination(segments, np.array([[[1]]]), False, runs)
    return BridgePlan.build(runs, source, destination)


def run_chunks(rank: int, rows_of_microbatch: list[int], trainable: bool) -> list[str]:
    """Rank 0 sends three levels, two chunks of rank 1 take them -> the order of rank 1's events."""
    groups = dist.new_group([0, 1]), dist.new_group([0, 1])
    end = make_end(rank, groups, HIDDEN * len(CHUNKS), trainable=trainable)
    plans = [plan_of(rows) for rows in rows_of_microbatch]
    whole = [torch.arange(9.0 * n).view(n, 9) + 100 * m for m, n in enumerate(rows_of_microbatch)]
    factor = torch.tensor([1.0] * 6 + [7.0] * 3)  # the second chunk's gradients are larger
    if rank == 0:
        sender = BridgeSender(end, lane=0, run_ahead=len(plans))
        sender.begin(plans)
        values = [rows.requires_grad_(trainable) for rows in whole]
        tokens = [
            sender.send(m, ItemRows(rows, plans[m].runs.rows_of_lane(0)))
            for m, rows in enumerate(values)
        ]
        if trainable:
            for token, rows in zip(tokens, values, strict=True):
                (gradient,) = torch.autograd.grad(token, rows)
                assert torch.equal(gradient, factor * rows)
        sender.finish()
        return []
    log: list[str] = []
    inner = BridgeReceiver(end, run_ahead=2, posted_ahead=1)
    receiver = LevelReceiver(inner, CHUNKS)
    sent = inner._backward
    inner._backward = lambda m, gradient: (log.append(f"sent {m}"), sent(m, gradient))[1]  # type: ignore[method-assign]
    receiver.begin(plans)
    outputs = {}
    for chunk in (0, 1):
        for m, rows in enumerate(whole):
            got, positions = receiver.receive(m, chunk)
            assert torch.equal(got, rows[:, 6:] if chunk else rows[:, :6])
            assert positions.tolist() == list(range(2, 2 + len(rows)))
            assert got.requires_grad == trainable
            outputs[m, chunk] = (got * got.detach() * (7 if chunk else 1)).sum()
    for chunk in (1, 0) if trainable else ():
        for m in range(len(plans)):
            log.append(f"backward {m} of chunk {chunk}")
            outputs.pop((m, chunk)).backward()
    receiver.finish()
    return log


@pytest.mark.parametrize("rows", [[4, 5], [3, 0]], ids=["rows", "text only"])
def test_gradients_leave_in_one_message_when_the_last_chunk_has_run_backward(
    run_ranks: RunRanks, rows: list[int]
) -> None:
    _, log = run_ranks(run_chunks, 2, rows, True)
    assert log == [
        "backward 0 of chunk 1",
        "backward 1 of chunk 1",
        "backward 0 of chunk 0",
        "sent 0",
        "backward 1 of chunk 0",
        "sent 1",
    ]


def test_rows_of_a_frozen_encoder_reach_all_chunks_without_a_graph(run_ranks: RunRanks) -> None:
    _, log = run_ranks(run_chunks, 2, [4, 0, 2], False)
    assert log == []
