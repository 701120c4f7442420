"""Feature levels that are added to the hidden states after the first decoder layers (DeepStack).

Megatron's block hands a layer the hidden states and a `context` with its mask, meant for
cross-attention. Our layers have only self-attention, so that channel is free. Full recomputation
takes it as explicit checkpoint arguments and returns its gradients; rows that reached a recomputed
layer through a closure would lose theirs.

Letters: B sequences (1 for packed) of S local tokens, H hidden, n rows of this rank, k levels of
this chunk.
"""

from __future__ import annotations

from typing import Any, cast

from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from mimo.ops.segments import sequence_first


class DeepStackLayer(TransformerLayer):
    """A decoder layer that adds the first level to its output and passes on the others.

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
        """hidden_states (S, B, H), context (k, n, H) -> hidden states and the levels left, or None.

        context: rows, the first for this layer, and so on. context_mask: (n,) int64 positions, the
        same for all levels. They count the tokens that this rank holds, under sequence parallelism
        its slice: b·S + s is token s of sequence b. No position occurs twice. Both go through
        `GPTModel` as `extra_block_kwargs`, under names that it knows.
        Even with no rows the result depends on them, so that the backward reaches the bridge.
        """
        hidden = cast("Tensor", super().forward(*args, **kwargs)[0])
        if context is None or context_mask is None:
            return hidden, None
        places = sequence_first(context_mask, hidden)
        added = hidden.flatten(0, 1).index_add(0, places, context[0].to(hidden.dtype))
        # Pipeline schedules free what a stage has sent; they refuse views, whose memory stays.
        hidden = make_viewless_tensor(
            added.view(hidden.shape), requires_grad=hidden.requires_grad, keep_graph=True
        )
        return hidden, context[1:] if context.shape[0] > 1 else None
