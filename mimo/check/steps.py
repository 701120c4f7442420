"""The steps that verify compares: on a rank of a layout, and on one rank as the reference.

A layout's ranks run the training loop itself, with their tensors copied. The reference is plain
autograd and a plain optimizer, without DDP, bridge, schedule or Megatron's optimizer: it shares as
little as possible with the layouts that it checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, override

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from data.packing import Used
from mimo.check.compare import Fault, RankSteps, Reference, ReferenceParameter, Shard, update_floor
from mimo.check.packs import losses_of_pack, packs_of_step
from mimo.check.workload import Workload
from mimo.checkpoint.hf.initial import initial_weights
from mimo.config.schema import Recipe, Train
from mimo.engines.contract import Module, Piece
from mimo.engines.fsdp.context import Wrapper
from mimo.engines.fsdp.module import FsdpModule
from mimo.engines.fsdp.sharding import Rectangle
from mimo.families.registry import QUERIES, trainable_names
from mimo.generate.one_rank import LocalModel
from mimo.model.dataset import Dataset, item_processors, open_dataset, open_tokenizer
from mimo.parallel.grids import LANGUAGE, Layout
from mimo.parallel.groups import build_topology
from mimo.train.loop import Trainer
from mimo.train.rank import collective_timeout, join_world
from mimo.train.step import StepObserver

# ------------------------------------------------------------------- on a layout's rank


def run_layout(recipe: Recipe, layout: Layout, num_steps: int, fault: Fault | None) -> RankSteps:
    """Run a layout's steps as one rank of a world launched for this."""
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
    """Return a rank's trainer and its data; every rank of the world calls it."""
    topology = build_topology(layout, collective_timeout(recipe))
    run_dir = Path(recipe.train.run_dir)
    trainer = Trainer(recipe, topology, run_dir, initial_weights(recipe))
    dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
    assert dataset is not None
    return trainer, dataset


def train_watched(
    trainer: Trainer, dataset: Dataset, watched: WatchedSteps, num_steps: int
) -> RankSteps:
    """Train ``num_steps`` steps from the beginning; return their metrics and tensors."""
    steps = trainer.train(dataset, None, watched)
    with keep_fp64(trainer.recipe.train.precision):
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
            axes = {"stage": groups.pp, "lane": groups.dp, "cp": groups.cp, "tp": groups.tp}
            place = " · ".join(f"{axis} {group.rank()}" for axis, group in axes.items())
            where = f"{name}, rank {rank} ({place})"
            for piece in module.pieces("load", with_optimizer=False):
                shard = Shard(piece.key, where, piece.shape, piece.row, piece.column)
                self._shards[piece.key, piece.row, piece.column] = shard

    @property
    def shards(self) -> list[Shard]:
        return [*self._shards.values()]

    def note_weights(self) -> None:
        for module in self.modules.values():
            module.wait_param_gather()
            for piece in module.pieces("load", with_optimizer=False):
                shard = self._shards[piece.key, piece.row, piece.column]
                shard.weights.append(_copy(piece.values))

    def note_gradient(self, piece: Piece) -> None:
        shard = self._shards[piece.key, piece.row, piece.column]
        shard.gradients.append(_copy(piece.values))

    @override
    def gradients_complete(self, step: int, modules: Mapping[str, Module]) -> None:
        for module in modules.values():
            for piece in module.gradients():
                self.note_gradient(piece)

    @override
    def updated(self, step: int, modules: Mapping[str, Module]) -> None:
        self.note_weights()


def _copy(tensor: Tensor) -> np.ndarray:
    """Copy to numpy; bf16, which numpy lacks, becomes fp32, which holds the same numbers."""
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    return tensor.detach().to(copy=True, dtype=dtype).numpy()


def keep_fp64(precision: str) -> AbstractContextManager[Any]:
    """Make modules of transformers compute in fp64 throughout, if that is the precision.

    They cast norms and rotary positions to fp32, whatever the dtype of their inputs.
    """
    return _KeepFp64() if precision == "fp64" else nullcontext()


