"""Writes encoder rows over the placeholder positions of the text embeddings.

Letters: S local sequence, B batch (1 for packed), H hidden, n rows.
"""

from __future__ import annotations

from torch import Tensor


def place_rows(text: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """text (S, B, H), rows (n, H), positions (n,) int64 local -> (S, B, H).

    Position b·S + s is token s of sequence b: the sequences of a batch follow each other.
    The text embedding of a placeholder gets no gradient; its row does. Also with no rows the
    result depends on ``rows``, so that a backward through it reaches the bridge.

    Raises ValueError when a row has no position or positions lie outside the batch.
    """
    if rows.shape[0] != positions.shape[0]:
        raise ValueError(f"{rows.shape[0]} rows arrived for {positions.shape[0]} positions")
    length, batch, hidden = text.shape
    if batch > 1:
        positions = positions % length * batch + positions // length
    flat = text.reshape(length * batch, hidden)
    return flat.index_copy(0, positions, rows.to(text.dtype)).view(text.shape)
