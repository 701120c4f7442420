"""Who sends which rows to whom: a row permutation between two layouts, in pure integers.

Both sides compute the same plan from the data index alone, so they know all counts and need no
handshake. It works on runs of consecutive rows (an item, cut where a slice ends), vectorised with
numpy. There is one implementation for every layout: a destination is a `ShardMap` (`shard_map.py`),
a source says which ranks hold a row (`source.py`). A rank may be on both sides.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bridge.runs import Ints, ItemRuns, Places, count_up, ints, offsets, places_of
from bridge.shard_map import ShardMap
from bridge.source import Source


@dataclass(frozen=True)
class Exchange:
    """One rank's end of a plan: its peers and, in message order, the rows it exchanges.

    peers: global ranks, ascending; counts: rows exchanged with each, all above zero. On a rank of
        both grids a peer may be the rank itself: those rows are copied, there is no message.
    index: (sum of counts,) int64, local index of each row, grouped by peer.
    """

    peers: tuple[int, ...]
    counts: tuple[int, ...]
    index: Ints

    @property
    def num_rows(self) -> int:
        """Rows of all messages together."""
        return int(self.index.size)

    @functools.cached_property
    def places(self) -> tuple[Places, ...]:
        """Where the rows of each peer's message are."""
        bounds = offsets(ints(self.counts)).tolist()
        return tuple(places_of(self.index[slice(*ends)]) for ends in itertools.pairwise(bounds))

    @functools.cached_property
    def merged_places(self) -> tuple[Places, ...]:
        """The rows of all messages in ascending order; in several slices if that saves a copy."""
        merged = places_of(np.sort(self.index))
        if isinstance(merged, slice) or not all(isinstance(own, slice) for own in self.places):
            return (merged,)
        return self.places


def _once(method: Callable[[BridgePlan, int], Exchange]) -> Callable[[BridgePlan, int], Exchange]:
    """Remember a rank's exchange: each is asked for several times in a microbatch."""
    name = method.__name__

    @functools.wraps(method)
    def remembered(plan: BridgePlan, rank: int) -> Exchange:
        return plan.cached(name, rank, lambda: method(plan, rank))

    return remembered


_PIECES = (
    *("source_rank", "source_local", "destination_rank", "destination_local", "length"),
    "returned",
)


