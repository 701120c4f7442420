"""The head of a language model: logits, or the losses of chosen tokens without their logits.

Letters: S sequence of this rank, B batch, H hidden, V vocabulary, n tokens with a loss, t ranks
of the tensor-parallel group.
"""

from __future__ import annotations

from typing import Any, cast

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from mimo.ops.cross_entropy import linear_cross_entropy


class Head(ColumnParallelLinear):
    """Megatron's output layer, which also computes losses itself.

    num_tokens: of the tokenizer; later rows of the weight only pad the vocabulary.
    """

    num_tokens: int

    @classmethod
    def adopt(cls, layer: Any, num_tokens: int) -> None:
        """Make a head of the output layer that `GPTModel` has built; it names the class itself."""
        assert type(layer) is ColumnParallelLinear, f"an output layer of {type(layer)}"
        head = cast("Any", layer)
        head.__class__, head.num_tokens = cls, num_tokens

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
        at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """input_ (S, B, H), or (S/t, B, H) under SP -> logits (S, B, V/t) without ``labels``.

        With labels (n,) int64 and ``at`` (n,) int64, where s·B + b is token s of sequence b:
        losses (n,), at least fp32; without ``at`` those of all tokens in this order. Only the
        hidden states of these tokens meet the weight. Every rank of the tensor-parallel group
        calls it, with the same labels and places. Under SP all hidden states are gathered, and
        their gradients reduce-scattered; else the gradients of those of n tokens are summed.
        """
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        assert weight is not None, "a tied head is called with the embedding's weight"
        hidden = input_
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        hidden = hidden.flatten(0, 1)
        if at is not None:
            hidden = hidden.index_select(0, at)
        group = cast("Any", self.tp_group)
        if not self.sequence_parallel:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        return linear_cross_entropy(hidden, weight, labels, self.num_tokens, group), None


def output(
    labels: Tensor | None,
    at: Tensor | None,
    /,
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    **unused: object,
) -> Tensor:
    """What stands for Megatron's loss and its logits of all positions.

    labels (n,) at ``at`` (n,) -> losses (n,), or all (B, S) -> (B, S); without labels the logits of
    one sequence at (n,) -> (1, n, V/t).
    """
    if labels is None:
        assert at is not None, "logits of all positions are Megatron's"
        return output_layer(hidden_states.index_select(0, at), output_weight)[0].transpose(0, 1)
    if at is not None:
        return output_layer(hidden_states, output_weight, labels=labels, at=at)[0]
    found = output_layer(hidden_states, output_weight, labels=labels.t().flatten())[0]
    return found.view(labels.shape[::-1]).t()
