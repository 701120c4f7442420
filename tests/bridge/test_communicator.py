"""Both ends of a bridge on real ranks, against the same rows moved in one process.

Letters: T tokens of a language lane, N rows of an encoder lane, H hidden.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bridge import (
    BridgeError,
    BridgeReceiver,
    BridgeSender,
    ItemRows,
    TransferWatch,
    check_plans,
    transfer,
)
from bridge.waiting import Message
from tests.bridge.two_grids import (
    CASES,
    HIDDEN,
    TEXT_ONLY,
    Case,
    build_end,
    encoder_part,
    local_slice,
    receive_all,
    recorded,
    rows_of,
    send_all,
)
from tests.cases import quick
from tests.conftest import RunRanks

# Microbatches of one size, so that any two could share a buffer.
SAME_SIZE = ((8, 8, 8, 8),) * 4
LARGE = 1 << 15  # H: 8 rows are 1 MiB in fp32
LARGE_CASES = {
    # A message's rows do not stand together: context parallelism deals out both ends of a lane.
    "1 lane to 1 lane cp2": Case(1, 1, 1, 1, language_cp=2, samples=SAME_SIZE, hidden=LARGE),
    # Ranks of a lane share out what each of them received.
    "1 lane tp2 to 1 lane tp2": Case(1, 2, 1, 2, samples=SAME_SIZE, hidden=LARGE),
    # What a replica passes on, or receives as well, is not contiguous.
    "1 lane tp2 to 1 lane cp2": Case(1, 2, 1, 1, language_cp=2, samples=SAME_SIZE, hidden=LARGE),
    "1 lane tp2 to 1 lane cp2, direct": Case(
        1, 2, 1, 1, language_cp=2, samples=SAME_SIZE, hidden=LARGE, direct=True
    ),
}


# ------------------------------------------------------- functions that run inside ranks


def check_rows_and_gradients(rank: int, case: Case, is_watched: bool = False) -> None:
    end, plans = build_end(rank, case), case.plans()
    if is_watched:
        end.end = replace(end.end, watch=TransferWatch())
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


def run_microbatch(end: BridgeSender | BridgeReceiver, case: Case, m: int, plan: Any) -> None:
    """One microbatch forward and backward, as a step."""
    end.begin([plan])
    if isinstance(end, BridgeSender):
        token = end.send(0, rows_of(case, m, end.end.rank))
    else:
        token = end.receive(0)[0].sum()
    token.backward()
    end.finish()


def messages_per_microbatch(rank: int, case: Case) -> list[list[tuple[str, int, bool]]]:
    """This rank's messages by microbatch; the flag: on the backward group."""
    end, plans = build_end(rank, case), case.plans()
    by_microbatch = []
    for m, plan in enumerate(plans):
        with recorded() as messages:
            run_microbatch(end, case, m, plan)
        by_microbatch.append([(what, peer, g is end.end.backward) for what, peer, g in messages])
    return by_microbatch


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
    return [(what, peer, group is end.end.backward) for what, peer, group in messages]


def planning_left_to_a_step(rank: int, case: Case) -> set[tuple[str, int]]:
    """Parts of a plan that a step needs and `BridgeEnd.stage` did not compute."""
    end, plan = build_end(rank, case), case.plan(0)
    end.end.stage(plan, torch.clone)
    staged = set(plan.cache)
    run_microbatch(end, case, 0, plan)
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
    start, outstanding, most = transfer._start, [0], 0

    def watch(*args: Any, **options: Any) -> list[Message]:
        nonlocal most
        messages = start(*args, **options)
        outstanding[0] += len(messages)
        most = max(most, outstanding[0])
        return [replace(m, work=cast(Any, _Watched(m.work, outstanding))) for m in messages]

    end.begin([case.plan(0)] * microbatches, forward_only=True)
    with torch.no_grad(), mock.patch.object(transfer, "_start", watch):
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


