"""Both ends of a bridge on real ranks, against the same rows moved in one process.

Every rank knows the whole workload, so each checks what it holds against a dense computation:
forward, a language lane's sequence with the rows in place; backward, a weight per position that
is the gradient of the row there.

Letters: T tokens of a language lane, N rows of an encoder lane, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bridge import (
    BridgeEnd,
    BridgeError,
    BridgePlan,
    BridgeReceiver,
    BridgeSender,
    FlatEmbeddings,
    ItemRuns,
    LaneSegments,
    ReplicatedSource,
    check_plans,
    sharded_destination,
)
from tests.conftest import RunRanks

HIDDEN = 5
# Rows per sample and microbatch. The second microbatch is text only, lanes get uneven counts.
SAMPLES = ((7, 0, 3, 13), (0, 0, 0, 0), (1, 2, 11, 0), (0, 0, 0, 6))
TEXT_ONLY = 1


@dataclass(frozen=True)
class Case:
    """A layout, encoder ranks first, and how its bridge is set up."""

    lanes: int
    tp: int
    language_lanes: int
    language_tp: int
    sequence_parallel: bool = False
    wire_dtype: torch.dtype = torch.float32
    trainable: bool = True
    timeout_seconds: float | None = None

    @property
    def encoder_ranks(self) -> int:
        return self.lanes * self.tp

    @property
    def num_ranks(self) -> int:
        return self.encoder_ranks + self.language_lanes * self.language_tp

    def runs(self, microbatch: int) -> ItemRuns:
        """One item per sample with rows, dealt out over lanes; a placeholder run per sample."""
        rows = np.array(SAMPLES[microbatch])
        sample = np.flatnonzero(rows)
        per_lane = len(rows) // self.language_lanes
        return ItemRuns(
            sample=sample,
            source_lane=(sample + microbatch) % self.lanes,
            destination_lane=sample // per_lane,
            position=2 + 16 * (sample % per_lane),
            rows=rows[sample],
            num_samples=len(rows),
        )

    @property
    def tokens(self) -> int:
        """T, for every lane."""
        return 16 * len(SAMPLES[0]) // self.language_lanes

    def plan(self, microbatch: int) -> BridgePlan:
        runs = self.runs(microbatch)
        rows = np.array([sum(runs.split_sizes(lane)) for lane in range(self.lanes)])
        source = ReplicatedSource(rows, np.arange(self.encoder_ranks).reshape(-1, self.tp))
        ranks = np.arange(self.encoder_ranks, self.num_ranks)
        destination = sharded_destination(
            LaneSegments.whole([self.tokens] * self.language_lanes),
            ranks.reshape(self.language_lanes, 1, self.language_tp),
            self.sequence_parallel,
            runs,
        )
        return BridgePlan.build(runs, source, destination)

    def plans(self) -> list[BridgePlan]:
        return [self.plan(microbatch) for microbatch in range(len(SAMPLES))]

    def dense(self, microbatch: int, seed: int) -> torch.Tensor:
        """(language_lanes, T, H) random numbers, by position."""
        generator = torch.Generator().manual_seed(seed + microbatch)
        return torch.randn(self.language_lanes, self.tokens, HIDDEN, generator=generator)

    def of_lane(self, microbatch: int, lane: int, dense: torch.Tensor) -> torch.Tensor:
        """(N, H) the numbers at the positions of one encoder lane's rows, in its order."""
        runs = self.runs(microbatch)
        parts = [dense.new_zeros(0, HIDDEN)]
        for i in np.flatnonzero(runs.source_lane == lane):
            start = int(runs.position[i])
            parts.append(dense[runs.destination_lane[i], start : start + int(runs.rows[i])])
        return torch.cat(parts)

    def only_rows(self, microbatch: int, dense: torch.Tensor) -> torch.Tensor:
        """(language_lanes, T, H) with zeros where no row belongs."""
        runs = self.runs(microbatch)
        kept = torch.zeros_like(dense)
        for i in range(runs.rows.size):
            lane, start = int(runs.destination_lane[i]), int(runs.position[i])
            where = slice(start, start + int(runs.rows[i]))
            kept[lane, where] = dense[lane, where]
        return kept


CASES = {
    "2 lanes tp2 to 4 lanes tp1": Case(2, 2, 4, 1),
    "4 lanes tp1 to 2 lanes tp2": Case(4, 1, 2, 2),
    "1 lane tp4 to 2 lanes tp2": Case(1, 4, 2, 2),
    "1 lane tp4 to 2 lanes tp2 with sp": Case(1, 4, 2, 2, sequence_parallel=True),
    "3 lanes to 2 lanes tp2 with sp": Case(3, 1, 2, 2, sequence_parallel=True),
    "4 lanes to 1 lane tp4": Case(4, 1, 1, 4),
    "2 lanes tp3 to 1 lane tp2": Case(2, 3, 1, 2),
}


