"""The same steps on one rank: plain autograd and a plain optimizer.

No DDP, no bridge, no schedule, no Megatron optimizer: the reference shares as little as possible
with the layouts that it checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from data.batch import pack_lane, plan_microbatch, sizes_in_order
from data.packing import Used, packs_of_samples, packs_of_tokens
from mimo.check.verify.compare import Reference, ReferenceParameter, update_floor
from mimo.check.verify.run import all_in
from mimo.check.verify.workload import Workload
from mimo.checkpoint.hf.initial import initial_weights
from mimo.config.schema import Recipe, Train
from mimo.engines.contract import Module
from mimo.engines.fsdp.context import Wrapper
from mimo.engines.fsdp.module import FsdpModule
from mimo.engines.fsdp.sharding import Held
from mimo.engines.piece import Piece
from mimo.generate.one_rank import LocalModel
from mimo.model.dataset import (
    Dataset,
    item_processors,
    open_dataset,
    open_tokenizer,
    token_budget,
)
from mimo.model.flops import learning_names
from mimo.train.rank import join_world


def run_reference(recipe: Recipe, num_steps: int, workload: Workload) -> Reference:
    """Be the only rank of a world launched for this, and write the workload first."""
    join_world(recipe)
    workload.write(Path(recipe.data.tokenizer).parent)
    with all_in(recipe.train.precision):
        return reference_steps(recipe, num_steps)


def reference_steps(recipe: Recipe, num_steps: int) -> Reference:
    """Train ``num_steps`` steps of `train.global_batch_size` samples in this process.

    `train.micro_batch_size` samples are packed together, or what `data.tokens_per_microbatch` lets
    in; then the batch size counts packs.
    """
    chat = open_tokenizer(recipe)
    dataset = open_dataset(recipe, "sources", chat, item_processors(recipe))
    assert dataset is not None
    local = LocalModel(recipe, chat.vocab_size, freeze=True, initial=initial_weights(recipe))
    tensors = [one for module in local.model.modules.values() for one in _tensors(recipe, module)]
    optimizer = _optimizer(recipe, tensors)
    learning = [one for one in tensors if one.parameter.requires_grad]
    train, steps, used = recipe.train, [], Used()
    found = {p.key: ReferenceParameter() for one in tensors for p in one.pieces(one.parameter)}
    for step in range(num_steps):
        optimizer.zero_grad(set_to_none=True)
        packs = _packs(recipe, dataset, used)
        used = used.with_packs(packs)
        parts = [_loss(recipe, local, dataset, pack) for pack in packs]
        tokens = sum(count for _, count in parts)
        losses: Any = sum(loss for loss, _ in parts)
        (losses / tokens).backward()
        gradients = [g for one in learning if (g := one.parameter.grad) is not None]
        assert len(gradients) == len(learning), "a parameter got no gradient"
        squares = [g.double().pow(2).sum() for g in gradients]
        norm = float(torch.stack(squares).sum().sqrt())
        for name, whole in _whole(learning, gradients).items():
            found[name].gradients.append(whole)
        if train.clip_grad_norm:
            for gradient in gradients:
                gradient.mul_(min(1.0, train.clip_grad_norm / (norm + 1e-6)))
        floors: dict[str, float] = {}
        for group in optimizer.param_groups:
            group["lr"] = scheduled_rate(train, group["peak"], group["warmup_steps"], step)
            eps = train.adam_eps if train.optimizer == "adam" else None
            floors |= dict.fromkeys(group["names"], update_floor(norm, group["lr"], eps))
        for name, floor in floors.items():
            earlier = found[name].weight_floors
            earlier.append(sum(earlier[-1:]) + floor)
        optimizer.step()
        loss = float(losses.detach()) / tokens
        steps.append({"loss": loss, "loss_tokens": tokens, "grad_norm": norm})
        for name, whole in _whole(tensors, [one.parameter for one in tensors]).items():
            found[name].weights.append(whole)
    return Reference(steps, found)


def scheduled_rate(train: Train, peak: float, warmup_steps: int, step: int) -> float:
    """The learning rate of ``step``, which counts from 0, for a module with the rate ``peak``.

    A separate formula, so that an error in the schedule of the ranks shows.
    """
    ramp = np.linspace(0.0, peak, warmup_steps + 1)[1:]
    if step < len(ramp) or train.schedule == "constant":
        return float([*ramp, peak][min(step, len(ramp))])
    lowest, falls = train.min_learning_rate_ratio * peak, max(train.steps - len(ramp), 1)
    if train.schedule == "wsd":
        falls = train.last_decay_steps
    left = min(max((train.steps - step) / falls, 0.0), 1.0)  # of the way down
    if train.schedule == "cosine":
        left = math.sin(math.pi / 2 * left) ** 2
    return lowest + (peak - lowest) * left


@dataclass(frozen=True)
class _Tensor:
    """A parameter of a module. pieces: of a tensor like it, views under the format's names."""

    module: str
    parameter: nn.Parameter
    pieces: Callable[[Tensor], list[Piece]]


