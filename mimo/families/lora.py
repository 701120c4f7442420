"""The parts of low-rank adapters (LoRA) that need no engine: their names, and merging them.

Letters: I inputs, O outputs, R rank of the adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_ENDINGS = (".lora_a", ".lora_b")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter, not to the model that it adapts."""
    return name.endswith(_ENDINGS)


def adapter_names(weight: str) -> tuple[str, str]:
    """The names of the two matrices that adapt the parameter of this name."""
    linear = weight.removesuffix(".weight")
    lora_a, lora_b = (f"{linear}{ending}" for ending in _ENDINGS)
    return lora_a, lora_b


def adapter_shapes(weight: Sequence[int], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of the two matrices that adapt a whole weight (O, I): (R, I) and (O, R)."""
    outputs, inputs = weight
    return (rank, inputs), (outputs, rank)


def merged_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """weight (O, I), lora_a (R, I), lora_b (O, R) -> weight + scale · lora_b lora_a, (O, I).

    All have one dtype; the sum is taken in fp32 at least. scale: the recipe's. A rank's parts of
    the three give its part of the result.
    """
    import torch  # here: recipes are read without it

    wide = torch.promote_types(weight.dtype, torch.float32)
    update = lora_b.to(wide) @ lora_a.to(wide)
    return (weight.to(wide) + scale * update).to(weight.dtype)
