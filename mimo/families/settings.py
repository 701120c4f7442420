"""What the settings of all families have in common, and how families treat items.

Letters: T packed tokens.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel

from data.batch import PackedLane
from mimo.config.bounds import STRICT, Epsilon, Heads, InitStd, Layers, Width


@dataclass(frozen=True)
class ItemRules:
    """How a language family treats the T packed tokens of a lane that stand for items.

    positions: "mrope", where an item's tokens lie on a grid of time, height and width, or "plain",
    where each position is the previous one plus 1. bidirectional: whether the tokens of one item
    see each other in both directions.
    """

    positions: Literal["mrope", "plain"]
    bidirectional: bool

    def position_ids(self, lane: PackedLane) -> np.ndarray:
        """Return (3, T) int64; plain positions are the same three times."""
        if self.positions == "mrope":
            return lane.position_ids
        plain = np.concatenate([np.arange(length, dtype=np.int64) for length in lane.lengths])
        return np.tile(plain, (3, 1))

    def bidirectional_spans(self, lane: PackedLane) -> tuple[tuple[int, int], ...]:
        """Return (start, length) in the lane of each item whose tokens all see each other."""
        return lane.items if self.bidirectional else ()


class FamilySettings(BaseModel):
    """Sizes of a model, in elements: the keys under ``model`` that all modules have."""

    model_config = STRICT

    changeable_keys: ClassVar[frozenset[str]] = frozenset({"init_std"})
    """Keys that may change when a run resumes, because the model computes the same with them."""

    num_layers: Layers
    """Transformer layers."""
    hidden_size: Width
    """Width between layers."""
    ffn_hidden_size: Width
    """Inner width of the MLP."""
    num_attention_heads: Heads
    """Attention heads; of queries, where keys and values have fewer."""
    norm_eps: Epsilon = 1e-6
    """Added to the variance in norms."""
    init_std: InitStd = 0.02
    """Standard deviation of freshly drawn weights."""

    def layer_kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer."""
        return ("attention",) * self.num_layers

    @property
    def layer_period(self) -> int:
        """Number of layers after which the sizes of their parameters repeat."""
        return 1

    def stack_shape(self) -> dict[str, Any]:
        """Return the arguments of Megatron's `TransformerConfig` that differ between families."""
        keys = {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"}
        return {**self.model_dump(include=keys), "layernorm_epsilon": self.norm_eps}

    def scaled_down(self, chunks: int, tp: int) -> Self:
        """Return the smallest settings of the same character, for `mimo verify`.

        ``tp`` ranks and ``chunks`` of all pipeline stages divide them, and every chunk has a layer
        of every kind. Weights are large enough for every part to affect the loss.
        """
        return self.model_copy(update=self._scaled_sizes(chunks, tp))

    @abstractmethod
    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        """Return the settings that `scaled_down` changes."""

    def grid_problems(self, tp: int, chunks: int) -> Iterator[str]:
        """Yield sizes that ``tp`` ranks or the chunks of all pipeline stages do not divide."""
        for key, size in self._divided_by_tp().items():
            if size % tp:
                yield f"tp={tp} must divide {key}, which is {size}"
        if self.num_layers % chunks:
            yield f"pp · vpp = {chunks} must divide num_layers, which is {self.num_layers}"

    def expert_problems(self, ep: int, etp: int) -> Iterator[tuple[str, str]]:
        """Yield axes of experts in the grid, each with what is wrong with its size."""
        for axis, size in {"ep": ep, "etp": etp}.items():
            if size > 1:
                yield axis, f"got {size}, but this family has no experts; remove it"

    def _divided_by_tp(self) -> dict[str, int]:
        return {
            "num_attention_heads": self.num_attention_heads,
            "ffn_hidden_size": self.ffn_hidden_size,
        }
