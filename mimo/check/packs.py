"""The losses of packs of samples on one rank, for the reference that layouts are compared with.

A generator is called once for each item. From hidden states to losses, only the module and the
random numbers of an item are those of a layout. Hooks put queries into the text's embeddings, and
take the hidden states after the last norm.

Letters: T packed tokens, H hidden, S tokens of an item with C numbers each.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data.batch import (
    GlobalMicrobatch,
    PackedLane,
    pack_lane,
    plan_microbatch,
    read_items,
    sizes_in_order,
)
from data.index.reader import SampleReader
from data.packing import Used, packs_of_samples, packs_of_tokens
from mimo.config.schema import LANGUAGE, Recipe
from mimo.families.registry import generator_family, language_settings
from mimo.generate.one_rank import LocalModel
from mimo.model.dataset import Dataset, token_budget
from mimo.model.outputs import output_planner

_SPLIT = "step"  # what the training loop calls its batches


@dataclass(frozen=True)
class PackLosses:
    """Losses of a pack: summed over loss tokens, of each generator's items, and of routers.

    loss_tokens, tokens: of the pack. routers: summed over tokens; 0 without experts.
    """

    loss: Tensor
    loss_tokens: int
    drawn: dict[str, list[Tensor]]
    tokens: int
    routers: Tensor | int


def packs_of_step(recipe: Recipe, dataset: Dataset, used: Used) -> list[np.ndarray]:
    """Return the packs of the next step; samples are positions in the order."""
    train, budget = recipe.train, token_budget(recipe)
    if budget is None:
        size = train.micro_batch_size
        return packs_of_samples(used, train.global_batch_size // size, size)
    sizes = sizes_in_order(dataset.indexes, dataset.order)
    return packs_of_tokens(used, train.global_batch_size, budget, sizes)


def losses_of_pack(
    recipe: Recipe, local: LocalModel, dataset: Dataset, pack: np.ndarray, step: int
) -> PackLosses:
    """Return the losses of a pack; it runs one forward pass."""
    samples = plan_microbatch(dataset.indexes, dataset.order, [pack])
    readers = [dataset.readers[source] for source in samples.source]
    plans = [
        [reader.plan(item) for item in samples.item[samples.item_sample == n].tolist()]
        for n, reader in enumerate(readers)
    ]
    chat = readers[0].chat
    encoded = [reader.sample(int(s)) for reader, s in zip(readers, samples.sample, strict=True)]
    encoded = [read_items(sample, items) for sample, items in zip(encoded, plans, strict=True)]
    plans = [[plan for plan in items if not plan.is_output] for items in plans]
    lane = pack_lane(
        encoded,
        [[plan.row_grid for plan in items] for items in plans],
        samples.loss_tokens.tolist(),
        int(samples.lane_tokens[0]),
        chat.pad_token_id,
        time_steps=[[plan.time_step for plan in items] for items in plans],
    )
    rows = {}
    for name, encoder in recipe.encoders.items():
        numbers = samples.items_of_media(*encoder.media_tokens)
        items = [(readers[samples.item_sample[n]], int(samples.item[n])) for n in numbers]
        if items:
            # The towers of a layout convert bytes to values on their device, not on the host.
            patches = [r.media(item).wire.values(r.patches(item)) for r, item in items]
            grids = np.array([r.plan(item).grid for r, item in items], np.int64)
            tokens = [chat.placeholder_ids[media] for media in encoder.media_tokens]
            places = np.flatnonzero(np.isin(lane.input_ids, tokens))
            rows[name] = local.encode(name, np.concatenate(patches), grids), places
    drawn = [*_items(recipe, step, samples, readers, lane)] if recipe.generators else []
    language = local.model.modules[LANGUAGE].whole
    with _hidden_states(recipe, local, drawn) as hidden, _router_logits(language) as logits:
        per_token = local.forward(lane, rows, with_labels=True)
    loss = (per_token[0] * torch.from_numpy(lane.loss_mask)).sum()
    losses: dict[str, list[Tensor]] = {name: [] for name in recipe.generators}
    for item in drawn:
        losses[item.generator].append(_item_loss(recipe, local, item, hidden[0]))
    return PackLosses(
        loss=loss,
        loss_tokens=int(samples.loss_tokens.sum()),
        drawn=losses,
        tokens=sum(lane.lengths),
        routers=_router_loss(recipe, logits, lane.lengths),
    )


@contextmanager
def _router_logits(language: nn.Module) -> Iterator[list[Tensor]]:
    """Keep the logits (T, E) of each router while the language model runs forward."""
    kept: list[Tensor] = []
    routers = [m for name, m in language.named_modules() if name.endswith("mlp.router")]
    hooks = [m.register_forward_hook(lambda *call: kept.append(call[-1].logits)) for m in routers]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def _router_loss(recipe: Recipe, logits: Sequence[Tensor], lengths: Sequence[int]) -> Tensor | int:
    """Return the losses of all routers, averaged over layers and summed over tokens.

    Each sample's balancing loss is E · f · P, with means f of its tokens' choices of each expert
    and P of their probabilities: in each layer, or over all.
    """
    settings: Any = language_settings(recipe)
    total: Tensor | int = 0
    by_sample = [*zip(*(of_layer.split(lengths) for of_layer in logits), strict=True)]
    for layers in by_sample:
        for sample in (torch.cat(layers),) if settings.pool_layers else layers:
            top = sample.softmax(-1).topk(settings.experts_per_token).indices
            chosen = nn.functional.one_hot(top, sample.shape[1]).sum(1).to(sample.dtype)
            balance = chosen.mean(0) @ sample.softmax(-1).mean(0) * sample.shape[1]
            z = sample.logsumexp(-1).square().mean()
            loss = settings.balance_loss * balance + settings.z_loss * z
            total = total + loss * len(sample) / len(logits)
    return total


@dataclass(frozen=True)
class _Item:
    """An item of an answer. at: see `OutputPlanner.numbers`. number: in the index of its source.

    condition: (n,) tokens of the pack whose hidden states condition it. queries: first of its query
    positions.
    """

    generator: str
    at: tuple[int, int, int, int]
    number: int
    reader: SampleReader
    condition: np.ndarray
    queries: int


@contextmanager
def _hidden_states(recipe: Recipe, local: LocalModel, items: list[_Item]) -> Iterator[list[Tensor]]:
    """Place queries while the language model runs forward; keep its hidden states (T, H)."""
    kept: list[Tensor] = []
    if not items:
        yield kept
        return
    language: Any = local.model.modules[LANGUAGE].whole
    if hasattr(language, "decoder"):
        embedding, norm = language.embedding, language.decoder.final_layernorm
    else:
        embedding, norm = language.text.embed_tokens, language.text.norm

    def place(_: nn.Module, __: object, text: Tensor) -> Tensor:
        placed = text.flatten(0, 1).clone()
        for item in items:
            for number in range(recipe.generators[item.generator].num_queries):
                placed[item.queries + number] = language.queries[item.generator][number]
        return placed.view_as(text)

    hooks = [
        embedding.register_forward_hook(place),
        norm.register_forward_hook(lambda *call: kept.append(call[-1].flatten(0, 1))),
    ]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def _item_loss(recipe: Recipe, local: LocalModel, item: _Item, hidden: Tensor) -> Tensor:
    """Return the mean squared error of an item's velocity, which is noise minus target."""
    plan, media = item.reader.plan(item.number), item.reader.media(item.number)
    numbers = output_planner(recipe, item.generator, _SPLIT).numbers(item.at, plan)
    values = torch.from_numpy(media.wire.values(item.reader.patches(item.number)))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    image, noise = values.to(wide), numbers.noise.to(wide)
    time = torch.tensor([numbers.time], dtype=torch.float32)
    condition = hidden[torch.from_numpy(item.condition)][None]
    if numbers.dropped:
        condition = condition[:, :0]
    velocity = generator_family(recipe, item.generator).predict(
        local.model.modules[item.generator].whole.transformer,
        (image + time.to(wide) * (noise - image)).to(hidden.dtype)[None],
        time,
        condition,
        torch.tensor([condition.shape[1]]),
        (plan.grid[1], plan.grid[2]),
    )
    error = velocity[0].to(wide) - noise + image
    return (error * error).sum() / error.numel()