def compare_plans(rank: int, case: Case, other: str, odd_rank: int) -> str:
    """Rank ``odd_rank`` has other "transfers" or other "samples" in microbatch 2."""
    end, plans = build_end(rank, case).end, case.plans()
    keys = [[f"sample{m}{i}" for i in range(4)] for m in range(len(plans))]
    check_plans(end, plans, lambda m: keys[m])
    check_plans(end, plans)
    if rank == odd_rank:
        changed: list[Any] = plans if other == "transfers" else keys
        changed[2] = changed[3]
    with pytest.raises(BridgeError) as caught:
        check_plans(end, plans, lambda m: keys[m])
    assert caught.value.microbatch == 2
    return str(caught.value)


def check_every_microbatch_keeps_its_memory(rank: int, case: Case) -> None:
    """Ranks hold the rows of all microbatches, as in a pipeline, and then all their gradients."""
    end, plans = build_end(rank, case), case.plans()
    for plan in plans:
        messages = plan.sends(rank) if rank < case.encoder_ranks else plan.receives(rank)
        assert min(messages.counts) * case.hidden * case.wire_dtype.itemsize >= 1 << 20
    for _ in range(2):  # the second step takes the memory of the first
        end.begin(plans)
        if isinstance(end, BridgeSender):
            check_gradients(end, case)
        else:
            check_rows(end, case)
        end.finish()


def check_rows(receiver: BridgeReceiver, case: Case) -> None:
    lane, number = case.place(receiver.end.rank)
    dist.barrier()  # everything has been sent: rows that are posted ahead arrive unasked
    received = [receiver.receive(m) for m in range(len(case.samples))]
    hidden = []
    for m, (rows, positions) in enumerate(received):
        expected = case.only_rows(m, case.dense(m, seed=0))[lane].to(case.wire_dtype).float()
        expected = local_slice(case, expected, number)
        hidden.append(torch.zeros_like(expected).index_copy(0, positions, rows))
        assert torch.equal(hidden[m], expected), f"rows of microbatch {m}"
    for m in range(len(case.samples)):
        weights = local_slice(case, case.dense(m, seed=100)[lane], number)
        (hidden[m] * weights).sum().backward()


def check_gradients(sender: BridgeSender, case: Case) -> None:
    rows = [rows_of(case, m, sender.end.rank) for m in range(len(case.samples))]
    tokens = [sender.send(m, embeddings) for m, embeddings in enumerate(rows)]
    dist.barrier()
    for token in tokens:
        token.backward()
    for m, embeddings in enumerate(rows):
        expected = case.of_lane(m, sender.lane, case.dense(m, seed=100)).to(case.wire_dtype)
        assert embeddings.values.grad is not None
        assert torch.equal(embeddings.values.grad, expected.float()), f"gradient of microbatch {m}"


# ------------------------------------------------------------------------- on ranks


# `test_plan.py` has hundreds of layouts in one process.
QUICK = (
    "1 lane tp4, output cut, to 2 lanes tp2 with sp",
    "2 lanes tp2 to 2 lanes tp2 with sp, direct",
    "2 lanes tp3 to 1 lane tp2",
    "4 lanes to 1 lane tp4",
)


@pytest.mark.parametrize("name", quick(CASES, *QUICK))
def test_rows_and_gradients_equal_those_moved_in_one_process_bit_for_bit(
    run_ranks: RunRanks, name: str
) -> None:
    run_ranks(check_rows_and_gradients, CASES[name].num_ranks, CASES[name])


def test_watched_transfers_move_the_same_rows_and_gradients(run_ranks: RunRanks) -> None:
    case = Case(2, 2, 1, 2, timeout_seconds=30)
    run_ranks(check_rows_and_gradients, case.num_ranks, case, True)


@pytest.mark.parametrize(
    "name",
    quick(["2 lanes tp2 to 4 lanes tp1", "1 lane tp4 to 2 lanes tp2"], "1 lane tp4 to 2 lanes tp2"),
)
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


