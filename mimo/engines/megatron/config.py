"""Megatron's `TransformerConfig` for our models, its group types, and its cuts of a sequence.

`gather_sequence`: each rank's (S/tp, ...) -> all (S, ...) on every rank; the backward
reduce-scatters. All ranks of the group call it. `scatter_sequence`: (S, B, H), equal on all ranks
-> this rank's (S/tp, B, H); the backward all-gathers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.hyper_comm_grid import HyperCommGrid as HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region as gather_sequence,  # noqa: F401
)
from megatron.core.tensor_parallel.mappings import (
    scatter_to_sequence_parallel_region as scatter_sequence,  # noqa: F401
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from mimo.engines.megatron.cpu import adapt_to_machine
from mimo.ops.acceleration import fp8_flags, layer_choice


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of a module's layers, ``rank`` wide, with outputs scaled by ``scale``.

    targets: the linears with an adapter, out of "qkv", "proj", "fc1" and "fc2".
    """

    rank: int
    scale: float
    targets: frozenset[str]


@dataclass(frozen=True)
class ModuleContext:
    """The settings with which a family builds its part of a module on this rank.

    num_chunks: model chunks of each stage; several with an interleaved pipeline. chunk: the one to
        build; None without interleaving.
    scatter_embedding: whether the embedding scatters its output over a sequence-parallel group. If
        not, `place` gets whole sequences and scatters them; a forward from token ids alone still
        scatters inside.
    provided: names in the whole module of parameters that a checkpoint is about to fill.
    """

    groups: ProcessGroupCollection
    dtype: torch.dtype
    sequence_parallel: bool = False
    num_chunks: int = 1
    chunk: int | None = None
    recompute: str = "none"
    scatter_embedding: bool = True
    lora: LoRA | None = None
    provided: frozenset[str] = frozenset()
    fp8: str = "none"

    @property
    def is_first_stage(self) -> bool:
        return self.groups.pp.rank() == 0 and self.chunk in (None, 0)

    @property
    def is_last_stage(self) -> bool:
        last = self.groups.pp.rank() == self.groups.pp.size() - 1
        return last and self.chunk in (None, self.num_chunks - 1)


def transformer_config(shape: Mapping[str, Any], ctx: ModuleContext) -> TransformerConfig:
    """Return the engine's configuration of one module on this rank.

    shape: the arguments of `TransformerConfig` that differ between families.
    """
    adapt_to_machine()
    recompute = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    }[ctx.recompute]
    shape = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "activation_func": functional.silu,
        **shape,
    }
    pipeline = ctx.groups.pp.size()
    fuse = layer_choice(ctx.dtype).fused_activation
    options = shape | recompute | fp8_flags(ctx.fp8)
    options |= fused_activation(shape["activation_func"], shape["gated_linear_unit"], fuse)
    return TransformerConfig(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ctx.groups.tp.size(),
        context_parallel_size=ctx.groups.cp.size(),
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=(ctx.num_chunks if ctx.num_chunks > 1 else None),
        sequence_parallel=ctx.sequence_parallel and ctx.groups.tp.size() > 1,
        params_dtype=ctx.dtype,
        pipeline_dtype=ctx.dtype,
        bf16=ctx.dtype == torch.bfloat16,
        fp16=ctx.dtype == torch.float16,
        # Lengths differ, but `PlannedCommunicator` knows them: no shapes are exchanged, and nothing
        # waits for the whole device, which may be waiting for embeddings received ahead.
        variable_seq_lengths=False,
        batch_p2p_sync=False,
        # With two stages, batched transfers of an interleaved pipeline would swap the two messages
        # between the same pair of ranks.
        overlap_p2p_comm=ctx.num_chunks > 1,
        batch_p2p_comm=ctx.num_chunks == 1,
        # DDP then sums gradients; `finish_gradients` divides once by the global token count.
        calculate_per_token_loss=True,
        # Weights are drawn by `initialize_parameters`, the same in every layout.
        perform_initialization=False,
        use_cpu_initialization=False,
        # Transformer Engine's packed kernel counts positions from the start of each segment, which
        # are not those of images; without a device's bounds `SelfAttention` needs no packed one.
        apply_rope_fusion=False,
        deallocate_pipeline_outputs=pipeline > 1,
        # No CUDA graphs; the default is a name that Megatron itself calls deprecated.
        cuda_graph_modules=[],
        **options,
    )


def fused_activation(
    activation: Callable[[Tensor], Tensor], gated: bool, fuse: bool
) -> dict[str, Any]:
    """Return Megatron's flags for an activation: its compiled SwiGLU or GeGLU if it has one.

    Megatron's fused GeGLU is the approximation by tanh, named like the exact function.
    """
    is_tanh = isinstance(activation, partial) and (
        activation.func is functional.gelu and activation.keywords == {"approximate": "tanh"}
    )
    if fuse and gated and (activation is functional.silu or is_tanh):
        named = functional.gelu if is_tanh else activation
        return {"activation_func": named, "bias_activation_fusion": True}
    return {"activation_func": activation, "bias_activation_fusion": False}
