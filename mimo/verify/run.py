"""What each rank of a compared layout runs: the training loop itself, and a look at its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.engines.megatron.initialize import global_name
from mimo.engines.megatron.module import Module
from mimo.hf.initial import InitialWeights
from mimo.layout.build import build_layout
from mimo.layout.grids import Layout
from mimo.layout.groups import Topology, build_topology
from mimo.recipe.schema import Recipe
from mimo.step.dataset import Dataset, open_dataset
from mimo.step.plan import StepPlan
from mimo.train.loop import Trainer
from mimo.train.rank import join_world
from mimo.verify.minimums import check_minimums
from mimo.verify.results import Fault, RankSteps, Shard


def run_layout(recipe: Recipe, num_steps: int, fault: Fault | None = None) -> RankSteps:
    """One rank of a layout in a world that is launched for it."""
    if fault is not None:
        fault()
    join_world(recipe)
    return layout_steps(recipe, num_steps, check=check_minimums)


def layout_steps(
    recipe: Recipe,
    num_steps: int,
    check: Callable[[Recipe, Layout, StepPlan], None] | None = None,
) -> RankSteps:
    """Train ``num_steps`` steps; every rank of the world calls it.

    check(recipe, layout, plan of the first step) may refuse the data.
    """
    layout = build_layout(recipe, dist.get_world_size())
    topology = build_topology(layout)
    trainer = WatchedTrainer(recipe, topology, Path(recipe.train.run_dir))
    dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
    assert dataset is not None
    if check is not None:
        check(recipe, layout, trainer.first_plan(dataset))
    metrics = []
    steps = trainer.train(dataset, None)
    for _ in range(num_steps):
        metrics.append(next(steps))
        trainer.note_weights()
    steps.close()
    return RankSteps(metrics, [shard for shard, _ in trainer.watched])


class WatchedTrainer(Trainer):
    """The training loop, with a copy of every gradient before clipping and of every weight."""

    def __init__(
        self,
        recipe: Recipe,
        topology: Topology,
        run_dir: Path,
        initial: InitialWeights | None = None,
    ) -> None:
        super().__init__(recipe, topology, run_dir, initial)
        self.watched = [
            pair
            for name, module in self.model.modules.items()
            for pair in shards_of(name, module, topology.rank)
        ]

    def first_plan(self, dataset: Dataset) -> StepPlan:
        """The plan of the first step."""
        planner = self._planner(dataset)
        return planner.finish(planner.microbatches(0))

    def _update(self, step: int, squared_norm: float) -> float:
        for module in self.model.modules.values():
            gather_gradients(module)
        for shard, parameter in self.watched:
            if parameter.requires_grad:
                shard.gradients.append(numpy_copy(parameter.main_grad))
        return super()._update(step, squared_norm)

    def note_weights(self) -> None:
        """Copy the weights; call after each step."""
        for shard, parameter in self.watched:
            shard.weights.append(numpy_copy(parameter))


def numpy_copy(tensor: Tensor) -> np.ndarray:
    """Also of bf16, which numpy has not; fp32 holds the same numbers."""
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
                gradients=[],
                weights=[],
            )
            yield shard, parameter


def gather_gradients(module: Module) -> None:
    """Make every `main_grad` complete where a distributed optimizer left each rank a shard.

    Every rank of the module calls it, once the gradients are reduced. Without one nothing happens.
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
