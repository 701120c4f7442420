"""Megatron's DDP and optimizer for one module, built on explicit process groups."""

from collections.abc import Sequence
from typing import cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import nn

from mimo.engines.megatron.cpu import adapt_to_machine
from mimo.engines.megatron.weights import is_expert_param
from mimo.engines.optimizer import OptimizerSettings, fill_state, start_average, torch_optimizer


def prepare_engine(seed: int) -> None:
    """Set up Megatron's state of the process. Every rank calls it before building a model.

    `parallel_state` itself stays uninitialised: every group is passed explicitly.
    """
    adapt_to_machine()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    # A process may train several models in turn; each starts with a fresh random state.
    tracker.reset()
    tracker.add("model-parallel-rng", seed)


def wrap_data_parallel(
    chunks: Sequence[nn.Module],
    groups: ProcessGroupCollection,
    overlap_grad_reduce: bool,
    distributed_optimizer: bool = False,
    overlap_param_gather: bool = False,
) -> list[DistributedDataParallel]:
    """Wrap each model chunk of a trainable module in DDP; every rank of the module calls it.

    Gradients are summed in fp32, or in fp64 for an fp64 module. With a distributed optimizer they
    are reduce-scattered, so a rank has the sum for its share of the parameters only. With
    ``overlap_param_gather`` updated weights are still in transit after an update; a layer's forward
    waits for its weights, and other readers call `wait_param_gather` first.
    """
    return [
        DistributedDataParallel(
            chunk.config,  # type: ignore[arg-type]
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=chunk.config.params_dtype != torch.float64,  # type: ignore[union-attr]
                overlap_grad_reduce=overlap_grad_reduce,
                use_distributed_optimizer=distributed_optimizer,
                overlap_param_gather=overlap_param_gather,
                # After the first update all gathers begin with it, none in a forward.
                align_param_gather=overlap_param_gather,
            ),
            chunk,
            # Chunks after the first are off the critical path of the interleaved schedule.
            disable_bucketing=index > 0,
            pg_collection=groups,
        )
        for index, chunk in enumerate(chunks)
    ]


def build_optimizers(
    chunks: Sequence[DistributedDataParallel],
    settings: OptimizerSettings,
    learning_rate: float,
    dtype: torch.dtype,
    groups: ProcessGroupCollection,
) -> list[MegatronOptimizer]:
    """Build the optimizers of one module, without any collective: first that of all but experts.

    Experts have other replicas, so they have an optimizer of their own. Megatron's factory gathers
    over the whole world, which hangs where ranks have different modules.
    """
    config = OptimizerConfig(
        optimizer=settings.name,
        lr=learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        sgd_momentum=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.distributed,
        # Clipping uses one norm over all modules and is done by the caller.
        clip_grad=0.0,
    )
    named = (named for chunk in chunks for named in chunk.named_parameters())
    trained = [(name, param) for name, param in named if param.requires_grad]
    by_kind = {
        kind: [p for p in trained if is_expert_param(p[1]) == kind] for kind in (False, True)
    }
    return [
        _build_optimizer(chunks, params, kind, config, settings, learning_rate, groups)
        for kind, params in by_kind.items()
        if params
    ]


def _build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    params: Sequence[tuple[str, nn.Parameter]],
    of_experts: bool,
    config: OptimizerConfig,
    settings: OptimizerSettings,
    learning_rate: float,
    groups: ProcessGroupCollection,
) -> MegatronOptimizer:
    base = torch_optimizer(params, settings, learning_rate)
    buffers = "expert_parallel_buffers" if of_experts else "buffers"
    optimizer: MegatronOptimizer
    # bf16 has the range of fp32 and needs no loss scaling.
    scaler = cast("MegatronGradScaler", None)
    if settings.distributed:
        optimizer = DistributedOptimizer(
            base,
            config,
            scaler,
            fill_state,
            model_chunks=list(chunks),  # type: ignore[arg-type]
            per_model_buffers={n: getattr(chunk, buffers) for n, chunk in enumerate(chunks)},
            data_parallel_group=groups.intra_expt_dp if of_experts else groups.intra_dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
        # `MegatronModule.update` gathers the weights of all optimizers together.
        optimizer._defer_param_sync = True  # type: ignore[attr-defined]
    elif config.params_dtype in (torch.float32, torch.float64):
        optimizer = FP32Optimizer(base, config, fill_state)
    else:
        optimizer = Float16OptimizerWithFloat16Params(base, config, scaler, fill_state)
    # Read by Megatron when it decides which parameters are tensor-parallel duplicates.
    tp, replicas = (groups.expt_tp, groups.expt_dp) if of_experts else (groups.tp, groups.dp_cp)
    optimizer.tp_group, optimizer.replicas = tp, replicas  # type: ignore[attr-defined]
    if settings.ema_decay is not None:
        start_average(base)
    return optimizer
