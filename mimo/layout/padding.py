"""The multiples to which sequences are padded, so that all their parts are equally long.

Context parallelism (CP) cuts each segment of a packed sequence, or each sequence of a batch, into
2·cp chunks. Sequence parallelism (SP) then cuts a context-parallel rank's share of the whole
sequence into tp parts.
"""

from __future__ import annotations

import math

from mimo.layout.grids import Layout
from mimo.recipe.schema import Recipe


def segment_multiple(cp: int) -> int:
    """The multiple for the tokens of each segment of a packed sequence."""
    return 2 * cp if cp > 1 else 1


def sequence_multiple(cp: int, tp: int, sp: bool, tokens_on_rank: int = 1) -> int:
    """The multiple for the tokens of each whole sequence, packed or not.

    tokens_on_rank: the multiple for the part of it that a rank holds.
    """
    parts = tp if sp else 1
    return math.lcm(segment_multiple(cp) * parts, tokens_on_rank * cp * parts)


def fixed_tokens(recipe: Recipe, layout: Layout) -> int | None:
    """Tokens that every packed sequence is padded to; None for those it needs.

    User buffers have one size: `train.tp_comm_overlap`.
    """
    tokens = recipe.data.tokens_per_microbatch
    if not recipe.train.tp_comm_overlap or tokens is None:
        return None
    grid = layout.language
    multiple = sequence_multiple(grid.cp, grid.tp, grid.sp)
    return -(-tokens // multiple) * multiple
