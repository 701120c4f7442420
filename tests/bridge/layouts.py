"""Random layouts, and what must happen in each, worked out row by row with plain lists.

A row is known by where it belongs: (language lane, position in the lane's packed sequence).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from hypothesis import strategies as st

from bridge import (
    BridgePlan,
    Exchange,
    ItemRuns,
    LaneSegments,
    ReplicatedSource,
    SequenceShardedSource,
    ShardMap,
    Source,
    replicated_destination,
    sharded_destination,
)
from bridge.runs import Ints, ints

Row = tuple[int, int]
Item = tuple[int, int, int]  # (tokens in front, rows, encoder lane)
Delivery = Literal["sequence_parallel", "shared_out", "replicated"]


def lanes_of(lengths: Sequence[Sequence[int]], packed: bool = True) -> LaneSegments:
    """From the segment lengths of each lane."""
    lane = np.repeat(np.arange(len(lengths)), [len(segments) for segments in lengths])
    length = ints([n for segments in lengths for n in segments])
    return LaneSegments(lane, length, len(lengths), packed)


def cut_together(rows: Sequence[Ints], ranks: Ints) -> list[SequenceShardedSource]:
    """The sources of microbatches with (L,) ``rows`` that are encoded together."""
    total, ends = np.sum(rows, axis=0), np.cumsum(rows, axis=0)
    return [SequenceShardedSource(ranks, e - r, total) for r, e in zip(rows, ends, strict=True)]


def cut_alone(rows: Ints, ranks: Ints) -> SequenceShardedSource:
    """The source of a microbatch that is encoded by itself."""
    return cut_together([rows], ranks)[0]


@dataclass(frozen=True, eq=False)
class Case:
    """One layout and one microbatch.

    samples: per language lane, per sample, its items. encoder_ranks: (lanes, tp).
    language_ranks: (lanes, cp, tp). Ranks of both may be the same (colocated, or partly).
    """

    samples: tuple[tuple[tuple[Item, ...], ...], ...]
    encoder_ranks: np.ndarray
    language_ranks: np.ndarray
    delivery: Delivery
    sequence_sharded: bool = False
    packed: bool = True

    @property
    def cp(self) -> int:
        return self.language_ranks.shape[1]

    @property
    def tp(self) -> int:
        return self.language_ranks.shape[2]

    @property
    def disjoint(self) -> bool:
        return not set(self.encoder_ranks.flat) & set(self.language_ranks.flat)

    @functools.cached_property
    def segments(self) -> list[list[int]]:
        """Per lane, padded segment lengths: one per sample and what fills the lane up.

        Without packing every sample is as long as the longest of its lane.
        """
        lanes = []
        for samples in self.samples:
            lengths = []
            for items in samples:
                length = 1 + sum(gap + rows for gap, rows, _ in items)
                lengths.append(length + -length % (2 * self.cp))
            if not self.packed:
                longest = max(lengths, default=0)
                lanes.append([longest + -longest % (2 * self.cp * self.tp)] * len(lengths))
                continue
            fill = -sum(lengths) % (2 * self.cp * self.tp)
            lanes.append(lengths + ([fill] if fill else []))
        return lanes

    @functools.cached_property
    def runs(self) -> ItemRuns:
        items_of_all: list[tuple[int, int, int, int, int]] = []
        number = 0
        for lane, samples in enumerate(self.samples):
            for s, items in enumerate(samples):
                at = sum(self.segments[lane][:s])
                for gap, rows, owner in items:
                    items_of_all.append((number, owner, lane, at + gap, rows))
                    at += gap + rows
                number += 1
        columns = np.array(items_of_all, np.int64).reshape(-1, 5).T
        return ItemRuns(*columns, num_samples=number)

    def source(self) -> Source:
        rows = np.array([len(rows) for rows in self.lane_rows], np.int64)
        kind = cut_alone if self.sequence_sharded else ReplicatedSource
        return kind(rows, self.encoder_ranks)

    def maps(self) -> tuple[ShardMap, ShardMap | None]:
        """The destination and, for replicated delivery, who returns gradients."""
        segments = lanes_of(self.segments, self.packed)
        if self.delivery == "replicated":
            tokens = [sum(lengths) for lengths in self.segments]
            return (
                replicated_destination(tokens, self.language_ranks),
                sharded_destination(segments, self.language_ranks, False, self.runs),
            )
        parallel = self.delivery == "sequence_parallel"
        return sharded_destination(segments, self.language_ranks, parallel, self.runs), None

    def build(self) -> BridgePlan:
        destination, returning = self.maps()
        return BridgePlan.build(self.runs, self.source(), destination, returning)

    # --- what must happen, one row at a time

    @functools.cached_property
    def lane_rows(self) -> list[list[Row]]:
        """The rows of each encoder lane, in its order."""
        lanes: list[list[Row]] = [[] for _ in self.encoder_ranks]
        runs = self.runs
        for i in range(runs.rows.size):
            for r in range(int(runs.rows[i])):
                row = (int(runs.destination_lane[i]), int(runs.position[i]) + r)
                lanes[int(runs.source_lane[i])].append(row)
        return lanes

    @functools.cached_property
    def rows(self) -> list[Row]:
        return sorted(itertools.chain(*self.lane_rows))

    @functools.cached_property
    def held(self) -> dict[int, list[Row]]:
        """The rows on each encoder rank."""
        content = {}
        for lane, t in np.ndindex(*self.encoder_ranks.shape):
            rows = self.lane_rows[lane]
            if self.sequence_sharded:
                padded = len(rows) + -len(rows) % self.encoder_ranks.shape[1]
                part = padded // self.encoder_ranks.shape[1]
                rows = rows[t * part : (t + 1) * part]
            content[int(self.encoder_ranks[lane, t])] = rows
        return content

    @functools.cached_property
    def cp_sequence(self) -> dict[tuple[int, int], list[Row]]:
        """(lane, cp rank) -> its sequence: the zigzag of each segment, one after the other."""
        sequences = {}
        for lane, lengths in enumerate(self.segments):
            for c in range(self.cp):
                sequence, at = [], 0
                for length in lengths:
                    segment = [(lane, at + k) for k in range(length)]
                    n = length // (2 * self.cp)
                    chunks = [segment[k * n : (k + 1) * n] for k in range(2 * self.cp)]
                    sequence += chunks[c] + chunks[2 * self.cp - 1 - c]
                    at += length
                sequences[lane, c] = sequence
        return sequences

    @functools.cached_property
    def local_sequence(self) -> dict[int, list[Row]]:
        """The row or token at each local position of each language rank."""
        content = {}
        for lane, c, t in np.ndindex(*self.language_ranks.shape):
            sequence = self.cp_sequence[lane, c]
            if self.delivery == "sequence_parallel":
                lengths = self.segments[lane]
                whole = [len(sequence)] if self.packed else [n // self.cp for n in lengths]
                mine, at = [], 0
                for length in whole:
                    part = length // self.tp
                    mine += sequence[at + t * part : at + (t + 1) * part]
                    at += length
                sequence = mine
            elif self.delivery == "replicated":
                sequence = [(lane, k) for k in range(sum(self.segments[lane]))]
            content[int(self.language_ranks[lane, c, t])] = sequence
        return content

    def rows_of(self, sequence: Sequence[Row]) -> list[Row]:
        """The positions of a sequence that take a row from the encoder."""
        rows = set(self.rows)
        return [row for row in sequence if row in rows]


@dataclass(frozen=True)
class Traffic:
    """The content of a plan's messages, if every rank follows its exchanges.

    arrived: per language rank, the rows in message order and the local index of each.
    returned: per language rank, the rows it sent gradients of. collected: per encoder rank.
    """

    forward: dict[tuple[int, int], list[Row]]
    backward: dict[tuple[int, int], list[Row]]
    arrived: dict[int, list[tuple[Row, int]]]
    returned: dict[int, list[Row]]
    collected: dict[int, list[Row]]


def simulate(case: Case, plan: BridgePlan) -> Traffic:
    """Run the plan's messages on rows that know where they belong.

    Asserts that both ends agree on every message, and that none is empty or left over.
    """
    forward: dict[tuple[int, int], list[Row]] = {}
    for rank, rows in case.held.items():
        exchange = plan.sends(rank)
        forward.update(_messages(rank, exchange, [rows[i] for i in exchange.index]))
    arrived, returned = {}, {}
    backward: dict[tuple[int, int], list[Row]] = {}
    for rank in case.local_sequence:
        exchange = plan.receives(rank)
        rows = _taken(forward, rank, exchange)
        arrived[rank] = list(zip(rows, exchange.index.tolist(), strict=True))
        exchange = plan.returns(rank)
        returned[rank] = [rows[i] for i in exchange.index]
        backward.update(_messages(rank, exchange, returned[rank]))
    collected = {}
    for rank, rows in case.held.items():
        exchange = plan.collects(rank)
        collected[rank] = _taken(backward, rank, exchange)
        assert collected[rank] == [rows[i] for i in exchange.index]
    assert sum(map(len, forward.values())) == sum(map(len, arrived.values()))
    assert sum(map(len, backward.values())) == sum(map(len, collected.values()))
    return Traffic(forward, backward, arrived, returned, collected)


def _messages(rank: int, exchange: Exchange, rows: list[Row]) -> dict[tuple[int, int], list[Row]]:
    assert len(set(exchange.peers)) == len(exchange.peers)
    assert all(count > 0 for count in exchange.counts)
    parts, start = {}, 0
    for peer, count in zip(exchange.peers, exchange.counts, strict=True):
        parts[rank, peer] = rows[start : start + count]
        start += count
    assert start == len(rows)
    return parts


def _taken(messages: dict[tuple[int, int], list[Row]], rank: int, exchange: Exchange) -> list[Row]:
    rows = []
    for peer, count in zip(exchange.peers, exchange.counts, strict=True):
        assert len(messages[peer, rank]) == count
        rows += messages[peer, rank]
    return rows


@st.composite
def cases(
    draw,
    deliveries: Sequence[Delivery] = ("sequence_parallel", "shared_out", "replicated"),
    most_encoder_tp: int = 4,
):
    """Any layout: fan-in, fan-out, non-dividing; disjoint, colocated or partly both."""
    encoder_lanes, encoder_tp = draw(st.integers(1, 5)), draw(st.integers(1, most_encoder_tp))
    lanes = draw(st.integers(1, 5))
    cp, tp = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 4]))
    item = st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, encoder_lanes - 1))
    sample = st.lists(item, max_size=3).map(tuple)
    samples = draw(
        st.lists(st.lists(sample, max_size=3).map(tuple), min_size=lanes, max_size=lanes)
    )
    sizes = encoder_lanes * encoder_tp, lanes * cp * tp
    shared = draw(st.sampled_from([0, 0, min(sizes), min(sizes) // 2]))
    world = np.random.default_rng(draw(st.integers(0, 2**16))).permutation(sum(sizes) - shared)
    return Case(
        tuple(samples),
        world[: sizes[0]].reshape(encoder_lanes, encoder_tp),
        world[sizes[0] - shared :].reshape(lanes, cp, tp),
        draw(st.sampled_from(deliveries)),
        encoder_tp > 1 and draw(st.booleans()),
        draw(st.booleans()),
    )


def filled(
    encoder: tuple[int, int], language: tuple[int, int, int], delivery: Delivery, seed: int = 0
) -> Case:
    """A disjoint layout with three samples per language lane and up to three items in each."""
    rng = np.random.default_rng(seed)

    def items() -> tuple[Item, ...]:
        return tuple(
            (int(rng.integers(5)), int(rng.integers(1, 20)), int(rng.integers(encoder[0])))
            for _ in range(rng.integers(1, 4))
        )

    samples = tuple(tuple(items() for _ in range(3)) for _ in range(language[0]))
    ranks = np.arange(np.prod(encoder) + np.prod(language))
    return Case(
        samples,
        ranks[: np.prod(encoder)].reshape(encoder),
        ranks[np.prod(encoder) :].reshape(language),
        delivery,
    )