def _items(
    recipe: Recipe,
    step: int,
    samples: GlobalMicrobatch,
    readers: Sequence[SampleReader],
    lane: PackedLane,
) -> Iterator[_Item]:
    """Yield items in order, found by their start and end tokens in the pack."""
    by_modality = {part.output: name for name, part in recipe.generators.items()}
    marks = np.array([readers[0].chat.output_ids[media] for media in by_modality])
    begin = 0
    for n, (reader, length) in enumerate(zip(readers, lane.lengths, strict=False)):
        tokens, after_last = lane.input_ids[begin : begin + length], 0
        starts, ends = (np.flatnonzero(np.isin(tokens, ids)).tolist() for ids in marks.T)
        numbers = np.flatnonzero(samples.item_sample == n).tolist()
        media = [samples.media[int(samples.item_media[number])] for number in numbers]
        drawn = [i for i, name in enumerate(media) if name in by_modality]
        for i, start, end in zip(drawn, starts, ends, strict=True):
            part = recipe.generators[by_modality[media[i]]]
            first, last = start + 1, end
            if part.condition == "prompt":
                first, last = max(part.skipped_tokens, after_last), start
            yield _Item(
                by_modality[media[i]],
                (step, int(samples.source[n]), int(samples.sample[n]), i),
                int(samples.item[numbers[i]]),
                reader,
                begin + np.arange(first, last),
                begin + start + 1,
            )
            after_last = end + 1
        begin += length