def _tensors(recipe: Recipe, module: Module) -> list[_Tensor]:
    """The parameters of a module, in its order; those that learn require gradients."""
    found = []
    learns = learning_names(recipe, module.name)
    for own, parameter in module.whole.named_parameters():
        if isinstance(module, FsdpModule):
            pieces = partial(_theirs, module, own)
        else:
            pieces = partial(_ours, f"{module.name}.{own}")
        names = [piece.key.removeprefix(f"{module.name}.") for piece in pieces(parameter)]
        parameter.requires_grad_(learns(names[0]))
        found.append(_Tensor(module.name, parameter, pieces))
    return found


def _ours(name: str, tensor: Tensor) -> list[Piece]:
    return [Piece(name, tuple(tensor.shape), 0, 0, tensor.reshape(len(tensor), -1))]


def _theirs(module: FsdpModule, own: str, tensor: Tensor) -> list[Piece]:
    """A tensor of transformers is rows of one or several of the format's."""
    whole = Held(tuple(tensor.shape), 0, 0, tensor.reshape(len(tensor), -1), 0, 1)
    pieces = module.names.pieces(cast("Wrapper", module.whole).hf_names[own], whole)
    return [replace(piece, key=f"{module.name}.{piece.key}") for piece in pieces]


def _whole(owners: Sequence[_Tensor], tensors: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Copies, by the format's names. tensors: one like each owner's parameter."""
    found: dict[str, np.ndarray] = {}
    for owner, tensor in zip(owners, tensors, strict=True):
        for piece in owner.pieces(tensor.detach()):
            values = piece.values.numpy()
            whole = found.setdefault(piece.key, np.zeros(piece.shape, values.dtype))
            rows, columns = values.shape
            matrix = whole.reshape(len(whole), -1)
            matrix[piece.row : piece.row + rows, piece.column : piece.column + columns] = values
    return found


def _optimizer(recipe: Recipe, tensors: Sequence[_Tensor]) -> torch.optim.Optimizer:
    """The recipe's optimizer, with each module's rate; matrices decay, vectors don't."""
    train = recipe.train
    groups = [
        {
            "names": {piece.key for piece in one.pieces(one.parameter)},
            "params": [one.parameter],
            "peak": recipe.module(one.module).learning_rate or train.learning_rate,
            "warmup_steps": recipe.warmup_steps(one.module),
            "weight_decay": train.weight_decay if one.parameter.dim() > 1 else 0.0,
        }
        for one in tensors
        if one.parameter.requires_grad
    ]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate)
    betas = (train.adam_beta1, train.adam_beta2)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.adam_eps)


def _packs(recipe: Recipe, dataset: Dataset, used: Used) -> list[np.ndarray]:
    """The samples that run together in the next step, by their positions in the order."""
    train, budget = recipe.train, token_budget(recipe)
    if budget is None:
        size = train.micro_batch_size
        return packs_of_samples(used, train.global_batch_size // size, size)
    sizes = sizes_in_order(dataset.indexes, dataset.order)
    return packs_of_tokens(used, train.global_batch_size, budget, sizes)


def _loss(
    recipe: Recipe, local: LocalModel, dataset: Dataset, pack: np.ndarray
) -> tuple[Tensor, int]:
    """The summed loss of the samples at these positions of the order, and its number of tokens.

    All of them run in one forward pass.
    """
    samples = plan_microbatch(dataset.indexes, dataset.order, [pack])
    readers = [dataset.readers[source] for source in samples.source]
    plans = [
        [reader.plan(item) for item in samples.item[samples.item_sample == n].tolist()]
        for n, reader in enumerate(readers)
    ]
    chat = readers[0].chat
    lane = pack_lane(
        [reader.sample(int(s)) for reader, s in zip(readers, samples.sample, strict=True)],
        [[plan.row_grid for plan in own] for own in plans],
        samples.loss_tokens.tolist(),
        int(samples.lane_tokens[0]),
        chat.pad_token_id,
        time_steps=[[plan.time_step for plan in own] for own in plans],
    )
    rows = []
    for name, encoder in recipe.encoders.items():
        own = samples.items_of_media(*encoder.media_tokens)
        items = [(readers[samples.item_sample[n]], int(samples.item[n])) for n in own]
        if items:
            # Values are made here on the host, and by the towers of a layout on their device.
            patches = [r.media(item).wire.values(r.patches(item)) for r, item in items]
            grids = np.array([r.plan(item).grid for r, item in items], np.int64)
            tokens = [chat.placeholder_ids[media] for media in encoder.media_tokens]
            places = np.flatnonzero(np.isin(lane.input_ids, tokens))
            rows.append((local.encode(name, np.concatenate(patches), grids), places))
    per_token = local.forward(lane, rows, with_labels=True)
    loss = (per_token[0] * torch.from_numpy(lane.loss_mask)).sum()
    return loss, int(samples.loss_tokens.sum())
