"""What the indexes of all data sources say of many samples at once.

Letters: n samples, m of their items.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.index.samples import Index


def column(
    indexes: Sequence[Index], name: str, source: np.ndarray, number: np.ndarray
) -> np.ndarray:
    """source, number (k,) -> int64 (k,): the entries of the indexes' column ``name``."""
    found = np.empty(len(number), np.int64)
    for one in np.flatnonzero(np.bincount(source)).tolist():
        own = source == one
        found[own] = indexes[one].column(name, number[own])
    return found


def items_of_samples(
    indexes: Sequence[Index], source: np.ndarray, sample: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """source, sample (n,) -> item (m,), its number in its source's index, and item_sample (m,).

    In the order of the samples and of their items; item_sample counts the given samples.
    """
    first = column(indexes, "item_start", source, sample)
    count = column(indexes, "item_start", source, sample + 1) - first
    item_sample = np.repeat(np.arange(len(sample)), count)
    before = np.cumsum(count) - count
    return np.arange(len(item_sample)) + (first - before)[item_sample], item_sample


def rows_of_samples(indexes: Sequence[Index], source: np.ndarray, sample: np.ndarray) -> np.ndarray:
    """source, sample (n,) -> int64 (n,): rows of all items of each sample."""
    item, item_sample = items_of_samples(indexes, source, sample)
    rows = column(indexes, "item_rows", source[item_sample], item)
    return np.bincount(item_sample, weights=rows, minlength=len(sample)).astype(np.int64)
