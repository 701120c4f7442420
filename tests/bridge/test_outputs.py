"""Rows of hidden states on their way to a generator, and their gradients on the way back.

Plans are read row by row; on ranks, both ends run as in 1F1B that goes one microbatch ahead.

Letters: T tokens of a language rank, N rows of a generator lane, H hidden.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from bridge import BridgeError, ColocatedOutput, OutputReceiver, OutputSender, TransferWatch
from bridge.runs import ints, offsets
from tests.bridge.layouts import Case as PlanCase
from tests.bridge.layouts import Row, cases
from tests.bridge.two_grids import TEXT_ONLY, Case, local_slice, recorded, transport
from tests.cases import quick
from tests.conftest import RunRanks

# Generator lanes, then lanes and tp of the language model. In the last microbatch one lane at most
# has an item.
CASES = {
    "tp2 to 2 lanes": Case(2, 1, 1, 2),
    "tp2 sp to 2 lanes": Case(2, 1, 1, 2, sequence_parallel=True),
    "2 lanes to 2": Case(2, 1, 2, 1),
    "4 lanes to 1": Case(1, 1, 4, 1),
    "1 lane to 3": Case(3, 1, 1, 1),
    "2 lanes tp2 to 3 lanes": Case(3, 1, 2, 2),
    "2 lanes cp2 to 3 lanes": Case(3, 1, 2, 1, language_cp=2),
    "tp2 cp2 to 2 lanes": Case(2, 1, 1, 2, language_cp=2),
    "tp2 cp2 sp to 2 lanes": Case(2, 1, 1, 2, language_cp=2, sequence_parallel=True),
    "2 lanes tp2 sp to 3 lanes, unpacked": Case(3, 1, 2, 2, sequence_parallel=True, packed=False),
    "tp2 cp2 sp to 2 lanes, unpacked": Case(
        2, 1, 1, 2, language_cp=2, sequence_parallel=True, packed=False
    ),
    "colocated 4 lanes": Case(4, 1, 4, 1, colocated=True),
    "colocated 2 lanes tp2": Case(4, 1, 2, 2, colocated=True),
    "colocated 2 lanes tp2 sp, unpacked": Case(
        4, 1, 2, 2, sequence_parallel=True, packed=False, colocated=True
    ),
    "colocated tp2 cp2": Case(4, 1, 1, 2, language_cp=2, colocated=True),
}


# ------------------------------------------------------- functions that run inside ranks


def hidden_states(case: Case, microbatch: int, rank: int) -> torch.Tensor:
    """(T, H) of a language rank, all positions filled."""
    lane, number = case.place(rank)
    dense = local_slice(case, case.dense(microbatch, seed=0)[lane], number).clone()
    return dense.requires_grad_(case.trainable)


def rows_of_lane(case: Case, microbatch: int, lane: int, seed: int) -> torch.Tensor:
    """(N, H) of a generator lane as they arrive, or the gradients that it answers with."""
    dense = case.of_lane(microbatch, lane, case.dense(microbatch, seed))
    return dense.to(case.wire_dtype).float()


def run_language(
    case: Case, rank: int, emit: Callable[[int, torch.Tensor], torch.Tensor], learns: bool
) -> None:
    """Run all microbatches one ahead; check the gradients of the hidden states."""
    lane, number = case.place(rank)
    waiting: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
    for m in range(len(case.samples)):
        hidden = hidden_states(case, m, rank)
        with torch.set_grad_enabled(learns):
            token = emit(m, hidden)
        assert (token.item(), token.requires_grad) == (0.0, learns)
        if learns:
            waiting.append((m, hidden, token))
        while len(waiting) > (1 if m + 1 < len(case.samples) else 0):
            back, hidden, token = waiting.popleft()
            token.backward()
            expected = case.only_rows(back, case.dense(back, seed=100)).to(case.wire_dtype).float()
            assert hidden.grad is not None
            assert torch.equal(hidden.grad, local_slice(case, expected[lane], number)), (
                f"gradient of microbatch {back}"
            )


def run_end(rank: int, case: Case, end: Any, forward_only: bool = False) -> dict[str, int]:
    """Run one step on this rank; check rows and gradients, return the bytes that were sent."""
    learns, plans = case.trainable and not forward_only, case.plans()
    end.begin_step()
    if case.colocated:
        output = ColocatedOutput(end, lane=rank)
        output.begin(plans, forward_only)

        def exchange(m: int, hidden: torch.Tensor) -> torch.Tensor:
            rows = output.exchange(m, hidden)
            assert torch.equal(rows, rows_of_lane(case, m, rank, seed=0)), f"microbatch {m}"
            assert not rows.requires_grad
            return output.answer(m, rows_of_lane(case, m, rank, seed=100), hidden)

        run_language(case, rank, exchange, learns)
        output.finish()
    elif rank < case.encoder_ranks:
        receiver = OutputReceiver(end, lane=rank)
        receiver.begin(plans, forward_only)
        for m in range(len(plans)):
            rows = receiver.receive(m)
            assert torch.equal(rows, rows_of_lane(case, m, rank, seed=0)), f"microbatch {m}"
            receiver.answer(m, rows_of_lane(case, m, rank, seed=100))
        receiver.finish()
    else:
        sender = OutputSender(end, run_ahead=1)
        sender.begin(plans, forward_only)
        run_language(case, rank, sender.send, learns)
        sender.finish()
    return dict(end.clock.sent_bytes)


def bytes_of_steps(rank: int, case: Case, is_watched: bool = False) -> tuple[dict[str, int], int]:
    """Bytes that this rank sent in a step, and the lower bound of a generator's rank.

    The steps before it are a first one, and one of an evaluation: nothing is left over of them.
    """
    end = transport(rank, case, to_language=False)
    if is_watched:
        end = replace(end, watch=TransferWatch())
    run_end(rank, case, end)
    assert "gradients" not in run_end(rank, case, end, forward_only=True)
    generates = case.colocated or rank < case.encoder_ranks
    return run_end(rank, case, end), end.least_bytes(case.plans()) if generates else 0


def messages_of_step(rank: int, case: Case) -> list[tuple[str, bool]]:
    """This rank's messages; the flag: on the backward group."""
    end = transport(rank, case, to_language=False)
    with recorded() as messages:
        run_end(rank, case, end)
    return [(what, group is end.backward) for what, _, group in messages]


