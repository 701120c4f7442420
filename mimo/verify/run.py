"""What each rank of a compared layout runs: the training loop itself, with its tensors copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast, override

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.engines.megatron.initialize import global_name
from mimo.engines.megatron.module import Module
from mimo.engines.megatron.parallel import wait_for_weights
from mimo.layout.grids import Layout
from mimo.layout.groups import build_topology
from mimo.recipe.schema import Recipe
from mimo.step.dataset import Dataset, open_dataset
from mimo.train.loop import Trainer
from mimo.train.observer import StepObserver
from mimo.train.rank import collective_timeout, join_world
from mimo.verify.compare import Fault, RankSteps, Shard


def run_layout(
    recipe: Recipe, layout: Layout, num_steps: int, fault: Fault | None = None
) -> RankSteps:
    """Be one rank of a layout, in a world launched for this."""
    if fault is not None:
        fault()
    join_world(recipe)
    return layout_steps(recipe, layout, num_steps)


def layout_steps(recipe: Recipe, layout: Layout, num_steps: int) -> RankSteps:
    """Train ``num_steps`` steps; every rank of the world calls it."""
    topology = build_topology(layout, collective_timeout(recipe))
    trainer = Trainer(recipe, topology, Path(recipe.train.run_dir))
    dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
    assert dataset is not None
    watched = WatchedSteps(trainer.model.modules, dist.get_rank())
    return train_watched(trainer, dataset, watched, num_steps)


def train_watched(
    trainer: Trainer, dataset: Dataset, watched: WatchedSteps, num_steps: int
) -> RankSteps:
    """Train ``num_steps`` steps from the beginning, and what was seen of them."""
    steps = trainer.train(dataset, None, watched)
    metrics = [next(steps) for _ in range(num_steps)]
    steps.close()
    return RankSteps(metrics, watched.shards)


class WatchedSteps(StepObserver):
    """Copies every gradient before clipping, and every weight after the update."""

    def __init__(self, modules: Mapping[str, Module], rank: int) -> None:
        self.parameters = [
            pair for name, module in modules.items() for pair in shards_of(name, module, rank)
        ]

    @property
    def shards(self) -> list[Shard]:
        """What was seen of each parameter."""
        return [shard for shard, _ in self.parameters]

    def note_weights(self) -> None:
        """Copy the weights as they are now."""
        for shard, parameter in self.parameters:
            shard.weights.append(numpy_copy(parameter))

    @override
    def gradients_complete(self, step: int, modules: Mapping[str, Module]) -> None:
        for module in modules.values():
            gather_gradients(module)
        for shard, parameter in self.parameters:
            if parameter.requires_grad:
                shard.gradients.append(numpy_copy(parameter.main_grad))

    @override
    def updated(self, step: int, modules: Mapping[str, Module]) -> None:
        for module in modules.values():
            wait_for_weights(module.chunks)
        self.note_weights()


def numpy_copy(tensor: Tensor) -> np.ndarray:
    """A copy; bf16, which numpy lacks, becomes fp32, which holds the same numbers."""
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    return tensor.detach().to(copy=True, dtype=dtype).numpy()


def shards_of(name: str, module: Module, rank: int) -> Iterator[tuple[Shard, Any]]:
    """A module's parameters on this rank, each with its place in the whole model."""
    groups, interleaved = module.groups, len(module.raw) > 1
    stage = groups.pp.rank()
    for number, chunk in enumerate(module.raw):
        config = cast("Any", chunk).config
        for local, parameter in chunk.named_parameters():
            whole = global_name(local, config, stage, number if interleaved else None)
            is_split = bool(getattr(parameter, "tensor_model_parallel", False))
            shard = Shard(
                name=f"{name}.{whole}",
                module=name,
                rank=rank,
                stage=stage,
                lane=groups.dp.rank(),
                cp=groups.cp.rank(),
                tp=groups.tp.rank(),
                tp_size=groups.tp.size() if is_split else 1,
                dim=int(getattr(parameter, "partition_dim", 0)),
                stride=int(getattr(parameter, "partition_stride", 1)),
            )
            yield shard, parameter


def gather_gradients(module: Module) -> None:
    """Complete every `main_grad` if a distributed optimizer left each rank only a shard of it.

    Every rank of the module calls it, once the gradients are reduced. Without such an optimizer it
    does nothing.
    """
    for chunk in module.chunks if module.optimizer is not None else []:
        ddp = cast("Any", chunk)
        if not ddp.ddp_config.use_distributed_optimizer:
            continue
        for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
            shards = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                own = bucket.grad_data.chunk(shards.size())[shards.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=shards)