@dataclass(frozen=True, eq=False)
class BridgePlan:
    """All transfers of one global microbatch from one encoder, as pieces of consecutive rows.

    Arrays (Q,) int64: the rank that sends a piece and its first local row there, the rank that
    receives it and its first local position there, and its length. Pieces are in order of the
    destination line, which both ends of every message follow.

    returned: (Q,) bool, whether the piece's gradient comes back, by the same way. All do when
        each row has one destination; of a row with several copies exactly one does.
    item: (Q,) the number of the run that a piece is part of, of those that it was built from.
    source_parts: over how many of its ranks an encoder lane's rows are cut; 1 when each rank holds
    all. held_rows: per encoder lane, rows on each of its ranks, with padding.
    whole: makes the plan for all ranks, where this one has the transfers of some lanes only.
    cache: results of `cached`, by name and rank.

    | on an encoder rank | on a language rank | index |
    |---|---|---|
    | `sends` rows | `receives` rows | rows of the rank; positions on the rank |
    | `collects` gradients | `returns` gradients | rows of the rank; rows that it received |

    So a sender takes ``rows[sends.index]`` and adds up gradients by
    ``gradient[collects.index] = arrived``; a receiver puts ``arrived`` at ``receives.index`` and
    answers with ``gradient_of_arrived[returns.index]``.
    """

    source_rank: Ints
    source_local: Ints
    destination_rank: Ints
    destination_local: Ints
    length: Ints
    returned: np.ndarray
    item: Ints
    source_parts: int
    held_rows: Ints
    runs: ItemRuns
    whole: Callable[[], BridgePlan] | None = field(default=None, repr=False)
    cache: dict[tuple[str, int], Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        runs: ItemRuns,
        source: Source,
        destination: ShardMap,
        returning: ShardMap | None = None,
    ) -> BridgePlan:
        """Cut every item's run at the borders of the destination, then share out the sending.

        returning: needed when ``destination`` has copies (`delivery: replicated`): the map of one
        copy, whose rank at a position sends back the gradient of the row there, to the replica that
        sent that copy. With `sharded_destination(..., sequence_parallel=False, ...)` that is one TP
        rank of its CP rank (each has the complete gradient), in even shares.
        """
        assert destination.copies == 1 or returning is not None, "copies need a returning map"
        copies = destination.copies
        filled = np.flatnonzero(runs.rows)
        item = np.repeat(filled, copies)
        copy = np.tile(np.arange(copies), filled.size)
        lane = runs.destination_lane[item] * copies + copy
        line = destination.lane_start[lane] + runs.position[item]
        run, offset, length, rank, local = destination.cut(line, runs.rows[item])
        item, copy, line = item[run], copy[run], line[run] + offset
        returned = np.ones(item.size, np.bool_)
        if returning is not None:
            there = returning.lane_start[runs.destination_lane[item]] + runs.position[item]
            piece, cut, length, owner, _ = returning.cut(there + offset, length)
            item, copy, line, offset = item[piece], copy[piece], line[piece] + cut, offset[piece]
            offset, rank, local = offset + cut, rank[piece], local[piece] + cut
            returned = owner == rank
        row = runs.source_offsets()[item] + offset
        piece, cut, length, source_rank, source_local = source.split(
            runs.source_lane[item], row, length, copy, rank
        )
        order = np.argsort(line[piece] + cut)  # no two are equal
        piece, cut = piece[order], cut[order]
        return cls(
            source_rank=source_rank[order],
            source_local=source_local[order],
            destination_rank=rank[piece],
            destination_local=local[piece] + cut,
            length=length[order],
            returned=returned[piece],
            item=item[piece],
            source_parts=source.parts,
            held_rows=source.held,
            runs=runs,
        )

    def part(
        self, pieces: slice, runs: ItemRuns, held: Ints, whole: Callable[[], BridgePlan] | None
    ) -> BridgePlan:
        """The plan of one microbatch, of several that were planned as one of more lanes.

        pieces: its pieces. runs, held: all its items, and `held_rows`. whole: as of the class.
        """
        own = {name: getattr(self, name)[pieces] for name in (*_PIECES, "item")}
        return BridgePlan(
            **own, source_parts=self.source_parts, held_rows=held, runs=runs, whole=whole
        )

    def cached[T](self, name: str, rank: int, make: Callable[[], T]) -> T:
        """Return what ``make`` does, which is called once for each name and rank."""
        if (name, rank) not in self.cache:
            self.cache[name, rank] = make()
        return self.cache[name, rank]

    @_once
    def sends(self, rank: int) -> Exchange:
        """What ``rank`` of the encoder sends forward."""
        mine = np.flatnonzero(self.source_rank == rank)
        return _exchange(self.destination_rank[mine], self.source_local[mine], self.length[mine])

    @_once
    def receives(self, rank: int) -> Exchange:
        """What ``rank`` of the language model receives."""
        mine = np.flatnonzero(self.destination_rank == rank)
        return _exchange(self.source_rank[mine], self.destination_local[mine], self.length[mine])

    @_once
    def returns(self, rank: int) -> Exchange:
        """Which of the rows that ``rank`` received it sends the gradients of, and to whom."""
        mine = np.flatnonzero(self.destination_rank == rank)
        mine = mine[np.argsort(self.source_rank[mine], kind="stable")]
        received = offsets(self.length[mine])[:-1]  # where each piece begins among them
        kept = self.returned[mine]
        mine = mine[kept]
        return _exchange(self.source_rank[mine], received[kept], self.length[mine])

    @_once
    def collects(self, rank: int) -> Exchange:
        """Which rows of ``rank`` of the encoder get their gradients, and from whom.

        The rows that it does not list get theirs on another TP rank of the lane, if rows are
        replicated there; the lane's gradient is then the sum over its TP ranks.
        """
        if self.returned.all():
            return self.sends(rank)
        mine = np.flatnonzero((self.source_rank == rank) & self.returned)
        return _exchange(self.destination_rank[mine], self.source_local[mine], self.length[mine])

    @functools.cached_property
    def digest(self) -> int:
        """A 63-bit fingerprint; equal on all ranks unless their metadata differ."""
        if self.whole is not None:
            return self.whole().digest
        hasher = hashlib.sha256(repr((len(self.held_rows), self.runs.num_samples)).encode())
        runs = self.runs
        items = (runs.sample, runs.source_lane, runs.destination_lane, runs.position, runs.rows)
        for array in (self.held_rows, *(getattr(self, name) for name in _PIECES), *items):
            hasher.update(np.ascontiguousarray(array).tobytes())
        return int.from_bytes(hasher.digest()[:8], "big") >> 1


def _exchange(peer: Ints, local: Ints, length: Ints) -> Exchange:
    order = np.argsort(peer, kind="stable")
    peer, local, length = peer[order], local[order], length[order]
    first = np.flatnonzero(np.diff(peer, prepend=-1))
    counts = np.add.reduceat(length, first) if first.size else first
    return Exchange(
        peers=tuple(peer[first].tolist()),
        counts=tuple(counts.tolist()),
        index=np.repeat(local, length) + count_up(length),
    )
