"""What both sides return, as plain arrays.

A point is a place in the model where a tensor is compared. Its whole tensor has a row for each
token of all samples, or for each patch or row of all items, in the order of the samples.

Letters: L tokens of one sample, T of all, P patches, C numbers per patch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mimo.verify.results import RankSteps

TOKENS, PIXELS, POSITIONS = "tokens", "pixels", "positions"
INPUTS = (TOKENS, PIXELS, POSITIONS)
"""Points at which both sides must have the same numbers."""
LOGITS = "language.head"


def level_point(number: int) -> str:
    """The point of a tower's rows: 0 is the embeddings, other numbers are levels."""
    return "vision.rows" if number == 0 else f"vision.level {number - 1}"


@dataclass(frozen=True)
class Part:
    """What one rank holds of a point.

    index: (n,) rows of the whole tensor. columns: the first column. values: (n, k).
    """

    point: str
    where: str
    index: np.ndarray
    values: np.ndarray
    columns: int = 0


@dataclass(frozen=True)
class OursOnRank:
    """parts: of every point that this rank holds a part of. steps: one step, and its shards."""

    parts: list[Part]
    steps: RankSteps


@dataclass
class Theirs:
    """What transformers computed, sample by sample.

    points: whole tensors by point, in forward order. loss: mean over the tokens that count.
    gradients, weights: by key of the checkpoint, only those asked for.
    """

    points: dict[str, np.ndarray]
    loss: float
    loss_tokens: int
    gradient_norm: float
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
