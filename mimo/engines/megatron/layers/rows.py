"""Writes encoder rows over the placeholder positions of the text embeddings.

Letters: S local sequence, B batch (1 for packed), H hidden, n rows.
"""

from __future__ import annotations

from torch import Tensor


def place_rows(text: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """text (S, B, H), rows (n, H), positions (n,) int64 local -> (S, B, H).

    Position b·S + s is token s of sequence b: the sequences of a batch follow each other.
    The text embedding of a placeholder gets no gradient; its row does. Even with no rows the
    result depends on ``rows``, so that a backward through it reaches the bridge.

    Raises ValueError when a row has no position or positions lie outside the batch.
    """
    if rows.shape[0] != positions.shape[0]:
        raise ValueError(f"{rows.shape[0]} rows arrived for {positions.shape[0]} positions")
    flat = text.flatten(0, 1).index_copy(0, sequence_first(positions, text), rows.to(text.dtype))
    return flat.view(text.shape)


def sequence_first(positions: Tensor, hidden: Tensor) -> Tensor:
    """Positions b·S + s in a batch -> s·B + b, indices into ``hidden`` (S, B, H) flattened."""
    length, batch = hidden.shape[:2]
    return positions if batch == 1 else positions % length * batch + positions // length
