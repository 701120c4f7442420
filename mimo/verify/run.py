"""What each rank of a compared layout runs: the training loop itself, and a look at its tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.dataset import open_dataset
from mimo.layout import Layout, build_layout
from mimo.megatron.initialize import global_name
from mimo.model import Module
from mimo.recipe import Recipe
from mimo.topology import build_topology
from mimo.train import Trainer, join_world
from mimo.verify.minimums import check_minimums
from mimo.verify.results import Fault, RankSteps, Shard, be_quiet


def run_layout(recipe: Recipe, num_steps: int, fault: Fault | None = None) -> RankSteps:
    """One rank of a layout in a world that is launched for it."""
    be_quiet()
    if fault is not None:
        fault()
    join_world(recipe)
    return layout_steps(recipe, num_steps, check=check_minimums)


def layout_steps(
    recipe: Recipe,
    num_steps: int,
    check: Callable[[Recipe, Layout, Any], None] | None = None,
) -> RankSteps:
    """Train ``num_steps`` steps; every rank of the world calls it.

    check(recipe, layout, plan of the first step) may refuse the data.
    """
    layout = build_layout(recipe, dist.get_world_size())
    topology = build_topology(layout)
    trainer = Trainer(recipe, topology, Path(tempfile.gettempdir()))
    dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
    assert dataset is not None
    if check is not None:
        planner = trainer._planner(dataset)
        check(recipe, layout, planner.finish(planner.microbatches(0)))
    modules = trainer.model.modules
    shards = {name: shards_of(name, one, topology.rank) for name, one in modules.items()}
    metrics = []
    steps = trainer.train(dataset, None)
    for _ in range(num_steps):
        metrics.append(next(steps))
        for name, module in modules.items():
            gather_gradients(module)
            record(shards[name], module)
    steps.close()
    return RankSteps(metrics, [shard for own in shards.values() for shard in own])


def _numpy_copy(tensor: Tensor) -> np.ndarray:
    """Also of bf16, which numpy has not; fp32 holds the same numbers."""
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    return tensor.detach().to(copy=True, dtype=dtype).numpy()


def _parameters(module: Module) -> list[tuple[int, str, Any]]:
    """(chunk, local name, parameter) of a module's part on this rank."""
    return [
        (number, name, parameter)
        for number, chunk in enumerate(module.raw)
        for name, parameter in chunk.named_parameters()
    ]


def record(shards: Sequence[Shard], module: Module) -> None:
    """Add the module's present gradients and weights to its shards."""
    for shard, (_, _, parameter) in zip(shards, _parameters(module), strict=True):
        if parameter.requires_grad:
            shard.gradients.append(_numpy_copy(parameter.main_grad))
        shard.weights.append(_numpy_copy(parameter))


def shards_of(name: str, module: Module, rank: int) -> list[Shard]:
    """This rank's parts of the module's parameters, without any value yet."""
    found = []
    groups, interleaved = module.groups, len(module.raw) > 1
    for number, local, parameter in _parameters(module):
        chunk = cast("Any", module.raw[number])
        stage = groups.pp.rank()
        whole = global_name(local, chunk.config, stage, number if interleaved else None)
        is_split = bool(getattr(parameter, "tensor_model_parallel", False))
        found.append(
            Shard(
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
        )
    return found


def gather_gradients(module: Module) -> None:
    """Make every `main_grad` complete where a distributed optimizer left each rank a shard.

    Every rank of the module calls it, after the step. Without one nothing happens.
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
