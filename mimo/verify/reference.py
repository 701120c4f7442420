"""The same steps on one rank: plain autograd and a plain optimizer.

No DDP, no bridge, no schedule, no Megatron optimizer: the reference shares as little as possible
with the layouts that it checks.

Letters: P patches, I items, T packed tokens, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import pack_lane, plan_microbatch, sizes_in_order
from data.index.reader import SampleReader
from data.packing import Used, packs_of_samples, packs_of_tokens
from mimo.generate.one_rank import LocalModel
from mimo.model.build import freeze_weights
from mimo.recipe.schema import Recipe, Train
from mimo.step.dataset import (
    Dataset,
    item_processors,
    open_dataset,
    open_tokenizer,
    token_budget,
)
from mimo.train.rank import join_world
from mimo.verify.compare import Reference, ReferenceParameter, update_floor
from mimo.verify.workload import Workload


def run_reference(recipe: Recipe, num_steps: int, workload: Workload | None = None) -> Reference:
    """Be the only rank of a world launched for this. ``workload``: written first, if given."""
    join_world(recipe)
    if workload is not None:
        workload.write(Path(recipe.data.tokenizer).parent)
    return reference_steps(recipe, num_steps)


def reference_steps(
    recipe: Recipe, num_steps: int, unusable: Collection[str] = frozenset()
) -> Reference:
    """Train ``num_steps`` steps of `train.global_batch_size` samples in this process.

    `train.micro_batch_size` samples are packed together, or what `data.tokens_per_microbatch` lets
    in; then the batch size counts packs. unusable: keys of samples whose items
    and loss are left out.
    """
    chat = open_tokenizer(recipe)
    dataset = open_dataset(recipe, "sources", chat, item_processors(recipe))
    assert dataset is not None
    local = LocalModel(recipe, chat.vocab_size, freeze=True)
    _choose_trained(recipe, local)
    parameters = {
        f"{name}.{key}": parameter
        for name, module in local.model.modules.items()
        for key, parameter in module.raw[0].named_parameters()
    }
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    optimizer = _optimizer(recipe, parameters)
    train, steps = recipe.train, []
    found = {name: ReferenceParameter() for name in parameters}
    eps = train.adam_eps if train.optimizer == "adam" else None
    used = Used()
    for step in range(num_steps):
        optimizer.zero_grad(set_to_none=True)
        packs = _packs(recipe, dataset, used)
        used = used.with_packs(packs)
        losses, tokens = _sum_of_losses(recipe, local, dataset, packs, unusable)
        (losses / tokens).backward()
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        assert len(gradients) == len(trained), "a parameter got no gradient"
        norm = float(torch.stack([g.double().pow(2).sum() for g in gradients]).sum().sqrt())
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                found[name].gradients.append(parameter.grad.clone().numpy())
        if train.clip_grad_norm:
            for gradient in gradients:
                gradient.mul_(min(1.0, train.clip_grad_norm / (norm + 1e-6)))
        for group in optimizer.param_groups:
            group["lr"] = scheduled_rate(train, group["peak"], step)
            floors = found[group["name"]].weight_floors
            floors.append(sum(floors[-1:]) + update_floor(norm, group["lr"], eps))
        optimizer.step()
        loss = float(losses.detach()) / tokens
        steps.append({"loss": loss, "loss_tokens": tokens, "grad_norm": norm})
        for name, parameter in parameters.items():
            found[name].weights.append(parameter.detach().clone().numpy())
    return Reference(steps, found)


def scheduled_rate(train: Train, peak: float, step: int) -> float:
    """The learning rate of ``step``, which counts from 0, for a module with the rate ``peak``.

    A separate formula, so that an error in the schedule of the ranks shows.
    """
    ramp = np.linspace(0.0, peak, train.warmup_steps + 1)[1:]
    if step < len(ramp):
        return float(ramp[step])
    lowest = train.min_learning_rate_ratio * peak
    way = min((step - len(ramp)) / max(train.steps - len(ramp), 1), 1.0)
    return lowest + (peak - lowest) * math.cos(math.pi / 2 * way) ** 2


def _choose_trained(recipe: Recipe, local: LocalModel) -> None:
    """Mark the parameters that learn."""
    for name, module in local.model.modules.items():
        module.raw[0].requires_grad_(True)
        freeze_weights(recipe, name, module.raw)


def _optimizer(recipe: Recipe, parameters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The recipe's optimizer, with each module's rate; matrices decay, vectors don't."""
    train, groups = recipe.train, []
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        module = name.partition(".")[0]
        part = recipe.module(module)
        groups.append(
            {
                "name": name,
                "params": [parameter],
                "peak": part.learning_rate or train.learning_rate,
                "weight_decay": train.weight_decay if parameter.dim() > 1 else 0.0,
            }
        )
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


