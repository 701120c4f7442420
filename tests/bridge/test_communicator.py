"""Both ends of a bridge on real ranks, against the same rows moved in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bridge import BridgeError, BridgeReceiver, BridgeSender, FlatEmbeddings
from tests.bridge.two_grids import (
    CASES,
    HIDDEN,
    TEXT_ONLY,
    Case,
    build_end,
    encoder_part,
    local_slice,
    make_end,
    receive_all,
    rows_of,
    send_all,
)
from tests.conftest import RunRanks

# ------------------------------------------------------- functions that run inside ranks


@contextmanager
def recorded() -> Iterator[list[tuple[str, int, Any]]]:
    """Every message that starts meanwhile: (what, peer, group)."""
    batch, messages = dist.batch_isend_irecv, []

    def record(operations):
        messages.extend((op.op.__name__, op.peer, op.group) for op in operations)
        return batch(operations)

    dist.batch_isend_irecv = record
    try:
        yield messages
    finally:
        dist.batch_isend_irecv = batch


def check_rows_and_gradients(rank: int, case: Case) -> None:
    end, plans = build_end(rank, case), case.plans()
    for _ in range(2):  # nothing of the first step may be left over in the second
        end.begin(plans)
        if isinstance(end, BridgeSender):
            for m, gradient in enumerate(send_all(end, case)):
                expected = case.of_lane(m, end.lane, case.dense(m, seed=100))
                expected = encoder_part(case, expected, rank % case.tp)
                expected = expected.to(case.wire_dtype).float()
                assert gradient is not None
                assert gradient.dtype == torch.float32
                assert torch.equal(gradient, expected), f"gradient of microbatch {m}"
        else:
            lane, number = case.place(rank)
            for m, hidden in enumerate(receive_all(end, case)):
                expected = case.only_rows(m, case.dense(m, seed=0)).to(case.wire_dtype).float()
                assert hidden.dtype == torch.float32
                assert torch.equal(hidden, local_slice(case, expected[lane], number)), (
                    f"microbatch {m}"
                )
        end.finish()


def messages_per_microbatch(rank: int, case: Case) -> list[list[tuple[str, int, bool]]]:
    """What this rank sends and receives for each microbatch; the flag: on the backward group."""
    end, plans = build_end(rank, case), case.plans()
    found = []
    for m, plan in enumerate(plans):
        with recorded() as messages:
            end.begin([plan])
            if isinstance(end, BridgeSender):
                rows = rows_of(case, m, rank)
                token = end.send(0, rows)
            else:
                token = end.receive(0)[0].sum()
            token.backward()
            end.finish()
        found.append([(way, peer, group is end.end.backward) for way, peer, group in messages])
    return found


def messages_of_frozen(rank: int, case: Case) -> list[tuple[str, int, bool]]:
    end = build_end(rank, case)
    with recorded() as messages:
        end.begin(case.plans())
        if isinstance(end, BridgeSender):
            send_all(end, case)
        else:
            lane, _ = case.place(rank)
            for m, hidden in enumerate(receive_all(end, case)):
                assert torch.equal(hidden, case.only_rows(m, case.dense(m, seed=0))[lane])
        end.finish()
    return [(way, peer, group is end.end.backward) for way, peer, group in messages]


def planning_left_to_a_step(rank: int, case: Case) -> set[tuple[str, int]]:
    """What `BridgeEnd.stage` did not work out, although a step needs it."""
    end, plan = build_end(rank, case), case.plan(0)
    end.end.stage(plan, torch.clone)
    staged = set(plan.cache)
    end.begin([plan])
    if isinstance(end, BridgeSender):
        token = end.send(0, rows_of(case, 0, rank))
    else:
        token = end.receive(0)[0].sum()
    token.backward()
    end.finish()
    return set(plan.cache) - staged


class _Watched:
    """A message whose waiting is noticed."""

    def __init__(self, work: dist.Work, outstanding: list[int]) -> None:
        self.work, self.outstanding = work, outstanding

    def wait(self, *args: Any) -> bool:
        done = self.work.wait(*args)
        self.outstanding[0] -= 1
        return done


def most_outstanding_sends(rank: int, case: Case, microbatches: int) -> int:
    """A forward-only pass over one microbatch many times; the receivers are slow."""
    end = build_end(rank, case)
    batch, outstanding, most = dist.batch_isend_irecv, [0], 0

    def watch(operations):
        nonlocal most
        works = batch(operations)
        outstanding[0] += len(works)
        most = max(most, outstanding[0])
        return [_Watched(work, outstanding) for work in works]

    dist.batch_isend_irecv = watch
    end.begin([case.plan(0)] * microbatches, forward_only=True)
    with torch.no_grad():
        for m in range(microbatches):
            if isinstance(end, BridgeSender):
                token = end.send(m, rows_of(case, 0, rank))
                assert not token.requires_grad
            else:
                time.sleep(0.01)
                rows, _ = end.receive(m)
                assert not rows.requires_grad
    end.finish()
    assert outstanding == [0]
    return most


# ------------------------------------------------------------------------- on ranks


@pytest.mark.parametrize("name", CASES)
def test_rows_and_gradients_equal_those_moved_in_one_process_bit_for_bit(
    run_ranks: RunRanks, name: str
) -> None:
    run_ranks(check_rows_and_gradients, CASES[name].num_ranks, CASES[name])


@pytest.mark.parametrize("name", ["2 lanes tp2 to 4 lanes tp1", "1 lane tp4 to 2 lanes tp2"])
def test_bf16_on_the_wire_rounds_each_number_once_and_nothing_else(
    run_ranks: RunRanks, name: str
) -> None:
    case = replace(CASES[name], wire_dtype=torch.bfloat16)
    run_ranks(check_rows_and_gradients, case.num_ranks, case)


def test_text_only_microbatch_sends_no_message_and_others_one_per_peer_and_direction(
    run_ranks: RunRanks,
) -> None:
    case = CASES["3 lanes to 2 lanes tp2 with sp"]
    results = run_ranks(messages_per_microbatch, case.num_ranks, case)
    for rank, microbatches in enumerate(results):
        assert microbatches[TEXT_ONLY] == []
        for m, messages in enumerate(microbatches):
            plan = case.plan(m)
            encoder = rank < case.encoder_ranks
            peers = (plan.sends(rank) if encoder else plan.receives(rank)).peers
            rows_out, rows_in = ("isend", "irecv") if encoder else ("irecv", "isend")
            expected = [(rows_out, p, False) for p in peers] + [(rows_in, p, True) for p in peers]
            assert sorted(messages) == sorted(expected)
    assert any(any(microbatches) for microbatches in results)


@pytest.mark.parametrize("name", ["2 lanes tp2 to 4 lanes tp1", "4 lanes tp1 to 2 lanes tp2"])
def test_a_staged_plan_leaves_nothing_to_work_out_in_the_step(
    run_ranks: RunRanks, name: str
) -> None:
    case = CASES[name]
    assert run_ranks(planning_left_to_a_step, case.num_ranks, case) == [set()] * case.num_ranks


def test_frozen_encoder_sends_its_rows_and_gets_no_backward_traffic(run_ranks: RunRanks) -> None:
    case = replace(CASES["4 lanes tp1 to 2 lanes tp2"], trainable=False)
    results = run_ranks(messages_of_frozen, case.num_ranks, case)
    messages = [message for rank in results for message in rank]
    assert messages
    assert not any(backward for _, _, backward in messages)


def test_forward_only_pass_has_at_most_run_ahead_sends_outstanding(run_ranks: RunRanks) -> None:
    case = Case(1, 1, 1, 1)
    sender, _ = run_ranks(most_outstanding_sends, 2, case, 12)
    assert sender == 2  # the run-ahead of `build_end`


# ------------------------------------------------------------------- without any rank


def sender_alone(**settings: Any) -> tuple[BridgeSender, Case]:
    """A sender that must refuse before it sends anything."""
    case = Case(1, 1, 1, 1, **settings)
    sender = BridgeSender(make_end(case, 0, None, None), 0, run_ahead=0)
    sender.begin(case.plans())
    return sender, case


def test_rows_that_do_not_fit_the_plan_are_refused_with_both_counts() -> None:
    sender, _ = sender_alone()
    rows = FlatEmbeddings(torch.zeros(3, HIDDEN), (1, 0, 2, 0))
    with pytest.raises(ValueError, match=r"microbatch 0: .*\[1, 0, 2, 0\].*\[7, 0, 3, 13\]"):
        sender.send(0, rows)


def test_rows_of_another_size_are_refused_with_both_sizes() -> None:
    sender, case = sender_alone()
    rows = FlatEmbeddings(torch.zeros(23, HIDDEN + 1), case.runs(0).split_sizes(0))
    with pytest.raises(ValueError, match="rows of size 6, the language model needs 5"):
        sender.send(0, rows)


def test_rows_cut_over_other_ranks_than_planned_are_refused() -> None:
    sender, case = sender_alone()
    rows = FlatEmbeddings(torch.zeros(12, HIDDEN), case.runs(0).split_sizes(0), parts=2)
    with pytest.raises(ValueError, match="cut over 2 ranks, the plan needs 1"):
        sender.send(0, rows)


@pytest.mark.parametrize("trainable", [True, False])
def test_rows_that_disagree_with_the_plan_about_gradients_are_refused(trainable: bool) -> None:
    sender, case = sender_alone(trainable=trainable)
    rows = FlatEmbeddings(
        torch.zeros(0, HIDDEN, requires_grad=not trainable), case.runs(TEXT_ONLY).split_sizes(0)
    )
    with pytest.raises(BridgeError, match="microbatch 1: the plan expects"):
        sender.send(TEXT_ONLY, rows)


def test_receiving_without_autograd_is_refused_when_the_plan_expects_gradients() -> None:
    case = Case(1, 1, 1, 1)
    receiver = BridgeReceiver(make_end(case, 1, None, None), run_ahead=2, posted_ahead=1)
    receiver.begin([case.plan(TEXT_ONLY)])
    with torch.no_grad(), pytest.raises(BridgeError, match="but the rows require none"):
        receiver.receive(0)


def test_flat_embeddings_refuse_rows_that_are_not_those_of_their_samples() -> None:
    assert FlatEmbeddings(torch.zeros(0, HIDDEN), (0, 0)).values.shape == (0, HIDDEN)
    with pytest.raises(ValueError, match=r"produced 3 rows, but its samples need 4 \(\[1, 3\]\)"):
        FlatEmbeddings(torch.zeros(3, HIDDEN), (1, 3))
    assert FlatEmbeddings(torch.zeros(2, HIDDEN), (1, 2), parts=2).values.shape == (2, HIDDEN)
    with pytest.raises(ValueError, match="produced 3 rows, but its samples need 2 on each of 2"):
        FlatEmbeddings(torch.zeros(3, HIDDEN), (1, 2), parts=2)
    with pytest.raises(ValueError, match=r"\(rows, hidden\), got \(1, 3, 5\)"):
        FlatEmbeddings(torch.zeros(1, 3, HIDDEN), (3,))
