"""A workload for both ends of a bridge on real ranks, and what each rank must hold.

Every rank knows the whole workload, so each checks its part against a dense computation: forward, a
language lane's sequence with the rows in place; backward, a weight per position that is the
gradient of the row there.

Letters: T tokens of a language lane, N rows of an encoder lane, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from bridge import (
    BridgeEnd,
    BridgePlan,
    BridgeReceiver,
    BridgeSender,
    ItemRows,
    ItemRuns,
    ReplicatedSource,
    sharded_destination,
    transfer,
)
from bridge.waiting import Message
from tests.bridge.layouts import cut_alone, lanes_of

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
    language_cp: int = 1
    sequence_parallel: bool = False
    sequence_sharded: bool = False  # the encoder's output
    wire_dtype: torch.dtype = torch.float32
    trainable: bool = True
    timeout_seconds: float | None = None
    samples: tuple[tuple[int, ...], ...] = SAMPLES
    hidden: int = HIDDEN
    packed: bool = True
    colocated: bool = False  # with as many encoder ranks as the language model has
    direct: bool = False  # gradients go to every rank of a lane, as on one machine

    @property
    def encoder_ranks(self) -> int:
        return self.lanes * self.tp

    @property
    def first_language_rank(self) -> int:
        return 0 if self.colocated else self.encoder_ranks

    @property
    def num_ranks(self) -> int:
        size = self.language_lanes * self.language_cp * self.language_tp
        return self.first_language_rank + size

    def place(self, rank: int) -> tuple[int, int]:
        """A language rank's lane, and its number there."""
        return divmod(rank - self.first_language_rank, self.language_cp * self.language_tp)

    def runs(self, microbatch: int) -> ItemRuns:
        """One item per sample with rows, dealt out over lanes; a placeholder run per sample."""
        rows = np.array(self.samples[microbatch])
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
        return sum(self.segments)

    @property
    def segments(self) -> list[int]:
        """Tokens of the sequences of every lane: one packed sequence, or one of each sample."""
        count = len(self.samples[0]) // self.language_lanes
        return [16 * count] if self.packed else [16] * count

    def plan(self, microbatch: int) -> BridgePlan:
        runs = self.runs(microbatch)
        rows = np.array([sum(runs.rows_of_lane(lane)) for lane in range(self.lanes)])
        kind = cut_alone if self.sequence_sharded else ReplicatedSource
        source = kind(rows, np.arange(self.encoder_ranks).reshape(-1, self.tp))
        ranks = np.arange(self.first_language_rank, self.num_ranks)
        destination = sharded_destination(
            lanes_of([self.segments] * self.language_lanes, self.packed),
            ranks.reshape(self.language_lanes, self.language_cp, self.language_tp),
            self.sequence_parallel,
            runs,
        )
        return BridgePlan.build(runs, source, destination)

    def plans(self) -> list[BridgePlan]:
        return [self.plan(microbatch) for microbatch in range(len(self.samples))]

    def end(self, rank: int, forward: Any = None, backward: Any = None, **options: Any):
        return make_end(
            rank,
            (forward, backward),
            self.hidden,
            self.wire_dtype,
            trainable=self.trainable,
            timeout_seconds=self.timeout_seconds,
            **options,
        )

    def dense(self, microbatch: int, seed: int) -> torch.Tensor:
        """(language_lanes, T, H) random numbers, by position."""
        generator = torch.Generator().manual_seed(seed + microbatch)
        return torch.randn(self.language_lanes, self.tokens, self.hidden, generator=generator)

    def of_lane(self, microbatch: int, lane: int, dense: torch.Tensor) -> torch.Tensor:
        """(N, H) the numbers at the positions of one encoder lane's rows, in its order."""
        runs = self.runs(microbatch)
        parts = [dense.new_zeros(0, self.hidden)]
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
    "2 lanes tp2 to 2 lanes tp2 with sp, direct": Case(
        2, 2, 2, 2, sequence_parallel=True, direct=True
    ),
    "1 lane tp3 to 2 lanes tp2, direct": Case(1, 3, 2, 2, direct=True),
    "2 lanes tp3, output cut, to 1 lane tp2": Case(2, 3, 1, 2, sequence_sharded=True),
    "1 lane tp4, output cut, to 2 lanes tp2 with sp": Case(
        1, 4, 2, 2, sequence_parallel=True, sequence_sharded=True
    ),
}


# ------------------------------------------------------- functions that run inside ranks


@contextmanager
def recorded() -> Iterator[list[tuple[str, int, Any]]]:
    """Every message that starts meanwhile: (what, peer, group)."""
    start, messages = transfer._start, []

    def record(*args: Any, **options: Any) -> list[Message]:
        started = start(*args, **options)
        messages.extend(("irecv" if m.incoming else "isend", m.peer, args[2]) for m in started)
        return started

    with mock.patch.object(transfer, "_start", record):
        yield messages


