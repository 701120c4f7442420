"""What the encoders deliver to one chunk of the language model: embeddings and feature levels.

Letters: B sequences (1 for packed) of S tokens, n rows of this rank, H hidden, k levels of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mimo.ops.segments import insert_embeddings


@dataclass(frozen=True)
class Arrived:
    """The rows of one encoder.

    embeddings: (n, H) for the first layer's input, on the first chunk; else None.
    levels: (k, n, H), the first for the chunk's first layer, and so on.
    places: (n,) int64 local positions: b·S + s is token s of sequence b.
    """

    embeddings: Tensor | None
    levels: Tensor
    places: Tensor

    @classmethod
    def of(cls, rows: Tensor, places: Tensor, hidden_size: int, *, has_embeddings: bool) -> Arrived:
        """From rows (n, j·H) of all j levels side by side, with any embeddings first."""
        if rows.shape[1] == hidden_size and has_embeddings:
            return cls(rows, rows.new_zeros(0, *rows.shape), places)
        levels = rows.unflatten(1, (-1, hidden_size)).transpose(0, 1)
        if has_embeddings:
            return cls(levels[0], levels[1:], places)
        return cls(None, levels, places)


def place_embeddings(text: Tensor, arrived: Sequence[Arrived]) -> Tensor:
    """Text embeddings (S, B, H) with the rows of all encoders in place."""
    for one in arrived:
        if one.embeddings is not None:
            text = insert_embeddings(text, one.embeddings, one.places)
    return text


def join_levels(arrived: Sequence[Arrived]) -> tuple[Tensor, Tensor] | None:
    """The levels of all encoders: rows (k, n, H) and places (n,); None where there are none.

    An encoder with fewer levels than another adds nothing at the later layers.
    """
    levels = [one for one in arrived if one.levels.shape[0] > 0]
    if not levels:
        return None
    most = max(one.levels.shape[0] for one in levels)
    padded = [
        torch.nn.functional.pad(one.levels, (0, 0, 0, 0, 0, most - one.levels.shape[0]))
        for one in levels
    ]
    return torch.cat(padded, dim=1), torch.cat([one.places for one in levels])


def cut_levels(
    levels: tuple[Tensor, Tensor], batch: int, length: int, cut: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Levels of whole sequences -> of this rank's part, one row for each of its tokens.

    cut: (S, B, H) -> (S', B, H), the same cut as for the embeddings. Tokens without a row get
    zeros. This is the readable reference for sharded delivery, which brings just this rank's rows.
    """
    rows, places = levels
    parts = []
    for level in rows:
        whole = insert_embeddings(level.new_zeros(length, batch, level.shape[1]), level, places)
        parts.append(cut(whole).transpose(0, 1).flatten(0, 1))
    return torch.stack(parts), torch.arange(parts[0].shape[0], device=places.device)