STAGED = [
    "2 lanes tp2 to 4 lanes tp1",
    "4 lanes tp1 to 2 lanes tp2",
    "1 lane tp3 to 2 lanes tp2, direct",
]


@pytest.mark.parametrize("name", quick(STAGED, STAGED[0], STAGED[2]))
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


@pytest.mark.parametrize("other", quick(["transfers", "samples"], "samples"))
def test_check_of_plans_names_the_ranks_that_differ_and_the_microbatch(
    run_ranks: RunRanks, other: str
) -> None:
    messages = run_ranks(compare_plans, 3, Case(1, 1, 2, 1), other, 1)
    assert set(messages) == {
        "bridge vision, microbatch 2: ranks [0, 2] and ranks [1] planned different "
        f"{other}; they read different data indexes or recipes"
    }


# The first is quick in the next test, with bf16 in messages.
@pytest.mark.parametrize("name", quick(LARGE_CASES, *[*LARGE_CASES][1:]))
def test_no_microbatch_gets_the_rows_or_gradients_of_another_in_reused_memory(
    run_ranks: RunRanks, name: str
) -> None:
    run_ranks(
        check_every_microbatch_keeps_its_memory, LARGE_CASES[name].num_ranks, LARGE_CASES[name]
    )


def test_no_microbatch_gets_those_of_another_before_they_are_cast(run_ranks: RunRanks) -> None:
    case = replace(LARGE_CASES["1 lane to 1 lane cp2"], wire_dtype=torch.bfloat16)
    run_ranks(check_every_microbatch_keeps_its_memory, case.num_ranks, case)


# ------------------------------------------------------------------- without any rank


def sender_alone(**settings: Any) -> tuple[BridgeSender, Case]:
    """A sender that must refuse before it sends anything."""
    case = Case(1, 1, 1, 1, **settings)
    sender = BridgeSender(case.end(0), 0, run_ahead=0)
    sender.begin(case.plans())
    return sender, case


@pytest.mark.parametrize(
    ("shape", "sizes", "parts", "message"),
    [
        ((3, HIDDEN), (1, 0, 2, 0), 1, r"microbatch 0: .*\[1, 0, 2, 0\], planned are"),
        ((23, HIDDEN + 1), None, 1, "rows of size 6, the language model needs 5"),
        ((1, 23, HIDDEN), None, 1, "rows of size 23 x 5, the language model needs 5"),
        ((22, HIDDEN), None, 1, "22 rows, but its items need 23"),
        ((12, HIDDEN), None, 2, "cut over 2 ranks, the plan needs 1"),
    ],
    ids=["counts", "size", "dimensions", "rows", "cut"],
)
def test_rows_that_do_not_fit_the_plan_are_refused_with_both_numbers(
    shape: tuple[int, ...], sizes: tuple[int, ...] | None, parts: int, message: str
) -> None:
    sender, case = sender_alone()
    sizes = case.runs(0).rows_of_lane(0) if sizes is None else sizes
    with pytest.raises(ValueError, match=message):
        sender.send(0, ItemRows(torch.zeros(shape), sizes, parts))


@pytest.mark.parametrize("trainable", [True, False])
def test_rows_that_disagree_with_the_plan_about_gradients_are_refused(trainable: bool) -> None:
    sender, case = sender_alone(trainable=trainable)
    rows = ItemRows(
        torch.zeros(0, HIDDEN, requires_grad=not trainable), case.runs(TEXT_ONLY).rows_of_lane(0)
    )
    with pytest.raises(BridgeError, match="microbatch 1: the plan expects"):
        sender.send(TEXT_ONLY, rows)


def test_receiving_without_autograd_is_refused_when_the_plan_expects_gradients() -> None:
    case = Case(1, 1, 1, 1)
    receiver = BridgeReceiver(case.end(1), run_ahead=2, posted_ahead=1)
    receiver.begin([case.plan(TEXT_ONLY)])
    with torch.no_grad(), pytest.raises(BridgeError, match="but the rows require none"):
        receiver.receive(0)
