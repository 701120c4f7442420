"""The items of a microbatch as runs of rows, in pure integers.

A lane's coordinates are its row numbers (source) or its token positions (destination). All lanes
of one side lie one after the other on a line, so that one sorted array describes them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Places = slice | Ints
"""Rows of a buffer: a slice where they are contiguous, which needs no copy."""


def ints(values: Sequence[int] | NDArray) -> Ints:
    """Any sequence of integers -> (n,) int64."""
    return np.asarray(values, dtype=np.int64).reshape(-1)


def offsets(sizes: Ints) -> Ints:
    """(n,) sizes -> (n + 1,) offsets, the last is the total."""
    result = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=result[1:])
    return result


def totals(group: Ints, sizes: Ints, num_groups: int) -> Ints:
    """(n,) group of each size -> (num_groups,) sums; exact below 2^53."""
    return np.bincount(group, weights=sizes, minlength=num_groups).astype(np.int64)


def places_of(index: Ints) -> Places:
    """(n,) indices of rows -> a slice if they are contiguous, ascending and at least one."""
    if not index.size or index[-1] - index[0] != index.size - 1 or (index[1:] <= index[:-1]).any():
        return index
    return slice(int(index[0]), int(index[-1]) + 1)


def count_up(counts: Ints) -> Ints:
    """(n,) counts -> 0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, and so on."""
    before = offsets(counts)
    return np.arange(before[-1]) - np.repeat(before[:-1], counts)


@dataclass(frozen=True)
class ItemRuns:
    """The items of one global microbatch, one run of rows each, arrays (I,) int64.

    sample: ascending, which of the microbatch's ``num_samples`` samples the item belongs to.
    source_lane: the encoder lane that owns the item.
    destination_lane: the language lane that its sample belongs to.
    position: of its first placeholder in that lane's packed sequence; the others follow.
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
        return tuple(totals(self.sample[mine], self.rows[mine], self.num_samples).tolist())

    def source_offsets(self) -> Ints:
        """(I,) the number of each item's first row inside its source lane."""
        order = np.argsort(self.source_lane, kind="stable")
        rows = self.rows[order]
        before = np.cumsum(rows) - rows
        lane = self.source_lane[order]
        lane_starts = np.searchsorted(lane, lane)  # first item of the same lane
        result = np.empty_like(before)
        result[order] = before - before[lane_starts]
        return result
