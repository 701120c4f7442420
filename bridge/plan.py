"""The plan of a bridge: which rank sends which rows to which rank, for one microbatch.

A row is the vector of one placeholder token. One encoder lane makes it, and one position of a
language lane needs it. A plan is therefore a permutation of rows between two layouts. It is a table
of pieces, which are runs of consecutive rows with one sender and one receiver. Every rank computes
the same table from the data index, with integers and without communication. So both ends of a
message know its length, and no handshake is needed.

Example: an image has 6 rows at positions 10 to 15. Encoder rank 0 makes them. Language rank 1 holds
positions 0 to 11, rank 2 holds 12 to 23. The item is one run; the border at 12 cuts it into two
pieces, which are two messages:

| source_rank | source_local | destination_rank | destination_local | length |
|---|---|---|---|---|
| 0 | 0 | 1 | 10 | 2 |
| 0 | 2 | 2 | 0 | 4 |

`BridgePlan.build` makes the table: `ShardMap.cut` finds the receivers, `Source.split` the senders
(both in `shard_map.py`). One implementation serves every layout. A rank may be on both sides.
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
from bridge.shard_map import ShardMap, Source


@dataclass(frozen=True)
class Exchange:
    """One rank's end of a plan, in one direction: its peers and the rows that it exchanges.

    peers: global ranks, ascending (`BridgeEnd.collects` repeats them). counts: rows exchanged with
        each, above zero. On a rank of both grids a peer may be the rank itself: those rows are
        copied, without a message.
    index: (sum of counts,) int64, the local index of each row, message after message.
    """

    peers: tuple[int, ...]
    counts: tuple[int, ...]
    index: Ints

    @property
    def num_rows(self) -> int:
        return int(self.index.size)

    @functools.cached_property
    def places(self) -> tuple[Places, ...]:
        bounds = offsets(ints(self.counts)).tolist()
        return tuple(places_of(self.index[slice(*ends)]) for ends in itertools.pairwise(bounds))

    @functools.cached_property
    def merged_places(self) -> tuple[Places, ...]:
        """The local rows of all messages; as slices, even several, where that saves a copy."""
        merged = places_of(np.sort(self.index))
        if isinstance(merged, slice) or not all(isinstance(place, slice) for place in self.places):
            return (merged,)
        return self.places


_COLUMNS = ("source_rank", "source_local", "destination_rank", "destination_local", "length")


@dataclass(frozen=True, eq=False)
class BridgePlan:
    """All transfers of one microbatch from one encoder, as a table of Q pieces.

    Columns (Q,) int64: the rank that sends a piece and its first local row there, the rank that
    receives it and its first local position there, its length. Pieces are in order of the
    destination line (see `ShardMap`), which both ends of every message follow.

    returned: (Q,) bool, whether the receiver sends the piece's gradient back. A row with one
        destination is always returned; of a row with several copies exactly one copy is.
    item: (Q,) the item of ``runs`` that a piece belongs to.
    source_parts: over how many of its ranks an encoder lane's rows are cut; 1 if each has all.
    held_rows: per encoder lane, the rows on each of its ranks, padding included.
    whole: makes the plan of all ranks, if this one has the transfers of some lanes only.
    cache: results of `cached`, by name and rank.

    A rank gets its messages from four methods:

    | on an encoder rank | on a language rank | index |
    |---|---|---|
    | `sends` rows | `receives` rows | rows of the rank; positions on the rank |
    | `collects` gradients | `returns` gradients | rows of the rank; rows that it received |

    A sender takes ``rows[sends.index]`` and writes arriving gradients to
    ``gradient[collects.index]``; each row's comes back once. A receiver puts ``arrived`` at
    ``receives.index`` and answers with ``gradient_of_arrived[returns.index]``.
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
        """Cut every item's run where the receiver changes, then where the sender changes.

        returning: needed when ``destination`` has copies (`delivery: replicated`). It maps each
            position to the one rank that returns the gradient of the row there. It returns it to
            whoever sent that rank's copy. `sharded_destination(..., sequence_parallel=False, ...)`
            gives even shares to the TP ranks of the position's CP rank, which all have the
            complete gradient.
        """
        assert destination.copies == 1 or returning is not None, "copies need a returning map"
        copies = destination.copies
        # Every copy of every item is a run on the destination line.
        with_rows = np.flatnonzero(runs.rows)
        item = np.repeat(with_rows, copies)
        copy = np.tile(np.arange(copies), with_rows.size)
        lane = runs.destination_lane[item] * copies + copy
        line = destination.lane_start[lane] + runs.position[item]
        # Cut where the receiver changes; ``offset`` is the piece's first row in its item.
        run, offset, length, rank, local = destination.cut(line, runs.rows[item])
        item, copy, line = item[run], copy[run], line[run] + offset
        returned = np.ones(item.size, np.bool_)
        if returning is not None:
            # Cut where the rank that returns gradients changes.
            start = returning.lane_start[runs.destination_lane[item]] + runs.position[item]
            piece, cut, length, owner, _ = returning.cut(start + offset, length)
            item, copy, line = item[piece], copy[piece], line[piece] + cut
            offset, rank, local = offset[piece] + cut, rank[piece], local[piece] + cut
            returned = owner == rank
        # Cut where the sender changes.
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
        """Cut one microbatch out of a plan of several, whose lanes are numbered one after another.

        pieces: its rows of the table. runs, held: all its items, and their `held_rows`.
        """
        columns = {name: getattr(self, name)[pieces] for name in (*_COLUMNS, "returned", "item")}
        return BridgePlan(
            **columns, source_parts=self.source_parts, held_rows=held, runs=runs, whole=whole
        )

    def cached[T](self, name: str, rank: int, make: Callable[[], T]) -> T:
        """Return ``make()``, called once per name and rank: a microbatch asks several times."""
        if (name, rank) not in self.cache:
            self.cache[name, rank] = make()
        return self.cache[name, rank]

    def sends(self, rank: int) -> Exchange:
        return self.cached("sends", rank, lambda: self._of_sender(self.source_rank == rank))

    def receives(self, rank: int) -> Exchange:
        def receives() -> Exchange:
            mine = self.destination_rank == rank
            local = self.destination_local[mine]
            return _exchange(self.source_rank[mine], local, self.length[mine])

        return self.cached("receives", rank, receives)

    def returns(self, rank: int) -> Exchange:
        """Return the received rows of ``rank`` whose gradients it sends back."""

        def returns() -> Exchange:
            mine = np.flatnonzero(self.destination_rank == rank)
            # Received rows lie message after message, by sender; number them in that order.
            mine = mine[np.argsort(self.source_rank[mine], kind="stable")]
            received = offsets(self.length[mine])[:-1]  # where each piece begins among them
            kept = self.returned[mine]
            mine = mine[kept]
            return _exchange(self.source_rank[mine], received[kept], self.length[mine])

        return self.cached("returns", rank, returns)

    def collects(self, rank: int) -> Exchange:
        """Return the rows of ``rank`` of the encoder whose gradients come back to it.

        If TP ranks hold the same rows, each gets the gradients of a part of them; `share_out` then
        gives every TP rank those of all.
        """
        if self.returned.all():
            return self.sends(rank)
        sender = self.source_rank
        return self.cached(
            "collects", rank, lambda: self._of_sender((sender == rank) & self.returned)
        )

    def _of_sender(self, mine: np.ndarray) -> Exchange:
        local = self.source_local[mine]
        return _exchange(self.destination_rank[mine], local, self.length[mine])

    @functools.cached_property
    def digest(self) -> int:
        """A 63-bit fingerprint; equal on all ranks unless their metadata differ."""
        if self.whole is not None:
            return self.whole().digest
        runs = self.runs
        hasher = hashlib.sha256(repr((len(self.held_rows), runs.num_samples)).encode())
        items = (runs.sample, runs.source_lane, runs.destination_lane, runs.position, runs.rows)
        columns = (getattr(self, name) for name in (*_COLUMNS, "returned"))
        for array in (self.held_rows, *columns, *items):
            hasher.update(np.ascontiguousarray(array).tobytes())
        return int.from_bytes(hasher.digest()[:8], "big") >> 1


def _exchange(peer: Ints, local: Ints, length: Ints) -> Exchange:
    """Group pieces by peer, in their order: each has a peer, a first local row and a length."""
    order = np.argsort(peer, kind="stable")
    peer, local, length = peer[order], local[order], length[order]
    first = np.flatnonzero(np.diff(peer, prepend=-1))
    counts = np.add.reduceat(length, first) if first.size else first
    return Exchange(
        peers=tuple(peer[first].tolist()),
        counts=tuple(counts.tolist()),
        index=np.repeat(local, length) + count_up(length),
    )
