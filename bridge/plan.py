"""Who sends which rows to whom: a row permutation between two layouts, in pure integers.

Both sides compute the same plan from the data index alone, without communication, so they know
all counts and need no handshake. The plan works on runs of consecutive rows (an item, cut where
a slice ends), vectorised with numpy, not on single rows.

A lane's coordinates are its row numbers (source) or its token positions (destination). All lanes
of one side stand one after the other on a line; a `ShardMap` says which rank holds which
stretch of that line. Any sharding is just another map.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def _ints(values: Sequence[int] | NDArray) -> Ints:
    return np.asarray(values, dtype=np.int64).reshape(-1)


def _offsets(sizes: Ints) -> Ints:
    """(n,) sizes -> (n + 1,) offsets, the last is the total."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


@dataclass(frozen=True)
class ItemRuns:
    """The items of one global microbatch, one run of rows each, arrays (I,) int64.

    sample: ascending, which of the microbatch's ``num_samples`` samples the item belongs to.
    source_lane: the encoder lane that owns the item.
    destination_lane: the language lane that its sample belongs to.
    position: of its first placeholder in that lane's packed sequence; the rest follow on.
    rows: how many rows it encodes to.

    Inside a source lane, items stand in the order given here.
    """

    sample: Ints
    source_lane: Ints
    destination_lane: Ints
    position: Ints
    rows: Ints
    num_samples: int

    def split_sizes(self, lane: int) -> tuple[int, ...]:
        """(num_samples,) rows that one encoder lane produces per sample, zeros included."""
        mine = self.source_lane == lane
        sizes = np.zeros(self.num_samples, np.int64)
        np.add.at(sizes, self.sample[mine], self.rows[mine])
        return tuple(sizes.tolist())

    def source_offsets(self) -> Ints:
        """(I,) the number of each item's first row inside its source lane."""
        order = np.argsort(self.source_lane, kind="stable")
        rows = self.rows[order]
        before = np.cumsum(rows) - rows
        lane = self.source_lane[order]
        lane_starts = np.searchsorted(lane, lane)  # first item of the same lane
        offsets = np.empty_like(before)
        offsets[order] = before - before[lane_starts]
        return offsets


