"""Data parallelism and the optimizer of one module, on explicit process groups.

Gradients are summed over data parallelism, never averaged: every module's config has
`calculate_per_token_loss`, and the one division by the global token count happens in
`finish_gradients`. See docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

from mimo.device import has_gpu, local_device
from mimo.engines.megatron.cpu import adapt_to_machine


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW ("adam") or plain SGD ("sgd"). Clipping happens elsewhere: its norm is global.

    distributed: with Adam in fp32 or bf16, every data-parallel rank keeps and updates only its
        share of the optimizer's state (ZeRO stage 1, Rajbhandari et al. 2020).
    """

    name: str
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    distributed: bool = False

    def __post_init__(self) -> None:
        assert not self.distributed or self.name == "adam", "only Adam's state can be distributed"


def prepare_engine(seed: int) -> None:
    """Set up what Megatron keeps per process. Call in every rank, before building a model.

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
    """Megatron's DDP around each model chunk of a trainable module.

    Gradients are kept in fp32, or in fp64 for an fp64 module. With a distributed optimizer they are
    reduce-scattered, so a rank has the sum for its share of the parameters only. With
    ``overlap_param_gather`` updated weights are on their way after `step_optimizer`; a layer's
    forward waits for its own, and whoever else reads weights calls `wait_for_weights` first.
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
    """One optimizer for one module. No collective is called.

    Megatron's factory gathers over the whole world, which hangs where ranks own different
    modules; so the pieces are put together here. Matrices decay, vectors (norms, biases) don't.
    """
    params = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    param_groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    param_groups = [group for group in param_groups if group["params"]]
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
    base: torch.optim.Optimizer
    if settings.name == "adam":
        base = torch.optim.AdamW(
            param_groups,
            lr=learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            # One kernel for all parameters. On a CPU it would round otherwise than the default.
            fused=has_gpu(),
        )
    else:
        base = torch.optim.SGD(param_groups, lr=learning_rate)

    def fill_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
        """Create Adam's state before a checkpoint is loaded into it."""
        if settings.name != "adam":
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not optimizer.state[p]:
                    optimizer.state[p] = {
                        # A fused update counts steps on the device.
                        "step": torch.zeros((), device=p.device if has_gpu() else None),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }

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
            per_model_buffers={n: cast("Any", chunk).buffers for n, chunk in enumerate(chunks)},
            data_parallel_group=groups.intra_dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
    elif dtype in (torch.float32, torch.float64):
        optimizer = FP32Optimizer(base, config, fill_state)
    else:
        optimizer = Float16OptimizerWithFloat16Params(base, config, scaler, fill_state)
    # Read by Megatron when it decides which parameters are tensor-parallel duplicates.
    optimizer.tp_group = groups.tp  # type: ignore[attr-defined]
    return optimizer


def follow_weights(optimizer: MegatronOptimizer) -> None:
    """Refresh the fp32 master copies that an optimizer keeps of 16-bit weights. No collective.

    Without it the first step would put back the weights that the optimizer was built with.
    """
    optimizer.reload_model_params()


def optimizer_tensors(optimizer: MegatronOptimizer) -> list[Tensor]:
    """The state of every parameter, and the parameters that the optimizer updates itself."""
    base = optimizer.optimizer
    assert base is not None, "a module without trainable parameters has no optimizer"
    states = [one for state in base.state.values() for one in state.values()]
    updated = [p for group in base.param_groups for p in group["params"]]
    return [one for one in (*states, *updated) if isinstance(one, Tensor)]


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

    num_loss_tokens: N of the whole global batch, the same number on every rank of every module.
    """
    megatron_finalize(list(chunks), num_tokens=None, pg_collection=groups)
    for chunk in chunks:
        chunk.scale_gradients(1.0 / max(num_loss_tokens, 1))


def squared_gradient_norm(optimizer: MegatronOptimizer, groups: ProcessGroupCollection) -> Tensor:
    """This rank's share of the squared global gradient norm, after `finish_gradients`.

    Summed over all ranks of all modules it is the squared norm of the whole model's gradient:
    replicas over DP and CP count on the first only, TP duplicates on TP rank 0 only, tied weights
    once. A distributed optimizer has no replicas: each rank counts its share.

    Returns a number () in fp64 on the device; the host does not wait for it. The norm of each
    parameter is taken in its gradient's dtype, fp32 or fp64.
    """
    optimizer.prepare_grads()
    counts = groups.dp_cp.rank() == 0 or isinstance(optimizer, DistributedOptimizer)
    grads = optimizer.get_grads_for_grad_norm() if counts else []
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=local_device())
    norms: Sequence[Tensor] = cast("Any", torch)._foreach_norm(grads)
    return torch.stack(list(norms)).double().square().sum()


def step_optimizer(
    optimizer: MegatronOptimizer, learning_rate: float, gradient_factor: float
) -> None:
    """Scale the prepared gradients by ``gradient_factor`` (clipping) and update the weights.

    Every rank of the module calls it: a distributed optimizer's ranks gather what they updated, or
    begin to.
    """
    assert optimizer.optimizer is not None, "a module without trainable parameters has no optimizer"
    if gradient_factor != 1.0:
        grads = [param.grad for param in optimizer.get_parameters() if param.grad is not None]
        cast("Any", torch)._foreach_mul_(grads, gradient_factor)
    for group in optimizer.optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step_with_ready_grads()
    if isinstance(optimizer, DistributedOptimizer):
        for chunk in cast("list[DistributedDataParallel]", optimizer.model_chunks):
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()


def wait_for_weights(chunks: Sequence[nn.Module]) -> None:
    """Wait for the weights that `step_optimizer` began to gather, if any; no new exchange."""
    for chunk in chunks:
        if not (
            isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather
        ):
            continue
        for group in chunk.bucket_groups:
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
