"""Maps positions to the ranks that need them, and rows to the ranks that send them: integers only.

All lanes of one side lie one after the other on a line. A `ShardMap` says which rank holds which
stretch of that line: the destination of a bridge is one. Any sharding (contiguous shards of a
DTensor, a later pipeline stage) is another builder in this file. Ranks come as an array
`ranks[lane, cp, tp]`, so builders never loop over ranks or lanes.

A source says which ranks hold a row, and which of them sends it. Its ``parts`` is the number of
ranks that a lane's rows are cut over (1 when each holds all), its ``held`` (L,) the rows on each
rank of a lane, padding included. Encoder context parallelism is not planned.

Letters: L lanes, G packed segments, K stretches, R runs, Q pieces of consecutive rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bridge.runs import Ints, ItemRuns, count_up, ints, offsets, totals


@dataclass(frozen=True, eq=False)
class ShardMap:
    """The rank that holds each stretch of the line of all lanes.

    lane_start: (L·copies + 1,) where each lane begins on the line; copy j of lane l is entry
        l·copies + j.
    start: (K,) ascending, where each stretch begins; it ends where the next one begins.
    rank: (K,) the global rank that holds the stretch.
    local: (K,) the index of the stretch's first position on that rank.
    copies: how many times each lane is on the line; different ranks hold each copy.
    """

    lane_start: Ints
    start: Ints
    rank: Ints
    local: Ints
    copies: int = 1

    def cut(self, line: Ints, length: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Cut runs at the borders of stretches.

        line, length: (R,) start and length of runs on the line, each at least one long.
        Returns (Q,) arrays: the run each piece comes from, its offset in that run, its length,
        the rank that holds it and its first index there.
        """
        first = np.searchsorted(self.start, line, side="right") - 1
        last = np.searchsorted(self.start, line + length - 1, side="right") - 1
        count = last - first + 1
        run = np.repeat(np.arange(line.size), count)
        stretch = first[run] + count_up(count)
        begin = np.maximum(self.start[stretch], line[run])
        limit = np.append(self.start[1:], self.lane_start[-1])[stretch]
        end = np.minimum(limit, line[run] + length[run])
        kept = end > begin  # empty stretches hold nothing
        if not kept.all():
            run, stretch, begin, end = run[kept], stretch[kept], begin[kept], end[kept]
        local = self.local[stretch] + begin - self.start[stretch]
        return run, begin - line[run], end - begin, self.rank[stretch], local


@dataclass(frozen=True, eq=False)
class LaneSegments:
    """The sequences of all language lanes, padding included.

    Without context parallelism, a lane may be one segment.
    lane: (G,) ascending, the lane of each segment. length: (G,) its padded tokens.
    packed: whether a lane's segments are one sequence, which sequence parallelism cuts as a whole.
        Else each is a sequence and is cut by itself; on a rank they follow each other.
    """

    lane: Ints
    length: Ints
    num_lanes: int
    packed: bool = True

    @property
    def tokens(self) -> Ints:
        """(L,) packed length of each lane."""
        return totals(self.lane, self.length, self.num_lanes)


def sharded_destination(
    segments: LaneSegments, ranks: Ints, sequence_parallel: bool, runs: ItemRuns
) -> ShardMap:
    """Map each position to the one rank that receives its row (`delivery: sharded`).

    ranks: (L, cp, tp). Context parallelism cuts first: rank c of cp holds chunks c and 2·cp-1-c of
    the 2·cp chunks of every segment, segment after segment.
    sequence_parallel: TP rank t then holds the t-th of tp equal parts of each sequence. Without it,
    every TP rank needs all rows of the sequence: each receives an even share of the rows in
    ``runs``, the TP group all-gathers them, and local indices count from the sequence's start.
    Raises ValueError for lengths that do not divide.
    """
    _, cp, tp = ranks.shape
    chunks = _zigzag(segments, cp)
    lane_start = offsets(segments.tokens)
    if sequence_parallel:
        tokens = segments.tokens if segments.packed else segments.length
        wrong = np.flatnonzero(tokens % (cp * tp))
        if wrong.size:
            lane = wrong[0] if segments.packed else segments.lane[wrong[0]]
            raise ValueError(
                f"language lane {lane}: {tokens[wrong[0]]} tokens are not a multiple of "
                f"cp {cp} × tp {tp}"
            )
        return _scatter(chunks, lane_start, ranks)
    return _share(chunks, lane_start, ranks, runs)


