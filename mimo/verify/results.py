"""What ranks return for comparison: plain arrays, so that comparing needs no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Fault = Callable[[], None]
"""A deliberate bug: called in every rank before anything is built, at the top of its module."""


@dataclass
class Shard:
    """This rank's part of one parameter.

    name: in the whole model, such as `language.decoder.layers.3.mlp.linear_fc1.weight`.
    tp_size: 1 if every tensor-parallel rank has the whole parameter; else it is cut along ``dim``
    into ``stride`` matrices, each of which is split over the ranks.
    gradients, weights: of each step, gradients before clipping; a frozen parameter has none.
    """

    name: str
    module: str
    rank: int
    stage: int
    lane: int
    cp: int
    tp: int
    tp_size: int
    dim: int
    stride: int
    gradients: list[np.ndarray]
    weights: list[np.ndarray]

    @property
    def where(self) -> str:
        """For example `language, rank 5 (stage 1 · lane 0 · tp 1)`."""
        cp = f" · cp {self.cp}" if self.cp else ""
        place = f"stage {self.stage} · lane {self.lane}{cp} · tp {self.tp}"
        return f"{self.module}, rank {self.rank} ({place})"


@dataclass
class RankSteps:
    """Metrics of each step, and this rank's parameters."""

    metrics: list[dict[str, Any]]
    shards: list[Shard]


@dataclass
class ReferenceParameter:
    """For each step, the gradient before clipping (none if frozen) and the weights.

    weight_floors: weights below it are rounding noise; without one the gradients' floor applies.
    """

    gradients: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    weight_floors: list[float] = field(default_factory=list)


@dataclass
class Reference:
    """steps: `loss` per token, `loss_tokens` and `grad_norm` of each.

    parameters: by name, in the order of the model.
    """

    steps: list[dict[str, float]]
    parameters: dict[str, ReferenceParameter]
