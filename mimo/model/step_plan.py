"""The plan of one training step: which rank does what with which sample, in pure integers.

Every rank computes it from the data index alone, with the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bridge import BridgePlan, ItemRuns, assign_items, imbalance
from data.batch import GlobalMicrobatch, Padding, plan_microbatch, sizes_in_order
from data.index.reader import plans_of_items
from data.index.samples import Index, column
from data.order import SampleOrder
from data.packing import TokenBudget, Used, deal, packs_of_samples, packs_of_tokens, sort_by_length
from mimo.checkpoint.hf.recipes import config_of_folder
from mimo.config.schema import LANGUAGE, Recipe
from mimo.families.flops import flops_per_unit, step_flops
from mimo.families.registry import (
    GENERAL,
    language_settings,
    module_settings,
    trainable_names,
)
from mimo.model.dataset import Dataset, linear_tokens, token_budget
from mimo.model.step_bridges import StepRows
from mimo.ops.acceleration import fp8_multiple
from mimo.parallel.grids import (
    Layout,
    Link,
    encode_group,
    num_microbatches,
    segment_multiple,
    sequence_multiple,
)


@dataclass(frozen=True)
class PlannedItems:
    """The items of one module in a global microbatch.

    item: (k,) numbers in the microbatch, ascending. lane: (k,) the module's lane of each.
    """

    item: np.ndarray
    lane: np.ndarray

    def of_lane(self, lane: int) -> np.ndarray:
        """Return the items of a lane, as numbers in the microbatch, in order."""
        return self.item[self.lane == lane]


@dataclass(frozen=True)
class PlannedMicrobatch:
    """One global microbatch and who works on its items, by encoder and generator."""

    samples: GlobalMicrobatch
    items: dict[str, PlannedItems]

    def runs_of(self, module: str) -> ItemRuns:
        samples, items = self.samples, self.items[module]
        sample = samples.item_sample[items.item]
        return ItemRuns(
            sample=sample,
            source_lane=items.lane,
            destination_lane=samples.lane[sample],
            position=samples.item_position[items.item],
            rows=samples.item_rows[items.item],
            num_samples=samples.num_samples,
        )

    def without(self, unusable: Collection[int]) -> PlannedMicrobatch:
        """Return a copy with samples blanked. unusable: their numbers in this microbatch."""
        if not unusable:
            return self
        kept = ~np.isin(self.samples.item_sample, list(unusable))
        number = np.cumsum(kept) - 1
        items = {
            name: PlannedItems(number[i.item[kept[i.item]]], i.lane[kept[i.item]])
            for name, i in self.items.items()
        }
        return PlannedMicrobatch(self.samples.without(unusable), items)


@dataclass(frozen=True)
class StepPlan:
    """All microbatches of a step.

    num_loss_tokens: N, of the whole global batch. num_tokens: without padding.
    encoder_imbalance: largest lane load over the mean, averaged over the microbatches (or
    groups of them) that are encoded in one go, of the encoder where it is worst.
    num_outputs: M, the items of each generator in the whole global batch.
    bridges: by link of the planner, for each microbatch the plan of the bridge.
    """

    microbatches: tuple[PlannedMicrobatch, ...]
    num_loss_tokens: int
    num_tokens: int
    encoder_imbalance: float
    bridges: dict[Link, list[BridgePlan]]
    num_outputs: dict[str, int] = field(default_factory=dict)

    @property
    def num_losses(self) -> dict[str, int]:
        """The tokens of the language model with a loss, and the items of each generator."""
        return {LANGUAGE: self.num_loss_tokens, **self.num_outputs}


@dataclass
class StepPlanner:
    """Plans steps of a fixed shape over a fixed order of samples; see the recipe's keys.

    media: by encoder and generator, the modalities of its items.
    done: the steps before this run, and the samples used in them. The order continues from
        there, whatever the batch size or the budget was.
    links: the bridges to plan; None for all. A rank needs only those that it is at one end of.
    rank: whose transfers to plan; None for those of all ranks.
    tokens_on_rank: the multiple for the part of a sequence that a rank holds.
    padded: whether the model pads the samples of a lane's microbatch to their longest.
    budget: of the tokens of a lane's microbatch; then it has as many samples as fit instead of
        ``micro_batch_size``. linear_tokens: a lane's load of L tokens in one sample is
        L · (linear_tokens + L): the length at which attention costs as much as everything else.
    """

    layout: Layout
    media: Mapping[str, tuple[str, ...]]
    indexes: Sequence[Index]
    order: SampleOrder
    micro_batch_size: int
    num_microbatches: int
    delivery: str = "sharded"
    encode_group: int | None = None
    done: tuple[int, Used] = (0, Used())
    packed: bool = True
    padded: bool = False
    links: Collection[Link] | None = None
    rank: int | None = None
    tokens_on_rank: int = 1
    budget: TokenBudget | None = None
    linear_tokens: int = 0

    def __post_init__(self) -> None:
        assert self.budget is None or self.packed, "a budget is of the tokens of one sequence"
        language = self.layout.language
        self._latest = self.done
        self._padding = Padding(
            self.packed,
            segment_multiple(language.cp),
            sequence_multiple(language.cp, language.tp, language.sp, self.tokens_on_rank),
        )

    def used_before(self, step: int) -> Used:
        """Return the samples used in all steps before this one; fast in the order of steps."""
        known, used = self._latest if self._latest[0] <= step else self.done
        assert known <= step, f"step {step} is before the first step, {known}"
        for _ in range(known, step):
            used = used.with_packs(self._packs(used))
        self._latest = step, used
        return used

    def _packs(self, used: Used) -> list[np.ndarray]:
        """Return the next step's packs, lane by lane of each microbatch."""
        lanes = self.layout.language.dp
        count = self.num_microbatches * lanes
        if self.budget is not None:
            sizes = sizes_in_order(self.indexes, self.order)
            packs = packs_of_tokens(used, count, self.budget, sizes, self.padded)
        else:
            packs = packs_of_samples(used, count, self.micro_batch_size)
            if not self.padded:
                return packs
            packs = sort_by_length(packs, self._tokens(packs))
        tokens, lengths = self._tokens(packs), [len(pack) for pack in packs]
        first = np.cumsum([0, *lengths[:-1]])
        if self.padded:
            tokens = np.repeat(np.maximum.reduceat(tokens, first), lengths)
        loads = np.add.reduceat(tokens * (self.linear_tokens + tokens), first)
        return [packs[pack] for pack in deal(loads, lanes).flat]

    def _tokens(self, packs: Sequence[np.ndarray]) -> np.ndarray:
        return column(self.indexes, "token_length", *self.order.at(np.concatenate(packs)))

    def microbatches(self, step: int) -> list[PlannedMicrobatch]:
        """Return the microbatches of a step with items assigned to lanes, nothing blanked yet."""
        used = self.used_before(step)
        packs = self._packs(used)
        self._latest = step + 1, used.with_packs(packs)
        samples = plan_microbatch(self.indexes, self.order, packs, self._padding)
        planned = [PlannedMicrobatch(part, {}) for part in samples.split(self.num_microbatches)]
        for name, grid in self.layout.item_grids.items():
            step_loads = np.zeros(grid.dp, np.int64)
            for m, microbatch in enumerate(planned):
                if m % self._group_size(name) == 0:
                    group_loads = np.zeros(grid.dp, np.int64)
                part = microbatch.samples
                item = part.items_of_media(*self.media[name])
                lane = self._lanes(name, part, item, group_loads, step_loads)
                for loads in (group_loads, step_loads):
                    np.add.at(loads, lane, part.item_cost[item])
                microbatch.items[name] = PlannedItems(item, lane)
        return planned

    def _lanes(
        self,
        module: str,
        samples: GlobalMicrobatch,
        item: np.ndarray,
        group_loads: np.ndarray,
        step_loads: np.ndarray,
    ) -> np.ndarray:
        """Return (k,) the module's lane of each item, in the block of its sample's lane."""
        blocks, lanes = self.layout.blocks_of(module), self.layout.item_grids[module].dp
        size, cost, lane = lanes // blocks, samples.item_cost[item], np.zeros(item.size, np.int64)
        block = samples.lane[samples.item_sample[item]] // (self.layout.language.dp // blocks)
        for number, first in enumerate(range(0, lanes, size)):
            in_block, of_block = block == number, slice(first, first + size)
            loads = group_loads[of_block], step_loads[of_block]
            lane[in_block] = first + assign_items(cost[in_block], size, *loads)
        return lane

    def _group_size(self, module: str) -> int:
        """Return the microbatches that an encoder encodes in one go; its lanes share that load."""
        if module not in self.layout.colocated & self.layout.encoders.keys():
            return 1
        return self.encode_group or self.num_microbatches

    def finish(
        self, microbatches: Sequence[PlannedMicrobatch], unusable: Sequence[int] = ()
    ) -> StepPlan:
        """Blank the samples ``unusable``, numbers in the step, and plan the bridges."""
        if self.layout.language.vpp > 1:  # interleaved stages need one length
            tokens = max(m.samples.longest_sequence for m in microbatches)
            microbatches = [replace(m, samples=m.samples.padded_to(tokens)) for m in microbatches]
        finished = []
        for first, planned in zip(first_samples(microbatches), microbatches, strict=True):
            numbers = range(first, first + planned.samples.num_samples)
            blanked = [sample - first for sample in unusable if sample in numbers]
            finished.append(planned.without(blanked))
        bridges = {}
        for name in self.layout.item_grids:
            samples, runs = [m.samples for m in finished], [m.runs_of(name) for m in finished]
            # The hidden states for a generator are cut as they are, whatever encoders deliver.
            delivery = "sharded" if name in self.layout.generators else self.delivery
            group = self._group_size(name)
            rows = StepRows(self.layout, name, delivery, group, samples, runs)
            bridges |= {
                link: rows.plans(link, self.rank)
                for link in self.layout.links_of(name)
                if self.links is None or link in self.links
            }
        return StepPlan(
            microbatches=tuple(finished),
            num_loss_tokens=int(sum(m.samples.loss_tokens.sum() for m in finished)),
            num_tokens=int(sum(m.samples.length.sum() for m in finished)),
            encoder_imbalance=max(
                (imbalance(self.lane_loads(name, finished)) for name in self.layout.encoders),
                default=1.0,
            ),
            bridges=bridges,
            num_outputs={
                name: sum(m.items[name].item.size for m in finished)
                for name in self.layout.generators
            },
        )

    def lane_loads(self, module: str, microbatches: Sequence[PlannedMicrobatch]) -> np.ndarray:
        """Return (groups, lanes) the cost of the items that each lane works on in one go."""
        lanes, size = self.layout.item_grids[module].dp, self._group_size(module)
        loads = np.zeros((-(-len(microbatches) // size), lanes))
        for m, planned in enumerate(microbatches):
            items = planned.items[module]
            cost = planned.samples.item_cost[items.item]
            loads[m // size] += np.bincount(items.lane, cost, lanes)
        return loads


def first_samples(microbatches: Sequence[PlannedMicrobatch]) -> list[int]:
    """Return the number in the step of each microbatch's first sample."""
    counts = [planned.samples.num_samples for planned in microbatches]
    return [0, *np.cumsum(counts[:-1]).tolist()]


def step_planner(recipe: Recipe, layout: Layout, dataset: Dataset, **options: Any) -> StepPlanner:
    """Return the planner of a recipe's steps. options: further arguments of `StepPlanner`."""
    return StepPlanner(
        layout,
        {name: tuple(encoder.media_tokens) for name, encoder in recipe.encoders.items()}
        | {name: (generator.output,) for name, generator in recipe.generators.items()},
        dataset.indexes,
        dataset.order,
        recipe.train.micro_batch_size,
        num_microbatches(recipe, layout),
        delivery=recipe.bridge.delivery,
        encode_group=encode_group(recipe),
        packed=recipe.data.packing,
        tokens_on_rank=fp8_multiple(recipe.train.fp8),
        budget=token_budget(recipe),
        linear_tokens=linear_tokens(recipe),
        **options,
    )


def pads_samples(recipe: Recipe) -> bool:
    """Return whether the language model pads the samples of a lane to a batch, without packing.

    For models of transformers the gate decides; its verdict is cached.
    """
    if recipe.language.family != GENERAL:
        return False
    from mimo.model.gate import verdict_of  # late: it loads transformers

    assert recipe.init_from is not None, "a model of transformers comes from its folder"
    return verdict_of(config_of_folder(Path(recipe.init_from))).packing is None


class StepFlops:
    """Counts the FLOPs of planned steps. tokenizer_size: number of its tokens.

    settings, products: by module. passes_gradient: by module, whether something before it trains.
    """

    def __init__(self, recipe: Recipe, tokenizer_size: int, dataset: Dataset) -> None:
        self._dataset, self._generators = dataset, recipe.generators
        language = language_settings(recipe)
        sizes = {LANGUAGE: (language.padded_vocab_size(tokenizer_size),)}
        sizes |= dict.fromkeys(recipe.encoders, (language.hidden_size,))
        self.settings: dict[str, Any] = {n: module_settings(recipe, n) for n in recipe.modules}
        self.products = {n: s.products(*sizes.get(n, ())) for n, s in self.settings.items()}
        self.passes_gradient = dict.fromkeys(recipe.encoders, False)
        self.passes_gradient[LANGUAGE] = recipe.trains_before_language
        self.passes_gradient |= dict.fromkeys(recipe.generators, recipe.trains_before_generators)
        self._per_unit = {
            name: flops_per_unit(
                products,
                trainable_names(recipe, name),
                input_needs_gradient=self.passes_gradient[name],
                adapters=recipe.module(name).lora,
            )
            for name, products in self.products.items()
        }

    def grids(self, planned: PlannedMicrobatch, name: str) -> np.ndarray:
        """Return the grids of an encoder's or generator's items in a microbatch, (k, 3)."""
        samples, items = planned.samples, planned.items[name].item
        source = samples.source[samples.item_sample[items]]
        plans = plans_of_items(self._dataset.readers, source, samples.item[items])
        return np.array([plan.grid for plan in plans], np.int64).reshape(-1, 3)

    def of(self, plan: StepPlan) -> dict[str, float]:
        """Return the FLOPs of forward and backward by module, over all its ranks."""
        flops = dict.fromkeys(self._per_unit, 0.0)
        for planned in plan.microbatches:
            samples = planned.samples
            counts = {
                LANGUAGE: self.settings[LANGUAGE].counts(
                    samples.length, samples.item_rows, int(samples.loss_tokens.sum())
                )
            }
            for name, items in planned.items.items():
                grids = self.grids(planned, name)
                rows = (samples.item_rows[items.item],) if name in self._generators else ()
                if len(grids):
                    counts[name] = self.settings[name].counts(grids, *rows)
            for name, units in counts.items():
                flops[name] += step_flops(self._per_unit[name], units)
        return flops