def build_end(rank: int, case: Case) -> BridgeSender | BridgeReceiver:
    """This rank's end of an encoder's bridge; every rank calls it."""
    end = transport(rank, case)
    return (
        BridgeSender(end, rank // case.tp, run_ahead=2)
        if rank < case.encoder_ranks
        else BridgeReceiver(end, run_ahead=2, posted_ahead=1)
    )


def transport(rank: int, case: Case, **options: Any) -> BridgeEnd:
    """The groups of this rank's end; every rank calls it."""
    ranks = list(range(case.num_ranks))
    forward, backward = (cast("dist.ProcessGroup", dist.new_group(ranks)) for _ in range(2))
    gather = None
    language = case.language_lanes * case.language_cp
    sides = ((0, case.lanes, case.tp), (case.first_language_rank, language, case.language_tp))
    for first, lanes, tp in sides:
        for lane in range(lanes):
            lane_ranks = [first + lane * tp + t for t in range(tp)]
            group = dist.new_group(lane_ranks) if tp > 1 else None
            if rank in lane_ranks:
                gather = group
    encodes = rank < case.first_language_rank
    if (case.sequence_sharded or case.direct) if encodes else case.sequence_parallel:
        gather = None
    lanes = [range(first, first + case.tp) for first in range(0, case.encoder_ranks, case.tp)]
    replicas = lanes if case.direct else ()
    return case.end(rank, forward, backward, gather=gather, replicas=replicas, **options)


def make_end(
    rank: int,
    groups: Sequence[Any],
    hidden_size: int,
    wire_dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    trainable: bool = True,
    **options: Any,
) -> BridgeEnd:
    """One end of a bridge named vision, in fp32. groups: forward and backward."""
    forward, backward = groups
    dtype, device = torch.float32, torch.device(device)
    transport = forward, backward, hidden_size, dtype, wire_dtype, device
    return BridgeEnd("vision", rank, *transport, trainable, **options)


def encoder_part(case: Case, rows: torch.Tensor, t: int) -> torch.Tensor:
    """(N, H) a lane's rows, or with sequence-sharded output the t-th part of them, zero-padded."""
    if not case.sequence_sharded:
        return rows
    part = -(-len(rows) // case.tp)
    padded = torch.cat((rows, rows.new_zeros(case.tp * part - len(rows), case.hidden)))
    return padded[t * part : (t + 1) * part]


def rows_of(case: Case, microbatch: int, rank: int) -> ItemRows:
    """The rows of an encoder rank; its padding is not zero."""
    lane, t = divmod(rank, case.tp)
    dense = case.of_lane(microbatch, lane, case.dense(microbatch, seed=0))
    values = encoder_part(case, dense, t).clone()
    values[encoder_part(case, torch.ones_like(dense), t) == 0] = torch.nan
    return ItemRows(
        values.requires_grad_(case.trainable),
        case.runs(microbatch).rows_of_lane(lane),
        case.tp if case.sequence_sharded else 1,
    )


def send_all(sender: BridgeSender, case: Case) -> list[torch.Tensor | None]:
    """Every microbatch forward, then every one backward; the gradients of this lane's rows."""
    rows = [rows_of(case, m, sender.end.rank) for m in range(len(case.samples))]
    tokens = [sender.send(m, embeddings) for m, embeddings in enumerate(rows)]
    for token in tokens:
        if case.trainable:
            token.backward()
    return [embeddings.values.grad for embeddings in rows]


def receive_all(receiver: BridgeReceiver, case: Case) -> list[torch.Tensor]:
    """Every microbatch forward and backward; (T or T/tp, H) with the rows in place."""
    lane, number = case.place(receiver.end.rank)
    received = []
    for m in range(len(case.samples)):
        rows, positions = receiver.receive(m)
        weights = local_slice(case, case.dense(m, seed=100)[lane], number)
        hidden = torch.zeros_like(weights).index_copy(0, positions, rows)
        if case.trainable:
            (hidden * weights).sum().backward()
        received.append(hidden.detach())
    return received


def local_slice(case: Case, sequence: torch.Tensor, number: int) -> torch.Tensor:
    """A language rank's part of its lane's sequences (T, H)."""
    c, t = divmod(number, case.language_tp)
    sequences = sequence.unflatten(0, (len(case.segments), -1))
    if case.language_cp > 1:
        chunks = sequences.chunk(2 * case.language_cp, dim=1)
        sequences = torch.cat((chunks[c], chunks[2 * case.language_cp - 1 - c]), dim=1)
    if case.sequence_parallel:
        sequences = sequences.chunk(case.language_tp, dim=1)[t]
    return sequences.flatten(0, 1)
