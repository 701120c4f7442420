"""What each rank of a compared layout runs: the training loop itself, with its tensors copied."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, override

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mimo.check.verify.compare import Fault, RankSteps, Shard
from mimo.checkpoint.hf.initial import initial_weights
from mimo.config.schema import Recipe
from mimo.engines.contract import Module
from mimo.engines.piece import Piece
from mimo.model.dataset import Dataset, open_dataset
from mimo.parallel.grids import Layout
from mimo.parallel.groups import build_topology
from mimo.train.loop import Trainer
from mimo.train.observer import StepObserver
from mimo.train.rank import collective_timeout, join_world


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
    trainer, dataset = open_trainer(recipe, layout)
    watched = WatchedSteps(trainer.model.modules, dist.get_rank())
    return train_watched(trainer, dataset, watched, num_steps)


def open_trainer(recipe: Recipe, layout: Layout) -> tuple[Trainer, Dataset]:
    """What a rank trains, and on what; every rank of the world calls it."""
    topology = build_topology(layout, collective_timeout(recipe))
    run_dir = Path(recipe.train.run_dir)
    trainer = Trainer(recipe, topology, run_dir, initial_weights(recipe))
    dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
    assert dataset is not None
    return trainer, dataset


def train_watched(
    trainer: Trainer, dataset: Dataset, watched: WatchedSteps, num_steps: int
) -> RankSteps:
    """Train ``num_steps`` steps from the beginning, and what was seen of them."""
    steps = trainer.train(dataset, None, watched)
    with all_in(trainer.recipe.train.precision):
        metrics = [next(steps) for _ in range(num_steps)]
    steps.close()
    return RankSteps(metrics, watched.shards)


class WatchedSteps(StepObserver):
    """Copies every gradient before clipping, and every weight after the update."""

    def __init__(self, modules: Mapping[str, Module], rank: int) -> None:
        self.modules = modules
        self._shards: dict[tuple[str, int, int], Shard] = {}
        for name, module in modules.items():
            groups = module.groups
            place = (rank, groups.pp.rank(), groups.dp.rank(), groups.cp.rank(), groups.tp.rank())
            for piece in module.pieces("load", with_optimizer=False):
                shard = Shard(piece.key, name, *place, piece.shape, piece.row, piece.column)
                self._shards[piece.key, piece.row, piece.column] = shard

    @property
    def shards(self) -> list[Shard]:
        """What was seen of each parameter."""
        return [*self._shards.values()]

    def note_weights(self) -> None:
        """Copy the weights as they are now."""
        for module in self.modules.values():
            module.wait_param_gather()
            for piece in module.pieces("load", with_optimizer=False):
                self._of(piece).weights.append(_copy(piece.values))

    @override
    def gradients_complete(self, step: int, modules: Mapping[str, Module]) -> None:
        for module in modules.values():
            for piece in module.gradients():
                self.note_gradient(piece)

    def note_gradient(self, piece: Piece) -> None:
        """Copy a gradient's part."""
        self._of(piece).gradients.append(_copy(piece.values))

    @override
    def updated(self, step: int, modules: Mapping[str, Module]) -> None:
        self.note_weights()

    def _of(self, piece: Piece) -> Shard:
        return self._shards[piece.key, piece.row, piece.column]


def _copy(tensor: Tensor) -> np.ndarray:
    """bf16, which numpy lacks, becomes fp32, which holds the same numbers."""
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    return tensor.detach().to(copy=True, dtype=dtype).numpy()


def all_in(precision: str) -> AbstractContextManager[Any]:
    """Inside it modules of transformers compute in fp64 alone, if that is the precision.

    They go down to fp32 for norms and rotary positions, whatever they are given.
    """
    return _NeverLess() if precision == "fp64" else nullcontext()


class _NeverLess(TorchFunctionMode):
    """What would turn fp64 into fp32 leaves it as it is, also where a backward computes again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
