"""Rotary position ids of a token sequence with images in it (mRoPE of the Qwen-VL models).

Letters: `L` tokens of one sample, `I` images in it, `t, h, w` grid of an image in patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mrope_position_ids(
    num_tokens: int,
    image_offsets: Sequence[int] | np.ndarray,
    grids: Sequence[tuple[int, int, int]] | np.ndarray,
    merge_size: int,
) -> np.ndarray:
    """int64 (3, L): temporal, height and width position of each token of one sample.

    A text token has three equal positions, one more than the largest before it. The rows of an
    image lie on a grid that starts there: temporal constant, height and width counting up.
    The next token that is generated gets `result.max() + 1`.

    num_tokens: L. image_offsets: (I,) first placeholder of each image, ascending.
    grids: (I, 3) grids (t, h, w) in patches, before merging; t must be 1 (still images).
    merge_size: patches per side that become one row.

    Raises ValueError when images overlap, stick out of the sample, or have an unusable grid.
    """
    if len(image_offsets) != len(grids):
        raise ValueError(
            f"{len(image_offsets)} image offsets but {len(grids)} grids: need one each"
        )
    position_ids = np.empty((3, num_tokens), dtype=np.int64)
    token = position = 0  # first token not written yet, and the position it gets
    for number, (offset, grid) in enumerate(zip(image_offsets, grids, strict=True)):
        t, h, w = (int(size) for size in grid)
        if t != 1 or h < 1 or w < 1 or h % merge_size or w % merge_size:
            raise ValueError(
                f"image {number} has the grid {(t, h, w)}: need t = 1, and h and w positive "
                f"multiples of merge_size {merge_size}"
            )
        rows_high, rows_wide = h // merge_size, w // merge_size
        offset, end = int(offset), int(offset) + rows_high * rows_wide
        if offset < token or end > num_tokens:
            raise ValueError(
                f"image {number} covers the tokens {offset}..{end - 1}: need them between {token} "
                f"(the end of what is before it) and {num_tokens - 1}"
            )
        position_ids[:, token:offset] = np.arange(position, position + offset - token)
        position += offset - token
        position_ids[0, offset:end] = position
        position_ids[1, offset:end] = position + np.repeat(np.arange(rows_high), rows_wide)
        position_ids[2, offset:end] = position + np.tile(np.arange(rows_wide), rows_high)
        token, position = end, position + max(rows_high, rows_wide)
    position_ids[:, token:] = np.arange(position, position + num_tokens - token)
    return position_ids
