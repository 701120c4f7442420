"""One module's part on this rank, run by Megatron: an implementation of the engines' contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mimo.device import local_device
from mimo.engines.contract import Chunk, Piece, Purpose
from mimo.engines.megatron.attention import forms_in
from mimo.engines.megatron.config import ProcessGroupCollection
from mimo.engines.megatron.parallel import (
    MegatronOptimizer,
    finish_gradients,
    follow_weights,
    optimizer_tensors,
    squared_gradient_norm,
    step_optimizer,
    wait_param_gather,
    zero_gradients,
)
from mimo.engines.megatron.schedule import (
    accumulate_only,
    begin_step,
    hidden_shapes,
    pass_token,
    run_schedule,
    sum_losses,
)
from mimo.engines.megatron.weights import gradient_pieces, module_pieces
from mimo.ops.attention_plan import LayerForm


@dataclass
class MegatronModule:
    """Implementation of `mimo.engines.contract.Module`, where the methods are documented.

    raw: its model chunks, several with an interleaved pipeline. chunks: the same, wrapped in DDP
    where this rank has weights to update. optimizer: None where it has none. ema_decay: decay of
    the moving average of the weights; None for no average.
    """

    name: str
    groups: ProcessGroupCollection
    raw: list[nn.Module]
    chunks: list[nn.Module]
    optimizer: MegatronOptimizer | None
    learning_rate: float
    trains: bool
    run_ahead: int = 0
    ema_decay: float | None = None

    @property
    def has_trainable_params(self) -> bool:
        """Whether this rank has weights to update."""
        return self.optimizer is not None

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The ranks of its lanes, and those that share a lane's sequences."""
        return self.groups.dp_cp

    @property
    def sequence_parts(self) -> int:
        """How many ranks the module's output is cut over: 1 without sequence parallelism."""
        config = cast("Any", self.raw[0]).config
        return config.tensor_model_parallel_size if config.sequence_parallel else 1

    @property
    def whole(self) -> nn.Module:
        """Its only chunk."""
        return self.raw[0]

    def attention_forms(self) -> frozenset[LayerForm]:
        """The forms of all layers on this rank; Transformer Engine's need no plan."""
        return forms_in(self.raw)

    def begin_step(self, forward_only: bool) -> None:
        """Clear gradients, and choose between training and evaluation."""
        for chunk in self.chunks:
            chunk.train(not forward_only)
        begin_step(self.chunks)
        if self.optimizer is not None and not forward_only:
            zero_gradients(cast("Any", self.chunks), self.optimizer)

    def run_language(
        self,
        forward: Callable[[int, Chunk], Tensor],
        numbers: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        forward_only: bool,
    ) -> list[Tensor]:
        """Run Megatron's schedule of the pipeline."""
        parts = {
            id(chunk): Chunk(chunk, cast("Any", raw).vp_stage or 0, cast("Any", raw).pre_process)
            for chunk, raw in zip(self.chunks, self.raw, strict=True)
        }

        def forward_step(rest: Iterator[int], chunk: nn.Module):
            return forward(next(rest), parts[id(chunk)]), sum_losses

        config = cast("Any", self.raw[0]).config
        shapes = [hidden_shapes(config, self.groups, *size) for size in sizes]
        return run_schedule(
            forward_step, list(numbers), self.chunks, self.groups, shapes, forward_only
        )

    def run_encoder[T](
        self,
        forward: Callable[[T, nn.Module], Any],
        batches: Sequence[T],
        items: Sequence[Any],
        forward_only: bool,
    ) -> None:
        """Run Megatron's schedule, which warms up with `run_ahead` forward passes."""

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
        """Run one forward of a colocated encoder, which has one chunk."""
        return self.chunks[0](patches, items)

    def accumulate_only(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are summed but not reduced."""
        return accumulate_only(self.chunks if self.has_trainable_params else [])

    def finish_gradients(self, num_loss_tokens: int) -> None:
        """Complete the gradients, if this rank has any."""
        if self.has_trainable_params:
            finish_gradients(cast("Any", self.chunks), self.groups, num_loss_tokens)

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared norm of the whole gradient."""
        if self.optimizer is None:
            return torch.zeros((), dtype=torch.float64, device=local_device())
        return squared_gradient_norm(self.optimizer, self.groups)

    def update(
        self, learning_rate: float, gradient_factor: float, measured: bool = False
    ) -> Tensor | float:
        """Update the weights, if this rank has any to update."""
        if self.optimizer is None:
            return 0.0
        return step_optimizer(
            self.optimizer,
            self.groups,
            learning_rate,
            gradient_factor,
            ema_decay=self.ema_decay,
            measured=measured,
        )

    def tensors(self) -> dict[str, list[Tensor]]:
        """Tensors in memory; gradients are DDP's buffers."""
        tensors = dict[str, list[Tensor]]()
        tensors["parameters"] = [param for chunk in self.raw for param in chunk.parameters()]
        if self.optimizer is not None:
            chunks = [cast("Any", chunk) for chunk in self.chunks]
            buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
            tensors["gradients"] = [buffer.grad_data for buffer in buffers]
            tensors["optimizer state"] = optimizer_tensors(self.optimizer)
        return tensors

    def wait_param_gather(self) -> None:
        """Wait for weights that are being gathered."""
        wait_param_gather(self.chunks)

    def pieces(self, purpose: Purpose, with_optimizer: bool) -> Iterator[Piece]:
        """The pieces that this rank writes, or reads."""
        optimizer = self.optimizer if with_optimizer else None
        return module_pieces(self.name, self.raw, self.groups, optimizer, purpose)

    def gradients(self) -> Iterator[Piece]:
        """The complete gradients; first gathered from a distributed optimizer's ranks."""
        if not self.has_trainable_params:
            return iter(())
        self._gather_gradients()
        return gradient_pieces(self.name, self.raw, self.groups)

    def follow_weights(self) -> None:
        """Refresh master copies of weights that were just loaded."""
        if self.optimizer is not None:
            follow_weights(self.optimizer)

    def _gather_gradients(self) -> None:
        for chunk in self.chunks:
            ddp = cast("Any", chunk)
            if not ddp.ddp_config.use_distributed_optimizer:
                continue
            for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
                shards = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    shard = bucket.grad_data.chunk(shards.size())[shards.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, shard, group=shards)
