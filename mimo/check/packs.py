"""The losses of packs of samples on one rank, for the reference that layouts are compared with.

A generator is called once for each item. Of a layout's way from hidden states to its losses they
share the module and the random numbers of an item. Hooks put queries into the text's embeddings,
and take the hidden states after the last norm.

Letters: T packed tokens, H hidden, S tokens of an item with C numbers each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from mimo.families.registry import generator_family
from mimo.generate.one_rank import LocalModel
from mimo.model.dataset import Dataset, token_budget
from mimo.model.outputs import output_planner

_SPLIT = "step"  # what the training loop calls its batches


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
) -> tuple[Tensor, int, dict[str, list[Tensor]]]:
    """Return the summed loss of a pack, its number of tokens, and losses of each generator's items.

    It runs one forward pass.
    """
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
    drawn = _DrawnPack(recipe, local, step, samples, readers, lane)
    with drawn.watching():
        per_token = local.forward(lane, rows, with_labels=True)
    loss = (per_token[0] * torch.from_numpy(lane.loss_mask)).sum()
    return loss, int(samples.loss_tokens.sum()), drawn.losses()


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


class _DrawnPack:
    """The items of the answers in a pack of one lane.

    step: whose random numbers they have. readers: of each sample of the pack.
    """

    def __init__(
        self,
        recipe: Recipe,
        local: LocalModel,
        step: int,
        samples: GlobalMicrobatch,
        readers: Sequence[SampleReader],
        lane: PackedLane,
    ) -> None:
        self._recipe, self._local = recipe, local
        self._hidden: Tensor | None = None
        has_any = bool(recipe.generators)
        self._items = [*_items(recipe, step, samples, readers, lane)] if has_any else []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Place queries, and keep hidden states, while the language model runs forward."""
        if not self._items:
            yield
            return
        language: Any = self._local.model.modules[LANGUAGE].whole
        if hasattr(language, "decoder"):
            embedding, norm = language.embedding, language.decoder.final_layernorm
        else:
            embedding, norm = language.text.embed_tokens, language.text.norm
        hooks = [
            embedding.register_forward_hook(lambda *call: self._place(language.queries, call[-1])),
            norm.register_forward_hook(lambda *call: self._keep(call[-1])),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _place(self, queries: Mapping[str, nn.Parameter], text: Tensor) -> Tensor:
        placed = text.flatten(0, 1).clone()
        for item in self._items:
            for number in range(self._recipe.generators[item.generator].num_queries):
                placed[item.queries + number] = queries[item.generator][number]
        return placed.view_as(text)

    def _keep(self, hidden: Tensor) -> None:
        self._hidden = hidden.flatten(0, 1)

    def losses(self) -> dict[str, list[Tensor]]:
        """Return the loss () of each item by generator, after the language model's forward."""
        losses: dict[str, list[Tensor]] = {name: [] for name in self._recipe.generators}
        for item in self._items:
            losses[item.generator].append(self._loss(item))
        return losses

    def _loss(self, item: _Item) -> Tensor:
        """Compute the mean squared error of the velocity, of a straight line from data to noise."""
        assert self._hidden is not None, "call it after the forward"
        plan, media = item.reader.plan(item.number), item.reader.media(item.number)
        numbers = output_planner(self._recipe, item.generator, _SPLIT).numbers(item.at, plan)
        values = torch.from_numpy(media.wire.values(item.reader.patches(item.number)))
        wide = torch.promote_types(self._hidden.dtype, torch.float32)
        image, noise = values.to(wide), numbers.noise.to(wide)
        time = torch.tensor([numbers.time], dtype=torch.float32)
        condition = self._hidden[torch.from_numpy(item.condition)][None]
        if numbers.dropped:
            condition = condition[:, :0]
        velocity = generator_family(self._recipe, item.generator).predict(
            self._local.model.modules[item.generator].whole.transformer,
            (image + time.to(wide) * (noise - image)).to(self._hidden.dtype)[None],
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
    """Yield items in order; where they are follows from the start and end tokens in the pack."""
    by_modality = {part.output: name for name, part in recipe.generators.items()}
    ids = readers[0].chat.output_ids
    begin = 0
    for n, (reader, length) in enumerate(zip(readers, lane.lengths, strict=False)):
        tokens, behind = lane.input_ids[begin : begin + length], 0
        starts = np.flatnonzero(np.isin(tokens, [ids[media][0] for media in by_modality])).tolist()
        ends = np.flatnonzero(np.isin(tokens, [ids[media][1] for media in by_modality])).tolist()
        numbers = np.flatnonzero(samples.item_sample == n)
        media = [samples.media[kind] for kind in samples.item_media[numbers].tolist()]
        drawn = [i for i, name in enumerate(media) if name in by_modality]
        for i, start, end in zip(drawn, starts, ends, strict=True):
            name = by_modality[media[i]]
            part = recipe.generators[name]
            first, last = start + 1, end
            if part.condition == "prompt":
                first, last = max(part.skipped_tokens, behind), start
            at = step, int(samples.source[n]), int(samples.sample[n]), i
            number = int(samples.item[numbers[i]])
            condition = begin + np.arange(first, last)
            yield _Item(name, at, number, reader, condition, begin + start + 1)
            behind = end + 1
        begin += length