class _KeepFp64(TorchFunctionMode):
    """Skips casts from fp64 to fp32, also in a backward that recomputes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            # Inside of a call the mode is off, but layers that are recomputed need it.
            (loss,), engine = args, cast("Any", torch.autograd.Variable)._execution_engine
            arguments = (loss,), (torch.ones_like(loss),), False, False, ()
            with self:
                return engine.run_backward(*arguments, allow_unreachable=True, accumulate_grad=True)
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [torch.float64 if value is torch.float32 else value for value in args]
            kwargs |= {key: torch.float64 for key in kwargs if kwargs[key] is torch.float32}
        return func(*args, **kwargs)


# ------------------------------------------------------------------------- on one rank


def run_reference(recipe: Recipe, num_steps: int, workload: Workload) -> Reference:
    """Write the workload, and run the steps as the only rank of a world launched for this."""
    join_world(recipe)
    workload.write(Path(recipe.data.tokenizer).parent)
    with keep_fp64(recipe.train.precision):
        return reference_steps(recipe, num_steps)


def reference_steps(recipe: Recipe, num_steps: int) -> Reference:
    """Train ``num_steps`` steps of `train.global_batch_size` samples in this process.

    Each pack holds `train.micro_batch_size` samples, or as many as fit into
    `data.tokens_per_microbatch`; then the batch size counts packs.
    """
    chat = open_tokenizer(recipe)
    dataset = open_dataset(recipe, "sources", chat, item_processors(recipe))
    assert dataset is not None
    local = LocalModel(recipe, chat.vocab_size, initial=initial_weights(recipe))
    params = [p for module in local.model.modules.values() for p in _named_params(recipe, module)]
    optimizer = _optimizer(recipe, params)
    trainable = [p for p in params if p.parameter.requires_grad]
    train, steps, used = recipe.train, [], Used()
    reference = {piece.key: ReferenceParameter() for p in params for piece in p.pieces(p.parameter)}
    for step in range(num_steps):
        optimizer.zero_grad(set_to_none=True)
        packs = packs_of_step(recipe, dataset, used)
        used = used.with_packs(packs)
        parts = [losses_of_pack(recipe, local, dataset, pack, step) for pack in packs]
        tokens = sum(part.loss_tokens for part in parts)
        text: Any = sum(part.loss for part in parts)
        total = text / max(tokens, 1)
        routers = sum(part.routers for part in parts) / sum(part.tokens for part in parts)
        means = {LANGUAGE: total}
        for name, part in recipe.generators.items():
            means[name] = torch.stack([loss for p in parts for loss in p.drawn[name]]).mean()
            total = total + part.loss_weight * means[name]
        if total.requires_grad:
            (total + routers).backward()
        gradients = [_gradient(recipe, p) for p in trainable]
        norm = float(torch.stack([g.double().pow(2).sum() for g in gradients]).sum().sqrt())
        for name, whole in _whole(trainable, gradients).items():
            reference[name].gradients.append(whole)
        if train.clip_grad_norm:
            for gradient in gradients:
                gradient.mul_(min(1.0, train.clip_grad_norm / (norm + 1e-6)))
        floors: dict[str, float] = {}
        for group in optimizer.param_groups:
            group["lr"] = scheduled_rate(train, group["peak"], group["warmup_steps"], step)
            eps = train.adam_eps if train.optimizer == "adam" else None
            floors |= dict.fromkeys(group["names"], update_floor(norm, group["lr"], eps))
        for name, floor in floors.items():
            # A weight that starts at zero is the sum of its updates, so its floor is a sum too.
            before = reference[name].weight_floors
            before.append(sum(before[-1:]) + floor)
        optimizer.step()
        scalars = {"loss": float(total.detach()), "loss_tokens": tokens, "grad_norm": norm}
        if recipe.generators:
            scalars |= {f"loss_{name}": float(mean.detach()) for name, mean in means.items()}
        steps.append(scalars)
        for name, whole in _whole(params, [p.parameter for p in params]).items():
            reference[name].weights.append(whole)
    return Reference(steps, reference)


def _gradient(recipe: Recipe, param: _NamedParam) -> Tensor:
    """Return a trainable parameter's gradient; 0 for an unused parameter of a generator."""
    if param.parameter.grad is None:
        assert param.module in recipe.generators, f"a parameter of {param.module} got no gradient"
        param.parameter.grad = torch.zeros_like(param.parameter)
    return param.parameter.grad