# ------------------------------------------------------- functions that run inside ranks


def build_end(rank: int, case: Case) -> BridgeSender | BridgeReceiver:
    """This rank's end of the bridge; every rank calls it."""
    ranks = list(range(case.num_ranks))
    forward, backward = (cast("dist.ProcessGroup", dist.new_group(ranks)) for _ in range(2))
    gather = None
    sides = ((0, case.lanes, case.tp), (case.encoder_ranks, case.language_lanes, case.language_tp))
    for first, lanes, tp in sides:
        for lane in range(lanes):
            own = [first + lane * tp + t for t in range(tp)]
            group = dist.new_group(own) if tp > 1 else None
            if rank in own:
                gather = group
    sends = rank < case.encoder_ranks
    if not sends and case.sequence_parallel:
        gather = None
    end = make_end(case, rank, forward, backward, gather)
    return BridgeSender(end, rank // case.tp, run_ahead=2) if sends else BridgeReceiver(end)


def make_end(case: Case, rank: int, forward: Any, backward: Any, gather: Any = None) -> BridgeEnd:
    return BridgeEnd(
        name="vision",
        rank=rank,
        forward=forward,
        backward=backward,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        wire_dtype=case.wire_dtype,
        device=torch.device("cpu"),
        trainable=case.trainable,
        gather=gather,
        timeout_seconds=case.timeout_seconds,
    )


def rows_of(case: Case, microbatch: int, lane: int) -> FlatEmbeddings:
    values = case.of_lane(microbatch, lane, case.dense(microbatch, seed=0))
    return FlatEmbeddings(
        values.requires_grad_(case.trainable), case.runs(microbatch).split_sizes(lane)
    )


def send_all(sender: BridgeSender, case: Case) -> list[torch.Tensor | None]:
    """Every microbatch forward, then every one backward; the gradients of this lane's rows."""
    rows = [rows_of(case, m, sender.lane) for m in range(len(SAMPLES))]
    tokens = [sender.send(m, own) for m, own in enumerate(rows)]
    for token in tokens:
        if case.trainable:
            token.backward()
    return [own.values.grad for own in rows]


def receive_all(receiver: BridgeReceiver, case: Case) -> list[torch.Tensor]:
    """Every microbatch forward and backward; (T or T/tp, H) with the rows in place."""
    lane, t = divmod(receiver.end.rank - case.encoder_ranks, case.language_tp)
    found = []
    for m in range(len(SAMPLES)):
        rows, positions = receiver.receive(m)
        weights = local_slice(case, case.dense(m, seed=100)[lane], t)
        hidden = torch.zeros_like(weights).index_copy(0, positions, rows)
        if case.trainable:
            (hidden * weights).sum().backward()
        found.append(hidden.detach())
    return found


def local_slice(case: Case, sequence: torch.Tensor, t: int) -> torch.Tensor:
    if not case.sequence_parallel:
        return sequence
    return sequence.chunk(case.language_tp)[t]


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
                expected = expected.to(case.wire_dtype).float()
                assert gradient is not None
                assert gradient.dtype == torch.float32
                assert torch.equal(gradient, expected), f"gradient of microbatch {m}"
        else:
            lane, t = divmod(rank - case.encoder_ranks, case.language_tp)
            for m, hidden in enumerate(receive_all(end, case)):
                expected = case.only_rows(m, case.dense(m, seed=0)).to(case.wire_dtype).float()
                assert hidden.dtype == torch.float32
                assert torch.equal(hidden, local_slice(case, expected[lane], t)), f"microbatch {m}"
        end.finish()


def messages_per_microbatch(rank: int, case: Case) -> list[list[tuple[str, int, bool]]]:
    """What this rank sends and receives for each microbatch; the flag: on the backward group."""
    end, plans = build_end(rank, case), case.plans()
    found = []
    for m, plan in enumerate(plans):
        with recorded() as messages:
            end.begin([plan])
            if isinstance(end, BridgeSender):
                rows = rows_of(case, m, end.lane)
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
            lane, _ = divmod(rank - case.encoder_ranks, case.language_tp)
            for m, hidden in enumerate(receive_all(end, case)):
                assert torch.equal(hidden, case.only_rows(m, case.dense(m, seed=0))[lane])
        end.finish()
    return [(way, peer, group is end.end.backward) for way, peer, group in messages]


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
                token = end.send(m, rows_of(case, 0, end.lane))
                assert not token.requires_grad
            else:
                time.sleep(0.01)
                rows, _ = end.receive(m)
                assert not rows.requires_grad
    end.finish()
    assert outstanding == [0]
    return most


def wait_for_stalled(rank: int, case: Case, stalled: list[int]) -> str:
    """The error of this rank when ``stalled`` ranks never take part; they wait it out."""
    end = build_end(rank, case)
    if rank in stalled:
        time.sleep(1.5)
        return ""
    started = time.monotonic()
    with pytest.raises(BridgeError) as caught:
        take_part(end, case)
    assert time.monotonic() - started < 2
    time.sleep(0.5)  # leave the connections to the others while they wait
    return str(caught.value)


def take_part(end: BridgeSender | BridgeReceiver, case: Case) -> None:
    end.begin(case.plans())
    if isinstance(end, BridgeSender):
        send_all(end, case)
    else:
        receive_all(end, case)
    end.finish()


def never_taken(rank: int, case: Case) -> str:
    end = build_end(rank, case)
    if not isinstance(end, BridgeSender):
        time.sleep(1.5)
        return ""
    with pytest.raises(BridgeError) as caught:
        take_part(end, case)
    assert caught.value.waits_for == (1, 2)
    return str(caught.value)


def lost_peer(rank: int, case: Case) -> str:
    end = build_end(rank, case)
    if isinstance(end, BridgeSender):
        dist.barrier()
        raise SystemExit(0)  # this process ends, and its connections with it
    end.begin(case.plans())
    dist.barrier()
    with pytest.raises(BridgeError) as caught:
        receive_all(end, case)
    assert caught.value.waits_for == (0,)
    return str(caught.value)


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


def test_receiver_names_every_stalled_peer_and_its_rows_and_no_other(run_ranks: RunRanks) -> None:
    case = Case(3, 1, 1, 1, timeout_seconds=0.5)
    *_, message = run_ranks(wait_for_stalled, 4, case, [0, 2])
    assert message == (
        "bridge vision -> language: rows of microbatch 0 did not arrive within "
        "bridge.timeout_seconds 0.5; still waiting for rank 0 to send 20 rows, "
        "rank 2 to send 3 rows"
    )


def test_sender_names_the_peers_whose_gradients_do_not_come(run_ranks: RunRanks) -> None:
    case = Case(1, 1, 2, 1, timeout_seconds=0.5)
    message, *_ = run_ranks(wait_for_stalled, 3, case, [1, 2])
    assert message == (
        "bridge language -> vision: gradients of microbatch 0 did not arrive within "
        "bridge.timeout_seconds 0.5; still waiting for rank 1 to send 7 rows, "
        "rank 2 to send 16 rows"
    )


def test_sender_names_the_peers_that_do_not_take_its_rows(run_ranks: RunRanks) -> None:
    case = Case(1, 1, 2, 1, timeout_seconds=0.5)
    message, *_ = run_ranks(never_taken, 3, replace(case, trainable=False))
    assert message == (
        "bridge vision -> language: rows of microbatch 0 were not taken within "
        "bridge.timeout_seconds 0.5; still waiting for rank 1 to take 7 rows, "
        "rank 2 to take 16 rows"
    )


def test_lost_connection_names_the_peer_and_its_rows_at_once(run_ranks: RunRanks) -> None:
    case = Case(1, 1, 1, 1, timeout_seconds=30)
    started = time.monotonic()
    _, message = run_ranks(lost_peer, 2, case)
    assert time.monotonic() - started < 10
    assert message.startswith(
        "bridge vision -> language: rows of microbatch 0 failed while waiting for "
        "rank 0 to send 23 rows: Connection closed by peer"
    )


@pytest.mark.parametrize("other", ["transfers", "samples"])
def test_check_of_plans_names_the_ranks_that_differ_and_the_microbatch(
    run_ranks: RunRanks, other: str
) -> None:
    messages = run_ranks(compare_plans, 3, Case(1, 1, 2, 1), other, 1)
    assert set(messages) == {
        "bridge vision, microbatch 2: ranks [0, 2] and ranks [1] planned different "
        f"{other}; they read different data indexes or recipes"
    }


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
    receiver = BridgeReceiver(make_end(case, 1, None, None))
    receiver.begin([case.plan(TEXT_ONLY)])
    with torch.no_grad(), pytest.raises(BridgeError, match="but the rows require none"):
        receiver.receive(0)


def test_flat_embeddings_refuse_rows_that_are_not_those_of_their_samples() -> None:
    assert FlatEmbeddings(torch.zeros(0, HIDDEN), (0, 0)).values.shape == (0, HIDDEN)
    with pytest.raises(ValueError, match=r"produced 3 rows, but its samples need 4 \(\[1, 3\]\)"):
        FlatEmbeddings(torch.zeros(3, HIDDEN), (1, 3))
    with pytest.raises(ValueError, match=r"\(rows, hidden\), got \(1, 3, 5\)"):
        FlatEmbeddings(torch.zeros(1, 3, HIDDEN), (3,))