def _sum_of_losses(
    recipe: Recipe,
    local: LocalModel,
    dataset: Dataset,
    packs: Sequence[np.ndarray],
    unusable: Collection[str],
) -> tuple[Tensor, int]:
    """The summed loss of a global batch, and its number of tokens."""
    losses: Any = 0.0
    tokens = 0
    for pack in packs:
        loss, count = _loss(recipe, local, dataset, pack, unusable)
        losses, tokens = losses + loss, tokens + count
    return losses, tokens


def _loss(
    recipe: Recipe,
    local: LocalModel,
    dataset: Dataset,
    pack: np.ndarray,
    unusable: Collection[str],
) -> tuple[Tensor, int]:
    """The summed loss of the samples at these positions of the order, and its number of tokens.

    All of them run in one forward pass.
    """
    samples = plan_microbatch(dataset.indexes, dataset.order, [pack])
    blank = [n for n, key in enumerate(dataset.sample_keys(samples)) if key in unusable]
    samples = samples.without(blank)
    readers = [dataset.readers[source] for source in samples.source]
    encoded = [reader.sample(int(s)) for reader, s in zip(readers, samples.sample, strict=True)]
    for n in blank:
        encoded[n] = replace(encoded[n], item_offsets=np.zeros(0, np.int64))
    items_of = [samples.item[samples.item_sample == n].tolist() for n in range(len(pack))]
    of_samples = list(zip(readers, items_of, strict=True))
    chat = readers[0].chat
    lane = pack_lane(
        encoded,
        [[reader.plan(item).row_grid for item in own] for reader, own in of_samples],
        samples.loss_tokens.tolist(),
        int(samples.lane_tokens[0]),
        chat.pad_token_id,
        time_steps=[[reader.plan(item).time_step for item in own] for reader, own in of_samples],
    )
    is_kept = np.repeat(~np.isin(np.arange(len(lane.lengths)), blank), lane.lengths)
    rows = []
    for name, encoder in recipe.encoders.items():
        own = samples.items_of_media(*encoder.media_tokens)
        items = [(readers[samples.item_sample[n]], int(samples.item[n])) for n in own]
        if items:
            tokens = [chat.placeholder_ids[media] for media in encoder.media_tokens]
            places = np.flatnonzero(np.isin(lane.input_ids, tokens) & is_kept)
            rows.append((_encode(local, name, items), places))
    per_token = local.forward(lane, rows, with_labels=True)
    loss = (per_token[0] * torch.from_numpy(lane.loss_mask)).sum()
    return loss, int(samples.loss_tokens.sum())


def _encode(local: LocalModel, encoder: str, items: Sequence[tuple[SampleReader, int]]) -> Tensor:
    """Rows (N, H) of items in order, each with the reader of its data source."""
    # Values are made here on the host, and by the towers of a layout on their device.
    patches = [reader.media(item).wire.values(reader.patches(item)) for reader, item in items]
    shapes = np.array([reader.plan(item).grid for reader, item in items], np.int64)
    return local.encode(encoder, np.concatenate(patches), shapes)