@dataclass(frozen=True)
class ShardMap:
    """Which rank holds which stretch of the line of all lanes.

    lane_start: (L + 1,) where each lane begins on the line.
    start: (K,) ascending, where each stretch begins; it ends where the next one begins.
    rank: (K,) global rank that holds the stretch.
    local: (K,) the index of the stretch's first coordinate on that rank.
    """

    lane_start: Ints
    start: Ints
    rank: Ints
    local: Ints

    @classmethod
    def from_lanes(
        cls, sizes: Sequence[int], split: Callable[[int, int], tuple[Ints, Ints, Ints]]
    ) -> ShardMap:
        """Build a map lane by lane: ``split(lane, size)`` gives (starts, ranks, locals)."""
        lane_start = _offsets(_ints(sizes))
        parts = [split(lane, int(size)) for lane, size in enumerate(sizes)]
        return cls(
            lane_start=lane_start,
            start=np.concatenate(
                [part[0] + lane_start[lane] for lane, part in enumerate(parts)]
            ).astype(np.int64),
            rank=np.concatenate([part[1] for part in parts]).astype(np.int64),
            local=np.concatenate([part[2] for part in parts]).astype(np.int64),
        )

    def cut(self, line: Ints, length: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Cut runs at the borders of stretches.

        line, length: (R,) runs on the line, each at least one long.
        Returns (Q,) arrays: the run each piece comes from, its offset in that run, its length,
        the rank that holds it and its first index there.
        """
        first = np.searchsorted(self.start, line, side="right") - 1
        last = np.searchsorted(self.start, line + length - 1, side="right") - 1
        count = last - first + 1
        run = np.repeat(np.arange(line.size), count)
        step = np.arange(run.size) - np.repeat(_offsets(count)[:-1], count)
        stretch = first[run] + step
        begin = np.maximum(self.start[stretch], line[run])
        limit = np.append(self.start[1:], self.lane_start[-1])[stretch]
        end = np.minimum(limit, line[run] + length[run])
        kept = end > begin  # empty stretches hold nothing
        run, stretch, begin, end = run[kept], stretch[kept], begin[kept], end[kept]
        local = self.local[stretch] + begin - self.start[stretch]
        return run, begin - line[run], end - begin, self.rank[stretch], local


def _even(size: int, parts: int) -> Ints:
    """Starts of ``parts`` consecutive stretches whose sizes differ by at most one."""
    return np.arange(parts, dtype=np.int64) * size // parts


RankOf = Callable[[int, int], int]
"""(lane, tensor-parallel index) -> global rank."""


def replicated_source(rows: Sequence[int], tp: int, rank_of: RankOf) -> ShardMap:
    """Every TP rank of a lane holds all of its rows; each sends an even share.

    rows: per encoder lane. A row's local index is its number in the lane on every rank.
    """

    def split(lane: int, size: int) -> tuple[Ints, Ints, Ints]:
        starts = _even(size, tp)
        return starts, _ints([rank_of(lane, t) for t in range(tp)]), starts

    return ShardMap.from_lanes(rows, split)


def sequence_parallel_destination(tokens: Sequence[int], tp: int, rank_of: RankOf) -> ShardMap:
    """TP rank t of a lane holds tokens [t·T/tp, (t+1)·T/tp) of its packed sequence.

    tokens: T per language lane, each a multiple of tp.
    """

    def split(lane: int, size: int) -> tuple[Ints, Ints, Ints]:
        assert size % tp == 0, f"lane {lane}: {size} tokens are not a multiple of tp {tp}"
        starts = _even(size, tp)
        return starts, _ints([rank_of(lane, t) for t in range(tp)]), np.zeros(tp, np.int64)

    return ShardMap.from_lanes(tokens, split)


def gathered_destination(
    tokens: Sequence[int], runs: ItemRuns, tp: int, rank_of: RankOf
) -> ShardMap:
    """Every TP rank of a lane needs all rows: each receives an even share of them.

    The TP group then all-gathers, so a row crosses between the grids only once. Borders lie where
    a lane's rows, in order of position, are split evenly; local indices are plain positions.
    """

    def split(lane: int, size: int) -> tuple[Ints, Ints, Ints]:
        mine = runs.destination_lane == lane
        order = np.argsort(runs.position[mine], kind="stable")
        position, rows = runs.position[mine][order], runs.rows[mine][order]
        position, rows = position[rows > 0], rows[rows > 0]
        before = _offsets(rows)
        shares = _even(int(before[-1]), tp)  # number of each share's first row
        if rows.size:
            item = np.searchsorted(before, shares, side="right") - 1
            starts = position[item] + shares - before[item]
        else:
            starts = np.zeros(tp, np.int64)
        starts[0] = 0
        return starts, _ints([rank_of(lane, t) for t in range(tp)]), starts

    return ShardMap.from_lanes(tokens, split)


@dataclass(frozen=True)
class Exchange:
    """One rank's end of a plan: its peers and, in message order, the rows it exchanges.

    peers: global ranks, ascending; counts: rows exchanged with each, all above zero.
    index: (sum of counts,) int64, local index of each row, grouped by peer.
    """

    peers: tuple[int, ...]
    counts: tuple[int, ...]
    index: Ints

    @property
    def num_rows(self) -> int:
        """Rows of all messages together."""
        return int(self.index.size)


@dataclass(frozen=True, eq=False)
class BridgePlan:
    """All transfers of one global microbatch from one encoder, as pieces of consecutive rows.

    Arrays (Q,) int64: the rank that sends a piece and its first local row there, the rank that
    receives it and its first local position there, and its length. Pieces are in order of the
    destination line, which both ends of every message follow.

    source_rows: rows per encoder lane. split_sizes: per encoder lane, rows per sample.
    """

    source_rank: Ints
    source_local: Ints
    destination_rank: Ints
    destination_local: Ints
    length: Ints
    source_rows: tuple[int, ...]
    split_sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def build(cls, runs: ItemRuns, source: ShardMap, destination: ShardMap) -> BridgePlan:
        """Cut every item's run at the borders of both maps."""
        lanes = source.lane_start.size - 1
        split_sizes = tuple(runs.split_sizes(lane) for lane in range(lanes))
        kept = runs.rows > 0
        source_line = (source.lane_start[runs.source_lane] + runs.source_offsets())[kept]
        target_line = (destination.lane_start[runs.destination_lane] + runs.position)[kept]
        rows = runs.rows[kept]
        run, offset, length, source_rank, source_local = source.cut(source_line, rows)
        target = target_line[run] + offset
        piece, cut, length, destination_rank, destination_local = destination.cut(target, length)
        order = np.argsort(target[piece] + cut, kind="stable")
        return cls(
            source_rank=source_rank[piece][order],
            source_local=(source_local[piece] + cut)[order],
            destination_rank=destination_rank[order],
            destination_local=destination_local[order],
            length=length[order],
            source_rows=tuple(np.diff(source.lane_start).tolist()),
            split_sizes=split_sizes,
        )

    def sends(self, rank: int) -> Exchange:
        """What ``rank`` of the encoder sends forward (and gets gradients for)."""
        mine = self.source_rank == rank
        return _exchange(self.destination_rank[mine], self.source_local[mine], self.length[mine])

    def receives(self, rank: int) -> Exchange:
        """What ``rank`` of the language model receives (and sends gradients for)."""
        mine = self.destination_rank == rank
        return _exchange(self.source_rank[mine], self.destination_local[mine], self.length[mine])

    @functools.cached_property
    def digest(self) -> int:
        """A 63-bit fingerprint; equal on all ranks unless their metadata differ."""
        hasher = hashlib.sha256(repr((self.source_rows, self.split_sizes)).encode())
        for array in (
            self.source_rank,
            self.source_local,
            self.destination_rank,
            self.destination_local,
            self.length,
        ):
            hasher.update(array.tobytes())
        return int.from_bytes(hasher.digest()[:8], "big") >> 1


def _exchange(peer: Ints, local: Ints, length: Ints) -> Exchange:
    order = np.argsort(peer, kind="stable")
    peer, local, length = peer[order], local[order], length[order]
    peers, first = np.unique(peer, return_index=True)
    counts = np.add.reduceat(length, first) if peers.size else np.zeros(0, np.int64)
    within = np.arange(int(length.sum())) - np.repeat(_offsets(length)[:-1], length)
    return Exchange(
        peers=tuple(peers.tolist()),
        counts=tuple(counts.tolist()),
        index=np.repeat(local, length) + within,
    )
