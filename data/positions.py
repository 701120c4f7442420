"""Rotary position ids of token sequences with items in them (mRoPE of the Qwen-VL models).

Letters: `T` tokens of all sequences, one after the other, `I` items in them, `t, h, w` grid of an
item in rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mrope_position_ids(
    lengths: Sequence[int] | np.ndarray,
    item_offsets: Sequence[int] | np.ndarray,
    grids: Sequence[tuple[int, int, int]] | np.ndarray,
    time_steps: Sequence[float] | None = None,
) -> np.ndarray:
    """int64 (3, T): temporal, height and width position of each token of its sequence.

    A text token has three equal positions, one more than the largest before it. The rows of an item
    lie on a grid that starts there: time, height and width counting up. The text after an item goes
    on from its height and width alone. Source: `get_rope_index` of Qwen2.5-VL and Qwen3-VL in
    transformers.

    lengths: tokens of each sequence. item_offsets: (I,) first placeholder of each item among all T
    tokens, ascending. grids: (I, 3) grids (t, h, w) in rows, after merging. time_steps: (I,)
    positions from one frame of an item to the next, cut down to whole ones; None for 1 each.

    Raises ValueError when items overlap, stick out of their sequence, or have an unusable grid.
    """
    if len(item_offsets) != len(grids):
        raise ValueError(f"{len(item_offsets)} item offsets but {len(grids)} grids: need one each")
    time_steps = [1.0] * len(grids) if time_steps is None else time_steps
    length, offset = np.asarray(lengths, np.int64), np.asarray(item_offsets, np.int64)
    t, h, w = np.asarray(grids, np.int64).reshape(-1, 3).T
    stop, rows = np.cumsum(length), t * h * w
    own = np.minimum(np.searchsorted(stop, offset, side="right"), len(stop) - 1)  # its sequence
    _check(offset, np.stack((t, h, w), 1), (stop - length)[own], stop[own])
    # By so much the text after an item has lower positions than without it.
    gap = rows - np.maximum(h, w)
    lower = np.zeros(stop[-1] + 1, np.int64)
    np.add.at(lower, offset + rows, gap)
    np.add.at(lower, stop, length - np.bincount(own, gap, len(stop)).astype(np.int64))
    position_ids = np.tile(np.arange(stop[-1]) - np.cumsum(lower)[:-1], (3, 1))
    # Items, line by line of their grids.
    lines = t * h
    line, height, width = _count_up(lines), np.repeat(h, lines), np.repeat(w, lines)
    frame, first = line // height, np.repeat(position_ids[0, offset], lines)
    time = frame.astype(np.float32) * np.repeat(np.array(time_steps, np.float32), lines)
    token = np.repeat(offset, rows) + _count_up(rows)
    position_ids[0, token] = np.repeat(first + time.astype(np.int64), width)
    position_ids[1, token] = np.repeat(first + line - frame * height, width)
    position_ids[2, token] = np.repeat(first, width) + _count_up(width)
    return position_ids


def _check(offset: np.ndarray, grid: np.ndarray, start: np.ndarray, stop: np.ndarray) -> None:
    """Raise ValueError unless items with these (I, 3) grids fit in start .. stop - 1, in order."""
    end = offset + grid.prod(axis=1)
    free = np.maximum(np.append(0, end)[:-1], start)
    bad = (grid < 1).any(axis=1) | (offset < free) | (end > stop)
    for number in np.flatnonzero(bad)[:1].tolist():
        raise ValueError(
            f"item {number} covers the tokens {offset[number]}..{end[number] - 1}: need them "
            f"between {free[number]} (the end of what is before it) and {stop[number] - 1}; its "
            f"grid is {tuple(grid[number].tolist())} in rows: need t, h and w of at least 1"
        )


def _count_up(counts: np.ndarray) -> np.ndarray:
    """(n,) counts -> 0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, and so on."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
