"""Writes encoder rows over the placeholder positions of the text embeddings.

Letters: S local sequence, B batch (1 for packed), H hidden, n rows.
"""

from __future__ import annotations

from torch import Tensor


def place_rows(text: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """text (S, B=1, H), rows (n, H), positions (n,) int64 local -> (S, 1, H).

    The text embedding of a placeholder gets no gradient; its row does. Also with no rows the
    result depends on ``rows``, so that a backward through it reaches the bridge.

    Raises ValueError when a row has no position or positions lie outside the sequence.
    """
    if rows.shape[0] != positions.shape[0]:
        raise ValueError(f"{rows.shape[0]} rows arrived for {positions.shape[0]} positions")
    if text.shape[1] != 1:
        raise ValueError(
            f"rows are placed in packed sequences (batch 1), got batch {text.shape[1]}"
        )
    return text.squeeze(1).index_copy(0, positions, rows.to(text.dtype)).unsqueeze(1)