# ------------------------------------------------------------------------- on ranks


def total_bytes(case: Case, num_rows: int) -> int:
    return num_rows * case.hidden * case.wire_dtype.itemsize


@pytest.mark.parametrize(
    "name",
    quick(
        CASES,
        "tp2 to 2 lanes",
        "2 lanes tp2 sp to 3 lanes, unpacked",
        "tp2 cp2 to 2 lanes",
        "4 lanes to 1",
        "colocated 2 lanes tp2",
    ),
)
def test_each_row_reaches_its_items_lane_once_and_its_gradient_comes_back_once(
    run_ranks: RunRanks, name: str
) -> None:
    case = CASES[name]
    sent, least = zip(*run_ranks(bytes_of_steps, case.num_ranks, case), strict=True)
    rows = [step.get("rows", 0) for step in sent]
    num_rows = sum(map(sum, case.samples))
    crossing = num_rows
    if case.colocated:  # rows that stay on their rank are copied
        plans = case.plans()
        crossing = sum(int(p.length[p.source_rank != p.destination_rank].sum()) for p in plans)
    else:
        assert sum(rows[: case.encoder_ranks]) == 0
    assert sum(rows) == total_bytes(case, crossing)
    assert sum(least) == total_bytes(case, num_rows)
    # Without sequence parallelism, ranks pass their shares of the gradient on to each other.
    sharers = 1 if case.sequence_parallel else case.language_tp
    passed_on = num_rows * (sharers - 1)
    gradients = sum(step.get("gradients", 0) for step in sent)
    assert gradients == total_bytes(case, crossing + passed_on)


def test_watched_transfers_in_bf16_round_each_number_once(run_ranks: RunRanks) -> None:
    case = replace(CASES["tp2 to 2 lanes"], wire_dtype=torch.bfloat16, timeout_seconds=30)
    run_ranks(bytes_of_steps, case.num_ranks, case, True)


