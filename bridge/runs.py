"""The items of a microbatch as runs of rows, and arithmetic on arrays of integers."""

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
    """(n,) indices of rows -> a slice if they ascend without gaps and there is one at least."""
    if not index.size or index[-1] - index[0] != index.size - 1 or (index[1:] <= index[:-1]).any():
        return index
    return slice(int(index[0]), int(index[-1]) + 1)


def count_up(counts: Ints) -> Ints:
    """(n,) counts -> 0, ..., counts[0] - 1, 0, ..., counts[1] - 1, and so on."""
    before = offsets(counts)
    return np.arange(before[-1]) - np.repeat(before[:-1], counts)


@dataclass(frozen=True)
class ItemRuns:
    """The items of one global microbatch, one run of rows each, arrays (I,) int64.

    sample: ascending, the item's sample in the microbatch, of ``num_samples``.
    source_lane: the encoder lane that encodes the item; a lane encodes its items in this order.
    destination_lane: the language lane of its sample.
    position: of its first placeholder in that lane's packed sequence; the others follow.
    rows: the number of rows that it encodes to.
    """

    sample: Ints
    source_lane: Ints
    destination_lane: Ints
    position: Ints
    rows: Ints
    num_samples: int

    def rows_of_lane(self, lane: int) -> tuple[int, ...]:
        """Return the rows of each item that one encoder lane encodes."""
        return tuple(self.rows[self.source_lane == lane].tolist())

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
