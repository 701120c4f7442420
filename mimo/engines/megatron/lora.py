"""Low-rank adapters on Megatron's parallel linears.

Besides its weight W a linear has `lora_a` and `lora_b`, and only these two are trained. It computes
W x + scale · lora_b (lora_a x). Source: Hu et al. 2021, arXiv:2106.09685.

Each rank has the part of an adapter that goes with its part of W. The additional traffic is only R
wide:

| linear | lora_a (R, I)    | lora_b (O, R) | lora_a x                                           |
|--------|------------------|---------------|----------------------------------------------------|
| column | all of it        | the rows of W | gathered under SP; else its gradient is summed     |
| row    | the columns of W | all of it     | summed over the ranks; under SP each gets its part |

Under sequence parallelism (SP) each rank computes the gradient of the replicated matrix from its
slice of the sequence alone, so that matrix is marked for `finish_gradients` to sum its gradients.

Letters: S sequence, B batch, I inputs and O outputs of the linear, R rank of the adapter, t ranks
of the tensor-parallel group.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn
from torch.nn.functional import linear

from mimo.engines.megatron.config import LoRA


def _cut_like_weight(weight: Any, rows: int, columns: int, dim: int) -> nn.Parameter:
    """This rank's (rows, columns) of a matrix that is cut along ``dim`` as ``weight`` is."""
    parameter = nn.Parameter(weight.new_empty(rows, columns))
    set_tensor_model_parallel_attributes(parameter, True, dim, weight.partition_stride)
    return parameter


def _whole(weight: Any, rows: int, columns: int, sums_slices: bool) -> nn.Parameter:
    """A whole matrix on each rank; sums_slices: its gradients are those of sequence slices."""
    parameter = nn.Parameter(weight.new_empty(rows, columns))
    parameter.sequence_parallel = sums_slices  # type: ignore[attr-defined]
    return parameter


class LoRAColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear with an adapter."""

    def __init__(self, *args: Any, lora: LoRA, **options: Any) -> None:
        super().__init__(*args, **options)
        assert not self.gather_output, "an adapter adds to the rank's own outputs"
        assert self.weight is not None, "an adapter has a weight to adapt"
        self.scale = lora.scale
        rows, columns = self.weight.shape
        self.lora_a = _whole(self.weight, lora.rank, columns, self.sequence_parallel)
        self.lora_b = _cut_like_weight(self.weight, rows, lora.rank, dim=0)

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """input_ (S, B, I), or (S/t, B, I) under SP -> (S, B, O/t), and a bias left to add.

        Every rank of the tensor-parallel group calls it.
        """
        output, bias = super().forward(input_, *args, **options)
        down = linear(input_, self.lora_a)
        if self.sequence_parallel:
            down = gather_from_sequence_parallel_region(down, group=self.tp_group)
        else:
            down = copy_to_tensor_model_parallel_region(down, group=self.tp_group)
        return output + linear(self.scale * down, self.lora_b), bias


class LoRARowParallelLinear(RowParallelLinear):
    """A row-parallel linear with an adapter."""

    def __init__(self, *args: Any, lora: LoRA, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.input_is_parallel, "an adapter takes the rank's own inputs"
        self.scale = lora.scale
        rows, columns = self.weight.shape
        self.lora_a = _cut_like_weight(self.weight, lora.rank, columns, dim=1)
        self.lora_b = _whole(self.weight, rows, lora.rank, self.sequence_parallel)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """input_ (S, B, I/t) -> (S, B, O), or (S/t, B, O) under SP, and a bias left to add.

        Every rank of the tensor-parallel group calls it.
        """
        output, bias = super().forward(input_)
        down = linear(input_, self.lora_a)
        if self.sequence_parallel:
            down = reduce_scatter_to_sequence_parallel_region(down, group=self.tp_group)
        else:
            down = reduce_from_tensor_model_parallel_region(down, group=self.tp_group)
        return output + linear(self.scale * down, self.lora_b), bias


def let_backward_into_layers(block: TransformerBlock) -> None:
    """Make a stack with adapters run backward even if everything before it is frozen.

    Recomputation skips the backward of a layer whose input needs no gradient; its adapters would
    silently get none.
    """

    def require_gradient(module: nn.Module, args: tuple, options: dict[str, Any]) -> Any:
        hidden = options.get("hidden_states")
        if hidden is None or hidden.requires_grad or not torch.is_grad_enabled():
            return None
        return args, {**options, "hidden_states": hidden.detach().requires_grad_()}

    # A hook, because `GPTModel` has no place for a block of another class.
    block.register_forward_pre_hook(require_gradient, with_kwargs=True)