@pytest.mark.parametrize("name", ["2 lanes to 2", "colocated 2 lanes tp2"])
def test_a_step_without_items_sends_nothing_and_waits_for_nobody(
    run_ranks: RunRanks, name: str
) -> None:
    case = CASES[name]
    case = replace(case, samples=(case.samples[TEXT_ONLY],) * 3)
    assert run_ranks(messages_of_step, case.num_ranks, case) == [[]] * case.num_ranks


@pytest.mark.parametrize("name", ["2 lanes to 2", "colocated 2 lanes tp2"])
def test_no_gradient_is_sent_where_nothing_before_the_generator_trains(
    run_ranks: RunRanks, name: str
) -> None:
    case = replace(CASES[name], trainable=False)
    messages = [one for rank in run_ranks(messages_of_step, case.num_ranks, case) for one in rank]
    assert messages
    assert not any(backward for _, backward in messages)


# ------------------------------------------------------------------- without any rank


@pytest.mark.parametrize("trainable", [True, False])
def test_hidden_states_that_disagree_with_the_plan_about_gradients_are_refused(
    trainable: bool,
) -> None:
    case = Case(1, 1, 1, 1, trainable=trainable)
    sender = OutputSender(case.end(1, to_language=False), run_ahead=0)
    sender.begin(case.plans())
    hidden = hidden_states(case, TEXT_ONLY, 1).detach().requires_grad_(not trainable)
    graph = "none" if trainable else "them"
    with pytest.raises(BridgeError, match=f"microbatch 1: the plan expects .* require {graph}"):
        sender.send(TEXT_ONLY, hidden)


def test_a_colocated_answer_without_a_gradient_path_is_refused() -> None:
    case = Case(1, 1, 1, 1, colocated=True)
    output = ColocatedOutput(case.end(0, to_language=False), lane=0)
    output.begin(case.plans())
    hidden = hidden_states(case, 0, 0).detach()
    rows = output.exchange(0, hidden)
    with pytest.raises(BridgeError, match="microbatch 0: the plan expects .* require none"):
        output.answer(0, torch.zeros_like(rows), hidden)


def test_a_backward_that_was_skipped_is_noticed() -> None:
    case = Case(1, 1, 1, 1)
    sender = OutputSender(case.end(1, to_language=False), run_ahead=0)
    sender.begin(case.plans())
    sender.send(TEXT_ONLY, hidden_states(case, TEXT_ONLY, 1))
    with pytest.raises(AssertionError, match="backward was skipped"):
        sender.finish()


# --------------------------------------------------------------------------- the plan


@settings(max_examples=300)
@given(cases(deliveries=["sequence_parallel", "shared_out"], most_encoder_tp=1))
def test_rows_leave_a_rank_that_holds_their_position_and_arrive_in_the_order_of_items(
    case: PlanCase,
) -> None:
    plan, messages = case.build(), dict[tuple[int, int], list[Row]]()
    for rank, sequence in case.local_sequence.items():
        # What `OutputSender` selects: the rows of all ranks that hold the same ones, in order.
        rows = [
            [sequence[local] for local in plan.receives(other).index]
            for other in sharers(case, rank)
        ]
        assert sorted(itertools.chain(*rows)) == sorted(case.rows_of(sequence))
        share, returns = rows[sharers(case, rank).index(rank)], plan.returns(rank)
        ends = offsets(ints(returns.counts)).tolist()
        for peer, span in zip(returns.peers, itertools.pairwise(ends), strict=True):
            messages[rank, peer] = [share[i] for i in returns.index[slice(*span)]]
    for lane, rank in enumerate(case.encoder_ranks[:, 0].tolist()):
        collects, arrived = plan.collects(rank), list[Row]()
        for peer in collects.peers:
            arrived += messages.pop((peer, rank))
        assert len({*collects.index.tolist()}) == len(arrived), "no row overwrites another"
        ordered = sorted(zip(collects.index.tolist(), arrived, strict=True))
        assert [row for _, row in ordered] == case.lane_rows[lane]
    assert not messages, "nobody receives these"


def sharers(case: PlanCase, rank: int) -> list[int]:
    """The ranks that hold the same rows as ``rank``; each sends a part of them."""
    if case.delivery == "sequence_parallel":
        return [rank]
    return next(r for r in case.language_ranks.reshape(-1, case.tp).tolist() if rank in r)
