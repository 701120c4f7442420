"""Inputs of a generator's ranks in a step: targets, noise, and positions of conditions.

Letters: B items of one forward, S tokens of each with C numbers, N rows of a lane, T of the longest
condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.index.reader import SampleReader, plans_of_items
from data.loader import LoadedStep
from data.modalities.processor import PartPlan, WireForm
from mimo.config.modules import Generator
from mimo.config.schema import Recipe
from mimo.device import Staging
from mimo.engines.contract import Draw
from mimo.engines.draw import philox_key
from mimo.families.flow import shifted_time
from mimo.families.registry import generator_settings
from mimo.families.wire import WirePatches
from mimo.model.step_plan import PlannedMicrobatch, StepPlan


@dataclass(frozen=True)
class HostDraw:
    """A `Draw` on the host; patches: the form and the patches (P, W) of each item."""

    patches: list[tuple[WireForm, Tensor]]
    draw: Draw

    def staged(self, staging: Staging) -> Draw:
        """Copy it to the device, all but the lengths."""
        names = "noise", "times", "rows", "weights", "counted"
        copies = {name: staging.copy(getattr(self.draw, name)) for name in names}
        patches = WirePatches.of(self.patches, staging.join, staging.copy)
        return replace(self.draw, patches=patches, **copies)


@dataclass(frozen=True)
class OutputPlanner:
    """Plans the forwards of a generator's lane.

    key: names the random numbers. They depend only on it, the step, the sample and the item, as in
    `mimo.engines.draw`. channels: C.

    Lanes under FSDP2 gather weights together, so all of them run one forward for each size of item
    in the global microbatch. A lane without such an item runs a blank one, which has no weight.
    """

    name: str
    generator: Generator
    key: str
    channels: int

    def plan(
        self, loaded: LoadedStep, plan: StepPlan, readers: Sequence[SampleReader], lane: int
    ) -> list[list[HostDraw]]:
        """Return the forwards of each microbatch, in order."""
        total = max(plan.num_outputs[self.name], 1)
        weight = self.generator.loss_weight * max(plan.num_loss_tokens, 1) / total
        return [
            [*self._of_microbatch(m, planned, loaded, readers, lane, weight)]
            for m, planned in enumerate(plan.microbatches)
        ]

    def _of_microbatch(
        self,
        m: int,
        planned: PlannedMicrobatch,
        loaded: LoadedStep,
        readers: Sequence[SampleReader],
        lane: int,
        weight: float,
    ) -> Iterator[HostDraw]:
        samples, items = planned.samples, planned.items[self.name]
        sample = samples.item_sample[items.item]
        source, item = samples.source[sample], samples.item[items.item]
        plans = plans_of_items(readers, source, item)
        sizes = [plan.grid[1:] for plan in plans]
        of_lane = np.flatnonzero(items.lane == lane).tolist()
        rows = samples.item_rows[items.item][of_lane]
        first = dict(zip(of_lane, (np.cumsum(rows) - rows).tolist(), strict=True))
        # In a sample, items are numbered in order; the index numbers those of all samples.
        start = np.searchsorted(samples.item_sample, samples.item_sample[items.item])
        number, form = items.item - start, readers[0].processors[self.generator.output].wire
        by_size: dict[tuple[int, int], list[_Target]] = {size: [] for size in sorted(set(sizes))}
        for i in of_lane:
            at = loaded.step, int(source[i]), int(samples.sample[sample[i]]), int(number[i])
            target = _Target(
                form=readers[int(source[i])].media(int(item[i])).wire,
                patches=loaded.patches[m][int(source[i]), int(item[i])],
                numbers=self.numbers(at, plans[i]),
                first_row=first[i],
                num_rows=int(samples.item_rows[items.item[i]]),
            )
            by_size[sizes[i]].append(target)
        for size, targets in by_size.items():
            yield self._draw(size, targets, form, int(rows.sum()), weight)

    def numbers(self, at: tuple[int, int, int, int], plan: PartPlan) -> _Numbers:
        """Draw what is random for an item. at: step, source, sample, item in the sample."""
        step, source, sample, item = at
        key = philox_key(self.key)
        # The generator counts in the first of four words.
        philox = np.random.Philox(key=key, counter=[0, step, source << 48 | sample, item])
        generator, config = np.random.Generator(philox), self.generator
        time = 1 / (1 + np.exp(-(config.time_mean + config.time_std * generator.standard_normal())))
        dropped = generator.random() < config.condition_dropout
        size = plan.grid[1] * plan.grid[2], self.channels
        noise = generator.standard_normal(size, dtype=np.float32)
        return _Numbers(shifted_time(time, config.time_shift), dropped, torch.from_numpy(noise))

    def _draw(
        self,
        size: tuple[int, int],
        targets: Sequence[_Target],
        form: WireForm,
        num_rows: int,
        weight: float,
    ) -> HostDraw:
        """Put items of one size together. form: of a blank item's patches. num_rows: N."""
        counted, tokens = 1.0, size[0] * size[1]
        if not targets:
            blank = _Numbers(0.5, True, torch.zeros(tokens, self.channels))
            patches = torch.zeros(tokens, form.width, dtype=torch.uint8)
            targets = [_Target(form, patches, blank, 0, 1)]
            counted = weight = 0.0
        rows = [target.rows(blank=num_rows) for target in targets]
        draw = Draw(
            grid=size,
            patches=None,
            noise=torch.stack([target.numbers.noise for target in targets]),
            times=torch.tensor([t.numbers.time for t in targets], dtype=torch.float32),
            rows=pad_sequence(rows, batch_first=True, padding_value=num_rows),
            lengths=torch.tensor([0 if t.numbers.dropped else t.num_rows for t in targets]),
            weights=torch.full((len(targets),), weight, dtype=torch.float64),
            counted=torch.full((len(targets),), counted),
        )
        return HostDraw([(target.form, target.patches) for target in targets], draw)


def output_planner(recipe: Recipe, name: str, split: str) -> OutputPlanner:
    """Return the planner of a generator's forwards. split: name of the batches."""
    key, settings = f"{recipe.train.seed}:{split}:{name}", generator_settings(recipe, name)
    return OutputPlanner(name, recipe.generators[name], key, settings.in_channels)


@dataclass(frozen=True)
class _Numbers:
    """time: in 0..1. dropped: whether the item has no condition. noise: (S, C) fp32."""

    time: float
    dropped: bool
    noise: Tensor


@dataclass(frozen=True)
class _Target:
    """An item of a lane. patches: (S, W). first_row, num_rows: of its condition in the lane's."""

    form: WireForm
    patches: Tensor
    numbers: _Numbers
    first_row: int
    num_rows: int

    def rows(self, blank: int) -> Tensor:
        """Return the rows of its condition; ``blank`` for each if it has none."""
        if self.numbers.dropped:
            return torch.full((self.num_rows,), blank)
        return torch.arange(self.first_row, self.first_row + self.num_rows)
