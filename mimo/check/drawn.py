"""Generators on one rank, for the reference: one plain call of the module for each item.

Of a layout's way from samples to losses it shares the modules and the random numbers of an item.
Hooks put queries into the text's embeddings, and take the hidden states after the last norm.

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

from data.batch import GlobalMicrobatch, PackedLane
from data.index.reader import SampleReader
from mimo.config.schema import LANGUAGE, Recipe
from mimo.families.registry import generator_family
from mimo.generate.one_rank import LocalModel
from mimo.model.outputs import OutputPlanner, output_planner


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


class DrawnPack:
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
        place = step, samples, readers, lane
        self._items = [*_items(recipe, *place)] if recipe.generators else []

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
        numbers = _planner(self._recipe, item.generator).numbers(item.at, plan)
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


def _planner(recipe: Recipe, name: str) -> OutputPlanner:
    return output_planner(recipe, name, "step")


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
