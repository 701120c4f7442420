"""One module's part on this rank, run by Megatron: an implementation of the engines' contract.

Gradients are summed over data parallelism, never averaged, because every module's config has
`calculate_per_token_loss`. See docs/parallelism.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule as MegatronBase
from torch import Tensor, nn

from mimo.device import local_device
from mimo.engines.contract import Chunk, Piece, Purpose
from mimo.engines.megatron.attention import forms_in
from mimo.engines.megatron.config import ProcessGroupCollection
from mimo.engines.megatron.experts import routers_in
from mimo.engines.megatron.schedule import hidden_shapes, pass_token, run_schedule, sum_losses
from mimo.engines.megatron.weights import gradient_pieces, module_pieces
from mimo.engines.optimizer import restart_average, squared_norm, update_weights
from mimo.ops.segments import Form


@dataclass
class MegatronModule:
    """Implements `mimo.engines.contract.Module`, which documents the methods.

    raw: the model chunks, several with an interleaved pipeline. chunks: the same, wrapped in DDP if
    this rank has weights to update. optimizers: one for dense weights and one for experts,
    each only if such weights train here. ema_decay: decay of the moving average of the weights;
    None for no average.
    """

    name: str
    groups: ProcessGroupCollection
    raw: list[nn.Module]
    chunks: list[nn.Module]
    optimizers: Sequence[MegatronOptimizer]
    trains: bool
    run_ahead: int = 0
    ema_decay: float | None = None

    @property
    def has_trainable_params(self) -> bool:
        return bool(self.optimizers)

    @property
    def replicas(self) -> dist.ProcessGroup:
        return self.groups.dp_cp

    @property
    def sequence_parts(self) -> int:
        config = cast("Any", self.raw[0]).config
        return config.tensor_model_parallel_size if config.sequence_parallel else 1

    @property
    def whole(self) -> nn.Module:
        return self.raw[0]

    def attention_forms(self) -> frozenset[Form]:
        return forms_in(self.raw)

    def begin_step(self, forward_only: bool, loss_token_share: float = 0.0) -> None:
        """Clear gradients.

        With ``train.fp8``, a step's first microbatch makes Transformer Engine's linears quantize
        their weights again and *overwrite* DDP's sum with their next weight gradient. A schedule
        marks it in every call, but a step may have several calls or, in a colocated encoder, none.
        So it is marked here, and schedules are kept from marking others.
        """
        for router in routers_in(self.raw):
            router.begin_step(loss_token_share)
        for chunk in self.chunks:
            chunk.train(not forward_only)
            if isinstance(chunk, MegatronBase):  # others have no such linears
                type(chunk).set_is_first_microbatch(chunk)
                cast("Any", chunk).set_is_first_microbatch = lambda: None
        if self.optimizers and not forward_only:
            for chunk in self._ddp:
                chunk.zero_grad_buffer()
            # In fp32 `param.grad` is DDP's buffer, to which the next backward would add twice.
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    @property
    def _ddp(self) -> list[DistributedDataParallel]:
        return [chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)]

    def run_language(
        self,
        forward: Callable[[int, Chunk], Tensor],
        numbers: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        forward_only: bool,
    ) -> list[Tensor]:
        parts = {
            id(chunk): Chunk(chunk, cast("Any", raw).vp_stage or 0, cast("Any", raw).pre_process)
            for chunk, raw in zip(self.chunks, self.raw, strict=True)
        }

        def forward_step(rest: Iterator[int], chunk: nn.Module):
            return forward(next(rest), parts[id(chunk)]), sum_losses

        config = cast("Any", self.raw[0]).config
        shapes = [hidden_shapes(config, self.groups, *size) for size in sizes]
        return run_schedule(
            forward_step,
            list(numbers),
            self.chunks,
            self.groups,
            shapes,
            forward_only,
            self.run_ahead or None,
        )

    def run_encoder[T](
        self,
        forward: Callable[[T, nn.Module], Any],
        batches: Sequence[T],
        items: Sequence[Any],
        forward_only: bool,
    ) -> None:
        def forward_step(rest: Iterator[T], chunk: nn.Module):
            return forward(next(rest), chunk), pass_token

        shapes = []
        if self.groups.pp.size() > 1:
            shapes = [cast("Any", self.whole).stage_shapes(batch_items) for batch_items in items]
        run_schedule(
            forward_step,
            list(batches),
            self.chunks,
            self.groups,
            shapes,
            forward_only,
            self.run_ahead,
        )

    def encode(self, patches: Any, items: Any) -> Any:
        return self.chunks[0](patches, items)

    def learn(self, loss: Tensor, *, is_last: bool) -> None:
        raise NotImplementedError("generators run on the engine fsdp")

    @contextmanager
    def accumulate_only(self) -> Iterator[None]:
        """Unset `no_sync_func`, by which a schedule reduces gradients in its last microbatch."""
        chunks = self._ddp
        switches = [(chunk.config, chunk.config.no_sync_func) for chunk in chunks]
        with ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            for config, _ in switches:
                config.no_sync_func = None
            try:
                yield
            finally:
                for config, switch in switches:
                    config.no_sync_func = switch

    def finish_gradients(self, num_loss_tokens: int) -> None:
        """Sum over DP and CP, over TP for norms that saw a slice, over stages if tied; divide."""
        if self._ddp:
            finalize_model_grads(list(self.chunks), num_tokens=None, pg_collection=self.groups)
        for chunk in self._ddp:
            chunk.scale_gradients(1.0 / max(num_loss_tokens, 1))

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the squared norm; each norm is in its gradient's own dtype.

        Replicas count on the first only: those over DP and CP or, of experts, over their own group.
        TP duplicates count on TP rank 0 only, tied weights once. A distributed optimizer has no
        replicas, so every rank counts its share.
        """
        for optimizer in self.optimizers:
            optimizer.prepare_grads()
        counted = [g for optimizer in self.optimizers for g in _counted_gradients(optimizer)]
        if counted:
            return squared_norm(counted)
        return torch.zeros((), dtype=torch.float64, device=local_device())

    def update(
        self, learning_rate: float, gradient_factor: float, measured: bool = False
    ) -> Tensor | float:
        """Update the weights; ranks of a distributed optimizer gather them, or begin to."""
        change: Tensor | float = 0.0
        for optimizer in self.optimizers:
            if gradient_factor != 1.0:
                gradients = [p.grad for p in optimizer.get_parameters() if p.grad is not None]
                cast("Any", torch)._foreach_mul_(gradients, gradient_factor)
            base, counted = _torch_optimizer(optimizer), None
            if measured:
                ids = {id(gradient) for gradient in _counted_gradients(optimizer)}
                params = (param for group in base.param_groups for param in group["params"])
                counted = {id(param) for param in params if id(param.grad) in ids}
            change += update_weights(
                base, optimizer.step_with_ready_grads, learning_rate, self.ema_decay, counted
            )
        for chunk in self._ddp:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync()
        return change

    def add_router_sums(self, total: Tensor) -> None:
        for router in routers_in(self.raw):
            if router.counts_once and router.sums is not None:
                total[router.layer_number - 1] += router.sums

    def tensors(self) -> dict[str, list[Tensor]]:
        """Tensors in memory; gradients are DDP's buffers, updated weights part of the state."""
        tensors = dict[str, list[Tensor]]()
        tensors["parameters"] = [param for chunk in self.raw for param in chunk.parameters()]
        if self.optimizers:
            chunks = cast("Any", self._ddp)
            buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
            tensors["gradients"] = [buffer.grad_data for buffer in buffers]
            bases = [_torch_optimizer(optimizer) for optimizer in self.optimizers]
            states = [values for base in bases for values in base.state.values()]
            state = [value for values in states for value in values.values()]
            groups = [group for base in bases for group in base.param_groups]
            state += [param for group in groups for param in group["params"]]
            tensors["optimizer state"] = [value for value in state if isinstance(value, Tensor)]
        return tensors

    def wait_param_gather(self) -> None:
        """Wait for weights that `update` began to gather. No new collective."""
        for chunk in self._ddp:
            for group in _buckets(chunk) if chunk.ddp_config.overlap_param_gather else ():
                if group.param_gather_handle is not None:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)

    def pieces(self, purpose: Purpose, with_optimizer: bool) -> Iterator[Piece]:
        optimizers = self.optimizers if with_optimizer else ()
        return module_pieces(self.name, self.raw, self.groups, optimizers, purpose)

    def gradients(self) -> Iterator[Piece]:
        """The complete gradients; first gathered from a distributed optimizer's ranks."""
        if not self.has_trainable_params:
            return iter(())
        for chunk in self._ddp:
            if not chunk.ddp_config.use_distributed_optimizer:
                continue
            for group in _buckets(chunk):
                shards = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    shard = bucket.grad_data.chunk(shards.size())[shards.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, shard, group=shards)
        return gradient_pieces(self.name, self.raw, self.groups)

    def follow_weights(self) -> None:
        """Refresh the optimizer's copies; else the next update restores the initial weights."""
        for optimizer in self.optimizers:
            optimizer.reload_model_params()
            restart_average(_torch_optimizer(optimizer))


def _buckets(chunk: DistributedDataParallel) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _counted_gradients(optimizer: MegatronOptimizer) -> list[Tensor]:
    is_distributed = isinstance(optimizer, DistributedOptimizer)
    counts = is_distributed or cast("Any", optimizer).replicas.rank() == 0
    return optimizer.get_grads_for_grad_norm() if counts else []


def _torch_optimizer(optimizer: MegatronOptimizer) -> torch.optim.Optimizer:
    assert optimizer.optimizer is not None, "a trainable module has parameters"
    return optimizer.optimizer