def scheduled_rate(train: Train, peak: float, warmup_steps: int, step: int) -> float:
    """Return the learning rate of ``step``, from 0, for a module with the rate ``peak``.

    A separate formula, so that an error in the schedule of the ranks shows.
    """
    ramp = np.linspace(0.0, peak, warmup_steps + 1)[1:]
    if step < len(ramp) or train.schedule == "constant":
        return float([*ramp, peak][min(step, len(ramp))])
    lowest, decay_steps = train.min_learning_rate_ratio * peak, max(train.steps - len(ramp), 1)
    if train.schedule == "wsd":
        decay_steps = train.last_decay_steps
    share = min(max((train.steps - step) / decay_steps, 0.0), 1.0)
    if train.schedule == "cosine":
        share = math.sin(math.pi / 2 * share) ** 2
    return lowest + (peak - lowest) * share


@dataclass(frozen=True)
class _NamedParam:
    """A parameter. pieces: cuts a tensor like it into views with the names of the format."""

    module: str
    parameter: nn.Parameter
    pieces: Callable[[Tensor], list[Piece]]


def _named_params(recipe: Recipe, module: Module) -> list[_NamedParam]:
    """Return the parameters of a module, in its order; trainable ones require gradients."""
    params, is_trainable = [], trainable_names(recipe, module.name)
    for name, parameter in module.whole.named_parameters():
        pieces = partial(_pieces, module, name)
        first = pieces(parameter)[0].key.removeprefix(f"{module.name}.")
        parameter.requires_grad_(is_trainable(first))
        params.append(_NamedParam(module.name, parameter, pieces))
    return params


def _pieces(module: Module, name: str, tensor: Tensor) -> list[Piece]:
    """Return a parameter of Megatron, or rows of a tensor of transformers: one or several."""
    shape, matrix = tuple(tensor.shape), tensor.reshape(len(tensor), -1)
    if not isinstance(module, FsdpModule):
        return [Piece(f"{module.name}.{name}", shape, 0, 0, matrix)]
    whole = Rectangle(shape, 0, 0, matrix, 0, 1)
    pieces = module.names.pieces(cast("Wrapper", module.whole).hf_names[name], whole)
    return [replace(piece, key=f"{module.name}.{piece.key}") for piece in pieces]


def _whole(params: Sequence[_NamedParam], tensors: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Copy tensors, by the format's names. tensors: one like each parameter."""
    copies: dict[str, np.ndarray] = {}
    for param, tensor in zip(params, tensors, strict=True):
        for piece in param.pieces(tensor.detach()):
            values = piece.values.numpy()
            whole = copies.setdefault(piece.key, np.zeros(piece.shape, values.dtype))
            rows, columns = values.shape
            matrix = whole.reshape(len(whole), -1)
            matrix[piece.row : piece.row + rows, piece.column : piece.column + columns] = values
    return copies


def _optimizer(recipe: Recipe, params: Sequence[_NamedParam]) -> torch.optim.Optimizer:
    """Build the recipe's optimizer, with each module's rate; matrices decay, vectors don't."""
    train = recipe.train
    groups = [
        {
            "names": {piece.key for piece in p.pieces(p.parameter)},
            "params": [p.parameter],
            "peak": _peak_rate(recipe, p),
            "warmup_steps": recipe.warmup_steps(p.module),
            "weight_decay": train.weight_decay if p.parameter.dim() > 1 else 0.0,
        }
        for p in params
        if p.parameter.requires_grad
    ]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate)
    betas = (train.adam_beta1, train.adam_beta2)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.adam_eps)


def _peak_rate(recipe: Recipe, param: _NamedParam) -> float:
    key, parts = param.pieces(param.parameter)[0].key, recipe.generators.items()
    rates = {f"{LANGUAGE}.{QUERIES}{name}": part.query_learning_rate for name, part in parts}
    module = recipe.module(param.module)
    return rates.get(key) or module.learning_rate or recipe.train.learning_rate