def replicated_destination(tokens: Sequence[int] | NDArray, ranks: Ints) -> ShardMap:
    """Map every position to all cp·tp ranks of its lane (`delivery: replicated`).

    tokens: T per language lane. ranks: (L, cp, tp).
    """
    copies = ranks.shape[1] * ranks.shape[2]
    lane_start = offsets(np.repeat(ints(tokens), copies))
    start = lane_start[:-1]
    return ShardMap(lane_start, start, ranks.reshape(-1), np.zeros_like(start), copies)


@dataclass(frozen=True, eq=False)
class _Chunks:
    """The chunks of context-parallel ranks: (K,) arrays, ascending on the line, none empty.

    local: index of the chunk's first token among the tokens of the context-parallel rank.
    sequence_local: the same of the chunk's sequence. sequence_length: the rank's tokens of it.
    """

    start: Ints
    length: Ints
    lane: Ints
    cp_rank: Ints
    local: Ints
    sequence_local: Ints
    sequence_length: Ints


def _zigzag(segments: LaneSegments, cp: int) -> _Chunks:
    tokens = segments.tokens
    lane_start = offsets(tokens)
    if cp == 1 and segments.packed:
        lane = np.flatnonzero(tokens)
        zeros = np.zeros_like(lane)
        return _Chunks(lane_start[lane], tokens[lane], lane, zeros, zeros, zeros, tokens[lane])
    num_chunks = 2 * cp if cp > 1 else 1
    wrong = np.flatnonzero(segments.length % num_chunks)
    if wrong.size:
        raise ValueError(
            f"language lane {segments.lane[wrong[0]]}: a segment of {segments.length[wrong[0]]} "
            f"tokens is not a multiple of 2 × cp {cp}"
        )
    held = np.flatnonzero(segments.length)
    lane, length = segments.lane[held], segments.length[held, None] // num_chunks
    segment_start = offsets(segments.length)[held, None]
    number = np.arange(num_chunks)
    before = (segment_start - lane_start[lane, None]) // cp
    first, whole = before[:, 0], segments.length[held] // cp
    if segments.packed:
        first, whole = np.zeros_like(lane), tokens[lane] // cp
    return _Chunks(
        start=(segment_start + number * length).reshape(-1),
        length=np.repeat(length, num_chunks),
        lane=np.repeat(lane, num_chunks),
        cp_rank=np.tile(np.minimum(number, number[::-1]), lane.size),
        local=(before + np.where(number < cp, 0, length)).reshape(-1),
        sequence_local=np.repeat(first, num_chunks),
        sequence_length=np.repeat(whole, num_chunks),
    )


def _scatter(chunks: _Chunks, lane_start: Ints, ranks: Ints) -> ShardMap:
    """Cut each sequence of a context-parallel rank into tp equal parts."""
    tp = ranks.shape[2]
    part = chunks.sequence_length // tp
    begin = chunks.local - chunks.sequence_local
    first = begin // part
    count = (begin + chunks.length - 1) // part - first + 1
    chunk = np.repeat(np.arange(first.size), count)
    t = first[chunk] + count_up(count)
    cut = np.maximum(begin[chunk], t * part[chunk])
    return ShardMap(
        lane_start=lane_start,
        start=chunks.start[chunk] + cut - begin[chunk],
        rank=ranks[chunks.lane[chunk], chunks.cp_rank[chunk], t],
        local=chunks.sequence_local[chunk] // tp + cut - t * part[chunk],
    )


def _share(chunks: _Chunks, lane_start: Ints, ranks: Ints, runs: ItemRuns) -> ShardMap:
    """Cut each context-parallel rank's sequence where its rows split evenly over tp ranks."""
    lanes, cp, tp = ranks.shape
    shard = chunks.lane * cp + chunks.cp_rank
    kept = runs.rows > 0
    line = (lane_start[runs.destination_lane] + runs.position)[kept]
    by_shard = ShardMap(lane_start, chunks.start, shard, chunks.local)
    run, offset, length, of_shard, _ = by_shard.cut(line, runs.rows[kept])
    line = line[run] + offset
    # A shard's chunks are in the same order on the line and in its sequence.
    order = np.lexsort((line, of_shard))
    line, before = line[order], offsets(length[order])
    rows = totals(of_shard, length, lanes * cp)
    filled = np.flatnonzero(rows)
    shares = np.arange(1, tp) * rows[filled, None] // tp  # number of each share's first row
    border = (offsets(rows)[filled, None] + shares).reshape(-1)
    piece = np.searchsorted(before, border, side="right") - 1
    border = line[piece] + border - before[piece]
    # Stretches begin at chunks and at borders; t counts the borders of the shard up to there.
    of_border = np.searchsorted(chunks.start, border, side="right") - 1
    chunk = np.concatenate((np.arange(shard.size), of_border))
    start = np.concatenate((chunks.start, border))
    stride = lane_start[-1] + 1
    borders = np.repeat(filled, tp - 1) * stride + border
    line_of_shard = shard[chunk] * stride
    t = np.searchsorted(borders, line_of_shard + start, side="right")
    t -= np.searchsorted(borders, line_of_shard)
    order = np.argsort(start, kind="stable")
    chunk, start, t = chunk[order], start[order], t[order]
    return ShardMap(
        lane_start=lane_start,
        start=start,
        rank=ranks.reshape(lanes * cp, tp)[shard[chunk], t],
        local=chunks.local[chunk] + start - chunks.start[chunk],
    )


