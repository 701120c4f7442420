"""Rotary position ids of a token sequence with items in it (mRoPE of the Qwen-VL models).

Letters: `L` tokens of one sample, `I` items in it, `t, h, w` grid of an item in rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mrope_position_ids(
    num_tokens: int,
    item_offsets: Sequence[int] | np.ndarray,
    grids: Sequence[tuple[int, int, int]] | np.ndarray,
    time_steps: Sequence[float] | None = None,
) -> np.ndarray:
    """int64 (3, L): temporal, height and width position of each token of one sample.

    A text token has three equal positions, one more than the largest before it. The rows of an
    item lie on a grid that starts there: time, height and width counting up. The text after an
    item goes on from its height and width alone, however long it lasts.
    Source: `get_rope_index` of Qwen2.5-VL and Qwen3-VL in transformers.

    num_tokens: L. item_offsets: (I,) first placeholder of each item, ascending.
    grids: (I, 3) grids (t, h, w) in rows, after merging.
    time_steps: (I,) positions from one frame of an item to the next, cut down to whole ones; None
    for 1 each.

    Raises ValueError when items overlap, stick out of the sample, or have an unusable grid.
    """
    if len(item_offsets) != len(grids):
        raise ValueError(f"{len(item_offsets)} item offsets but {len(grids)} grids: need one each")
    if time_steps is None:
        time_steps = [1.0] * len(grids)
    assert len(time_steps) == len(grids), "a time step per item"
    position_ids = np.empty((3, num_tokens), dtype=np.int64)
    token = position = 0  # first token not written yet, and the position it gets
    items = zip(item_offsets, grids, time_steps, strict=True)
    for number, (offset, grid, step) in enumerate(items):
        t, h, w = (int(size) for size in grid)
        if min(t, h, w) < 1:
            raise ValueError(
                f"item {number} has the grid {(t, h, w)} in rows: need t, h and w of at least 1"
            )
        offset, end = int(offset), int(offset) + t * h * w
        if offset < token or end > num_tokens:
            raise ValueError(
                f"item {number} covers the tokens {offset}..{end - 1}: need them between {token} "
                f"(the end of what is before it) and {num_tokens - 1}"
            )
        position_ids[:, token:offset] = np.arange(position, position + offset - token)
        position += offset - token
        times = (np.arange(t, dtype=np.float32) * np.float32(step)).astype(np.int64)
        position_ids[0, offset:end] = position + np.repeat(times, h * w)
        position_ids[1, offset:end] = position + np.tile(np.repeat(np.arange(h), w), t)
        position_ids[2, offset:end] = position + np.tile(np.arange(w), t * h)
        token, position = end, position + max(h, w)
    position_ids[:, token:] = np.arange(position, position + num_tokens - token)
    return position_ids
