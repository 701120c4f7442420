"""Feature levels that enter the hidden states behind the first decoder layers (DeepStack).

Megatron's block hands a layer the hidden states and, meant for cross-attention, a `context` with
its mask. Our layers attend to themselves alone, so that channel is free, and it is the one that
full recomputation takes as explicit checkpoint arguments and gives gradients back for: rows that
reached a recomputed layer by a closure would lose theirs.

Letters: S local sequence, H hidden, n rows of this rank, k levels of this chunk.
"""

from __future__ import annotations

from typing import Any, cast

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


def level_inputs(rows: Tensor | None, positions: Tensor | None) -> dict[str, Any]:
    """What `GPTModel` takes as `extra_block_kwargs`; nothing where there are no levels.

    rows: (k, n, H), the first for the chunk's first layer, and so on. positions: (n,) int64, the
    same for all levels, in the sequence that the hidden states of this rank hold: its own slice
    under sequence parallelism. Positions of one level must differ.
    """
    if rows is None or positions is None:
        return {}
    return {"context": rows[:, :, None, :], "context_mask": positions}


class DeepStackLayer(TransformerLayer):
    """A decoder layer that adds the first of the levels behind itself and passes on the others.

    Without sequence parallelism every tensor-parallel rank adds all rows of the lane, and each
    row's gradient is equal and complete on every rank. With it each rank adds those of its slice.
    """

    def forward(
        self,
        *args: Any,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (S, 1, H), context (k, n, 1, H), context_mask (n,) -> hidden states and
        the levels that are left, or None.

        Also with no rows the result depends on them, so that a backward reaches the bridge.
        """
        hidden = cast("Tensor", super().forward(*args, **kwargs)[0])
        if context is None or context_mask is None:
            return hidden, None
        hidden = hidden.index_add(0, context_mask, context[0].to(hidden.dtype))
        return hidden, context[1:] if context.shape[0] > 1 else None
