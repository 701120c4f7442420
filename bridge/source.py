"""Which encoder rank holds which row, and which of them sends it, in pure integers.

Every source has ``parts``: over how many of its ranks a lane's rows are cut, 1 when each holds all;
and ``held``: (L,) rows that each rank of a lane holds, padding included. A row's owner does not
include a CP rank: encoder context parallelism is not planned.

Letters: L encoder lanes, Q pieces of consecutive rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bridge.runs import Ints, ints, offsets, totals
from bridge.shard_map import ShardMap


@dataclass(frozen=True, eq=False)
class ReplicatedSource:
    """Every TP rank of a lane holds all of its rows, and a row's number is its index there.

    A rank that needs a row which it holds copies it. All other copies of the lane's rows, one
    copy of all rows after the other, are sent in even shares by the lane's ranks.
    rows: (L,) rows per lane. ranks: (L, tp).
    """

    rows: Ints
    ranks: Ints

    parts = 1

    @property
    def held(self) -> Ints:
        """All rows of the lane."""
        return self.rows

    def split(
        self, lane: Ints, row: Ints, length: Ints, copy: Ints, destination: Ints
    ) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Cut pieces so that one rank sends each.

        lane, row, length, copy, destination: (Q,) pieces of rows [row, row + length) of a lane,
        which copy of those rows it is, and the rank that it goes to.
        Returns arrays: the piece each part comes from, its offset in that piece, its length, the
        rank that sends it and its first index there.
        """
        lanes, tp = self.ranks.shape
        copied = (self.ranks[lane] == destination[:, None]).any(axis=1)
        sent = np.flatnonzero(~copied)
        copies = int(copy.max(initial=0)) + 1
        line = offsets(self.rows)[lane] * copies + copy * self.rows[lane] + row
        sent = sent[np.argsort(line[sent], kind="stable")]
        lengths = length[sent]
        num_sent = totals(lane[sent], lengths, lanes)
        lane_start = offsets(num_sent)
        shares = lane_start[:-1, None] + np.arange(tp) * num_sent[:, None] // tp
        shares = ShardMap(lane_start, shares.reshape(-1), self.ranks.reshape(-1), ints(shares))
        run, cut, length_sent, rank, _ = shares.cut(offsets(lengths)[:-1], lengths)
        here = np.flatnonzero(copied)
        piece = np.concatenate((sent[run], here))
        cut = np.concatenate((cut, np.zeros_like(here)))
        length_sent = np.concatenate((length_sent, length[here]))
        rank = np.concatenate((rank, destination[here]))
        return piece, cut, length_sent, rank, row[piece] + cut


@dataclass(frozen=True, eq=False)
class SequenceShardedSource:
    """TP rank t of a lane holds the t-th of tp > 1 equal parts of its rows, padded to a multiple.

    Only the last ranks hold padding; no row is on two ranks, so there is no choice of a sender.
    When several microbatches are encoded in one go, it is the rows of all of them that are cut,
    but each has its own source.

    rows: (L,) rows per lane, without padding. ranks: (L, tp).
    before: (L,) rows of earlier microbatches in the same go. total: (L,) rows of the whole go.
    """

    rows: Ints
    ranks: Ints
    before: Ints
    total: Ints

    def __post_init__(self) -> None:
        # Plans with one part say that rows are counted from their microbatch's start.
        assert self.parts > 1, "rows of a lane with one rank are not cut: use ReplicatedSource"

    @property
    def parts(self) -> int:
        """All ranks of a lane."""
        return self.ranks.shape[1]

    @property
    def held(self) -> Ints:
        """Of the whole go."""
        return -(-self.total // self.parts)

    def split(
        self, lane: Ints, row: Ints, length: Ints, copy: Ints, destination: Ints
    ) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """As `ReplicatedSource.split`."""
        lanes, tp = self.ranks.shape
        lane_start = offsets(self.total)
        starts = np.minimum(np.arange(tp) * self.held[:, None], self.total[:, None])
        starts = (lane_start[:-1, None] + starts).reshape(-1)
        local = np.zeros(lanes * tp, np.int64)
        held = ShardMap(lane_start, starts, self.ranks.reshape(-1), local)
        return held.cut(lane_start[lane] + self.before[lane] + row, length)


Source = ReplicatedSource | SequenceShardedSource
"""Where the rows of all encoder lanes are."""