# ---------------------------------------------------------------------------- sources


@dataclass(frozen=True, eq=False)
class ReplicatedSource:
    """Every TP rank of an encoder lane holds all of its rows; a row's number is its index there.

    A rank that needs a row which it holds copies it. The lane's ranks send all other rows in even
    shares, of the second copy after all of the first.
    held: (L,) rows per lane. ranks: (L, tp).
    """

    held: Ints
    ranks: Ints

    parts = 1

    def split(
        self, lane: Ints, row: Ints, length: Ints, copy: Ints, destination: Ints
    ) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Cut pieces so that each has one sender.

        lane, row, length, copy, destination: (Q,) pieces of rows [row, row + length) of a lane,
        which copy of those rows each is, and the rank that it goes to.
        Returns arrays: the piece each part comes from, its offset in that piece, its length, the
        rank that sends it and its first index there.
        """
        lanes, tp = self.ranks.shape
        is_copied = (self.ranks[lane] == destination[:, None]).any(axis=1)
        copied, sent = np.flatnonzero(is_copied), np.flatnonzero(~is_copied)
        copies = int(copy.max(initial=0)) + 1
        line = offsets(self.held)[lane] * copies + copy * self.held[lane] + row
        sent = sent[np.argsort(line[sent], kind="stable")]
        lengths = length[sent]
        num_sent = totals(lane[sent], lengths, lanes)
        lane_start = offsets(num_sent)
        shares = lane_start[:-1, None] + np.arange(tp) * num_sent[:, None] // tp
        senders = ShardMap(lane_start, shares.reshape(-1), self.ranks.reshape(-1), ints(shares))
        run, cut, length_sent, rank, _ = senders.cut(offsets(lengths)[:-1], lengths)
        piece = np.concatenate((sent[run], copied))
        cut = np.concatenate((cut, np.zeros_like(copied)))
        length_sent = np.concatenate((length_sent, length[copied]))
        rank = np.concatenate((rank, destination[copied]))
        return piece, cut, length_sent, rank, row[piece] + cut


@dataclass(frozen=True, eq=False)
class SequenceShardedSource:
    """TP rank t of an encoder lane holds the t-th of tp > 1 equal parts of its rows.

    Rows are padded to a multiple of tp, so the last ranks hold padding. A row is on one rank, which
    sends it. Microbatches that are encoded together are cut together, but each has its own source.

    ranks: (L, tp). before: (L,) rows of earlier microbatches that are encoded together with this
    one. total: (L,) rows of all of them, without padding.
    """

    ranks: Ints
    before: Ints
    total: Ints

    @property
    def parts(self) -> int:
        return self.ranks.shape[1]

    @property
    def held(self) -> Ints:
        """Rows of all microbatches on each rank."""
        return -(-self.total // self.parts)

    def split(
        self, lane: Ints, row: Ints, length: Ints, copy: Ints, destination: Ints
    ) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Cut pieces so that each has one sender; see `ReplicatedSource.split`."""
        lanes, tp = self.ranks.shape
        lane_start = offsets(self.total)
        starts = np.minimum(np.arange(tp) * self.held[:, None], self.total[:, None])
        starts = (lane_start[:-1, None] + starts).reshape(-1)
        local = np.zeros(lanes * tp, np.int64)
        held = ShardMap(lane_start, starts, self.ranks.reshape(-1), local)
        return held.cut(lane_start[lane] + self.before[lane] + row, length)


Source = ReplicatedSource | SequenceShardedSource
"""The holders of the rows of all encoder lanes."""
