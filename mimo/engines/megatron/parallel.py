"""Data parallelism and the optimizer of one module, on explicit process groups.

Gradients are summed over data parallelism, never averaged: every module's config has
`calculate_per_token_loss`, and `finish_gradients` divides once by the global token count. See
docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
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
from torch import Tensor, nn

from mimo.device import local_device
from mimo.engines.megatron.cpu import adapt_to_machine
from mimo.engines.optimizer import (
    MeasuredStep,
    OptimizerSettings,
    advance_average,
    fill_state,
    restart_average,
    squared_norm,
    start_average,
    torch_optimizer,
)


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
    """Wrap each model chunk of a trainable module in Megatron's DDP.

    Gradients are summed in fp32, or in fp64 for an fp64 module. With a distributed optimizer they
    are reduce-scattered, so a rank has the sum for its share of the parameters only. With
    ``overlap_param_gather`` updated weights are still in transit after `step_optimizer`; a layer's
    forward waits for its weights, and other readers call `wait_param_gather` first.
    Every rank of the module calls it.
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


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    settings: OptimizerSettings,
    learning_rate: float,
    dtype: torch.dtype,
    groups: ProcessGroupCollection,
) -> MegatronOptimizer:
    """Build the optimizer of one module. No collective is called.

    Megatron's factory gathers over the whole world, which hangs where ranks own different
    modules; so its parts are assembled here.
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
    params = (p for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    base = torch_optimizer(params, settings, learning_rate)

    def fill(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
        """Create the state; called before a checkpoint is loaded."""
        fill_state(optimizer)

    optimizer: MegatronOptimizer
    # bf16 has the range of fp32 and needs no loss scaling.
    scaler = cast("MegatronGradScaler", None)
    if settings.distributed:
        optimizer = DistributedOptimizer(
            base,
            config,
            scaler,
            fill,
            model_chunks=list(chunks),  # type: ignore[arg-type]
            per_model_buffers={n: cast("Any", chunk).buffers for n, chunk in enumerate(chunks)},
            data_parallel_group=groups.intra_dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
    elif dtype in (torch.float32, torch.float64):
        optimizer = FP32Optimizer(base, config, fill)
    else:
        optimizer = Float16OptimizerWithFloat16Params(base, config, scaler, fill)
    # Read by Megatron when it decides which parameters are tensor-parallel duplicates.
    optimizer.tp_group = groups.tp  # type: ignore[attr-defined]
    if settings.ema_decay is not None:
        start_average(base)
    return optimizer


def follow_weights(optimizer: MegatronOptimizer) -> None:
    """Refresh an optimizer's copies of weights that were just loaded. No collective.

    Without it the first step would restore the 16-bit weights that the optimizer was built with.
    """
    optimizer.reload_model_params()
    restart_average(_base(optimizer))


def optimizer_tensors(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the state of every parameter, and the tensors that the optimizer updates."""
    base = optimizer.optimizer
    assert base is not None, "a module without trainable parameters has no optimizer"
    states = [value for state in base.state.values() for value in state.values()]
    updated = [p for group in base.param_groups for p in group["params"]]
    return [value for value in (*states, *updated) if isinstance(value, Tensor)]


def zero_gradients(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Clear all gradients before a step.

    The optimizer's too: in fp32 it leaves `param.grad` aliased to DDP's buffer, into which the
    first backward of the next step would accumulate twice.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def finish_gradients(
    chunks: Sequence[DistributedDataParallel],
    groups: ProcessGroupCollection,
    num_loss_tokens: int,
) -> None:
    """Complete the gradients of one module after its last microbatch, then divide once.

    Sums over DP (and CP), over TP for norms that saw a slice of the sequence or of the heads,
    and over the first and last stage for tied embeddings. Every rank of the module calls it.

    num_loss_tokens: the global batch's loss tokens, equal on every rank of every module.
    """
    megatron_finalize(list(chunks), num_tokens=None, pg_collection=groups)
    for chunk in chunks:
        chunk.scale_gradients(1.0 / max(num_loss_tokens, 1))


def squared_gradient_norm(optimizer: MegatronOptimizer, groups: ProcessGroupCollection) -> Tensor:
    """Return this rank's share of the squared gradient norm, after `finish_gradients`.

    The sum over all ranks of all modules is the squared norm of the whole model's gradient:
    replicas over DP and CP count on the first only, TP duplicates on TP rank 0 only, tied weights
    once. A distributed optimizer has no replicas: each rank counts its share.

    The result is () fp64 on the device; the host does not wait for it. The norm of each parameter
    is computed in its gradient's dtype, fp32 or fp64.
    """
    optimizer.prepare_grads()
    grads = _counted_gradients(optimizer, groups)
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=local_device())
    return squared_norm(grads)


def step_optimizer(
    optimizer: MegatronOptimizer,
    groups: ProcessGroupCollection,
    learning_rate: float,
    gradient_factor: float,
    ema_decay: float | None = None,
    measured: bool = False,
) -> Tensor | float:
    """Scale the prepared gradients by ``gradient_factor`` (clipping) and update the weights.

    Every rank of the module calls it: a distributed optimizer's ranks gather the updated weights,
    or begin to. Returns this rank's share of the squared norm of the change if ``measured``, else
    0; it counts the same elements as `squared_gradient_norm`.
    """
    base, change = _base(optimizer), 0.0
    if gradient_factor != 1.0:
        grads = [param.grad for param in optimizer.get_parameters() if param.grad is not None]
        cast("Any", torch)._foreach_mul_(grads, gradient_factor)
    for group in base.param_groups:
        group["lr"] = learning_rate
    if measured:
        counted = {id(grad): grad for grad in _counted_gradients(optimizer, groups)}
        step = MeasuredStep(base, lambda param: id(param.grad) in counted)
        optimizer.optimizer = cast("Any", step)  # Megatron calls nothing but its `step`
        optimizer.step_with_ready_grads()
        optimizer.optimizer, change = base, step.squared_change
    else:
        optimizer.step_with_ready_grads()
    if ema_decay is not None:
        advance_average(base, ema_decay)
    if isinstance(optimizer, DistributedOptimizer):
        for chunk in cast("list[DistributedDataParallel]", optimizer.model_chunks):
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()
    return change


def _base(optimizer: MegatronOptimizer) -> torch.optim.Optimizer:
    assert optimizer.optimizer is not None, "a trainable module has parameters"
    return optimizer.optimizer


def _counted_gradients(
    optimizer: MegatronOptimizer, groups: ProcessGroupCollection
) -> list[Tensor]:
    """The prepared gradients that this rank counts in a norm."""
    counts = groups.dp_cp.rank() == 0 or isinstance(optimizer, DistributedOptimizer)
    return optimizer.get_grads_for_grad_norm() if counts else []


def wait_param_gather(chunks: Sequence[nn.Module]) -> None:
    """Wait for weights that `step_optimizer` began to gather, if any. No new collective."""
    for chunk in chunks:
        if not (
            isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather
        ):
            continue
        for group in chunk.bucket_groups:
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
