"""Work and seconds of a planned step, by module, microbatch, lane and part of the layers.

FLOPs are those of `mimo.families.flops`, plus padding and recomputation. All collectives and
messages count with their bytes. Letters: M microbatches, L lanes, P parts of the layers.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from data.index.reader import plans_of_items
from mimo.config.schema import Recipe
from mimo.families.flops import Product, flops_per_unit
from mimo.families.registry import language_settings, module_settings, trainable_names
from mimo.families.wire import DTYPES
from mimo.model.dataset import Dataset
from mimo.model.memory import parameters_by_role
from mimo.model.module_sizes import microbatches_at_once
from mimo.model.step_plan import PlannedMicrobatch, StepFlops, StepPlan
from mimo.parallel.grids import LANGUAGE, Layout, encode_group, overlap_of, run_ahead
from mimo.plan.rates import Rates
from mimo.plan.schedules import ModuleCosts, Rows, StepCosts, StepTasks

_LAYER = re.compile(r"(?:^|\.)(?:layers|transformer_blocks|\w+_refiner)\.(\d+)\.")


@dataclass(frozen=True)
class Part:
    """A part of a module's layers. forward, backward: FLOPs by unit. weights: elements."""

    forward: dict[str, float]
    backward: dict[str, float]
    layers: int
    weights: float


@dataclass(frozen=True)
class Passes:
    """FLOPs of a rank's passes, forward and backward (M, L, P), and other costs.

    messages: (M, L, P) seconds of the collectives in a forward. gathers: (P,) seconds in which
    FSDP2 gathers weights. calls: (M, 1, P) layers, plus 1; 0 where an encoder encodes this
    microbatch in one go with an earlier one. num_repeated: forwards that a backward repeats.
    """

    forward: np.ndarray
    backward: np.ndarray
    messages: np.ndarray
    gathers: np.ndarray
    calls: np.ndarray
    num_repeated: int

    def seconds(self, module: str, rates: Rates) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of forward and backward, each (M, L, P)."""
        per_flop, per_flop_back = rates.seconds_per_flop(module)
        call, call_back = rates.call * self.calls, rates.call_back * self.calls
        first = self.forward * per_flop
        forward = first + call + self.messages + self._exposed(first, rates)
        if not self.backward.any():
            return forward, np.zeros_like(forward)
        back = self.backward * per_flop_back + self.num_repeated * first
        others = call_back + self.num_repeated * call + (1 + self.num_repeated) * self.messages
        return forward, back + others + self._exposed(back, rates)

    def _exposed(self, work: np.ndarray, rates: Rates) -> np.ndarray:
        """Return the seconds of gathers beyond the work that hides them; a CPU hides none."""
        return np.maximum(self.gathers - work * math.isinf(rates.cores), 0)


class StepWork:
    """The work of a recipe's steps in one layout. dataset: the training samples."""

    def __init__(self, recipe: Recipe, layout: Layout, dataset: Dataset, rates: Rates) -> None:
        self.recipe, self.layout, self.dataset = recipe, layout, dataset
        self.rates = rates.with_threads(recipe.train.threads_per_rank, layout.world_size)
        self.settings: dict[str, Any] = {n: module_settings(recipe, n) for n in layout.grids}
        self.language = language_settings(recipe)
        self.size = DTYPES[recipe.train.precision].itemsize
        self.flops = StepFlops(recipe, dataset.readers[0].chat.vocab_size, dataset)
        self.parts = {name: self._parts(name) for name in layout.grids}

    # ------------------------------------------------------------------ what does not change

    def _products(self, name: str) -> list[Product]:
        if name == LANGUAGE:
            vocabulary = self.dataset.readers[0].chat.vocab_size
            return self.language.products(self.language.padded_vocab_size(vocabulary))
        output_size = (self.language.hidden_size,) if name in self.recipe.encoders else ()
        return self.settings[name].products(*output_size)

    def _parts(self, name: str) -> list[Part]:
        """Split a module's products over the chunks of its stages."""
        grid, module = self.layout.grids[name], self.recipe.module(name)
        num_parts = grid.pp * grid.vpp
        per_part = max(1, self.settings[name].num_layers // num_parts)
        split: list[list[Product]] = [[] for _ in range(num_parts)]
        layers: list[set[str]] = [set() for _ in range(num_parts)]
        place = 0
        for product in self._products(name):
            match = _LAYER.search(product.parameter or "")
            if match is not None:
                place = min(int(match[1]) // per_part, num_parts - 1)
                layers[place].add(match[0])
            elif product.parameter is not None and any(layers):
                place = num_parts - 1
            split[place].append(product)
        passes = {LANGUAGE: self.recipe.trains_before_language}
        passes |= dict.fromkeys(self.recipe.generators, self.recipe.trains_before_generators)
        passes_gradient, parts = passes.get(name, False), []
        is_trained = trainable_names(self.recipe, name)
        for products, numbers in zip(split, layers, strict=True):
            forward = flops_per_unit(products, lambda _: False)
            total = flops_per_unit(products, is_trained, passes_gradient, module.lora)
            backward = {unit: total[unit] - flops for unit, flops in forward.items()}
            weights = sum(p.forward / 2 for p in products if p.parameter is not None)
            parts.append(Part(forward, backward, max(1, len(numbers)), weights))
            names = [p.parameter for p in products if p.parameter is not None]
            passes_gradient = passes_gradient or any(map(is_trained, names)) or bool(module.lora)
        return parts

    @cached_property
    def elements(self) -> dict[str, tuple[float, float]]:
        """Trained and updated elements of a rank by module, in its largest role."""
        elements = dict[str, tuple[float, float]]()
        wide = max(4, self.size)
        for role in parameters_by_role(self.recipe, self.layout):
            grid, trained = self.layout.grids[role.module], role.gradients / wide
            shares = grid.dp * grid.cp if self.recipe.train.distributed_optimizer else 1
            if grid.engine == "fsdp":
                shares = grid.dp // grid.dp_replicate
            known = elements.get(role.module, (0.0, 0.0))
            elements[role.module] = max(known, (trained, trained / shares))
        return elements

    # ------------------------------------------------------------------ one step

    def tasks(self, plan: StepPlan) -> StepTasks:
        """Return the tasks of a planned step."""
        disjoint = [name for name in self.layout.encoders if name not in self.layout.colocated]
        ahead = {name: run_ahead(self.recipe, self.layout, name) for name in disjoint}
        group = encode_group(self.recipe) or len(plan.microbatches)
        return StepTasks(self.layout, self.costs(plan), ahead, group)

    def costs(self, plan: StepPlan) -> StepCosts:
        """Return the seconds of a planned step's passes and messages."""
        modules = dict[str, ModuleCosts]()
        for name in self.layout.grids:
            tokens = self.tokens(plan, name)
            passes = self.passes(plan, name, tokens)
            forward, backward = passes.seconds(name, self.rates)
            messages = self._stage_messages(name, tokens)
            has_backward = bool(passes.backward.any())
            modules[name] = ModuleCosts(forward, backward, messages, has_backward)
        rows = {
            name: [self._rows(name, microbatch) for microbatch in plan.microbatches]
            for name in self.layout.item_grids
        }
        return StepCosts(modules, rows)

    @property
    def ranks_per_core(self) -> float:
        """Ranks that share a core when all work; 1 if there are enough cores."""
        return max(1.0, self.layout.world_size / self.rates.cores)

    def tail_seconds(self, backward: dict[str, float]) -> float:
        """Return the seconds from the last backward to the end of a step's update.

        backward: seconds of a microbatch's backward by module; they may hide sums of gradients.
        """
        hides, _ = overlap_of(self.recipe.train, on_gpu=self.rates.peak > 0)
        tails = defaultdict[str, float](float)  # by the module on whose ranks it runs
        for name, (trained, updated) in self.elements.items():
            grid = self.layout.grids[name]
            ranks = grid.dp * grid.cp
            bytes_of_sum = 0.0 if grid.engine == "fsdp" else trained * max(4, self.size)
            total = 2 * self.rates.collective(bytes_of_sum, ranks, ranks * grid.tp)
            exposed = max(0.0, total - backward.get(name, 0.0)) if hides else total
            place = LANGUAGE if name in self.layout.colocated else name
            tails[place] += exposed + updated * self.rates.element
        return (self.rates.step + max(tails.values())) * self.ranks_per_core

    def tokens(self, plan: StepPlan, name: str) -> np.ndarray:
        """Return the tokens of each lane, (M, L), with padding; for an encoder, its inputs."""
        if name == LANGUAGE:
            return np.array([m.samples.lane_tokens for m in plan.microbatches], float)
        lanes = self.layout.item_grids[name].dp
        tokens = np.zeros((len(plan.microbatches), lanes))
        for m, microbatch in enumerate(plan.microbatches):
            items, grids = microbatch.items[name], self._grids(name, microbatch)
            inputs = grids.prod(axis=1)
            if name in self.layout.encoders:
                inputs = [self.settings[name].num_inputs(grid) for grid in grids]
            np.add.at(tokens[m], items.lane, inputs)
        return tokens

    def passes(self, plan: StepPlan, name: str, tokens: np.ndarray) -> Passes:
        """Return the work of a module's passes. tokens: (M, L) of each lane."""
        grid, parts = self.layout.grids[name], self.parts[name]
        recompute, num_repeated = self.recipe.module(name).recompute, 0
        units = list(dict.fromkeys(unit for part in parts for unit in part.forward))
        counts = np.array(
            [
                [[of_lane.get(unit, 0.0) for unit in units] for of_lane in self._counts(name, m)]
                for m in plan.microbatches
            ]
        )
        forward = np.array([[part.forward.get(unit, 0.0) for unit in units] for part in parts])
        backward = np.array([[part.backward.get(unit, 0.0) for unit in units] for part in parts])
        if recompute == "full":
            num_repeated = 1
        elif recompute == "selective" and backward.any():
            backward += forward * [unit.endswith("pair") for unit in units]
        layers = np.array([part.layers for part in parts])
        at_once = microbatches_at_once(self.recipe, self.layout, name)
        is_first = np.arange(len(tokens))[:, None, None] % at_once == 0
        return Passes(
            counts @ forward.T / (grid.tp * grid.cp),
            counts @ backward.T / (grid.tp * grid.cp),
            self._layer_messages(name, tokens)[:, :, None] * layers,
            self._gathers(name),
            is_first * (1 + layers),
            num_repeated,
        )

    def _grids(self, name: str, microbatch: PlannedMicrobatch) -> np.ndarray:
        """Return the grids of a module's items in a microbatch, (k, 3)."""
        samples, item = microbatch.samples, microbatch.items[name].item
        source = samples.source[samples.item_sample[item]]
        plans = plans_of_items(self.dataset.readers, source, samples.item[item])
        return np.array([plan.grid for plan in plans], np.int64).reshape(-1, 3)

    def _counts(self, name: str, microbatch: PlannedMicrobatch) -> list[dict[str, float]]:
        """Return the number of each unit of `mimo.families.flops`, by lane."""
        samples = microbatch.samples
        if name == LANGUAGE:
            of_item, counts = samples.lane[samples.item_sample], []
            for lane, tokens in enumerate(samples.lane_tokens.tolist()):
                mask = samples.lane == lane
                lengths = samples.segment_length[mask]
                lengths = np.append(lengths, tokens - lengths.sum())  # padding, as a segment
                rows, num_losses = samples.item_rows[of_item == lane], samples.loss_tokens[mask]
                counts.append(self.language.counts(lengths, rows, int(num_losses.sum())))
            return counts
        items, grids = microbatch.items[name], self._grids(name, microbatch)
        counts = []
        for lane in range(self.layout.item_grids[name].dp):
            mask = items.lane == lane
            is_generator = name in self.recipe.generators
            rows = (samples.item_rows[items.item[mask]],) if is_generator else ()
            counts.append(self.settings[name].counts(grids[mask], *rows) if mask.any() else {})
        return counts

    # ------------------------------------------------------------------ messages

    def _layer_messages(self, name: str, tokens: np.ndarray) -> np.ndarray:
        """Return the seconds of the collectives in one layer's forward, (M, L)."""
        grid, rates, settings = self.layout.grids[name], self.rates, self.settings[name]
        share = tokens / grid.cp * self.size
        hidden = share * settings.hidden_size
        # Gather and reduce around attention and around the MLP; then gather keys and values.
        seconds = 4 * rates.collective(hidden, grid.tp, grid.tp)
        keys = 2 * self.language.num_query_groups * self.language.head_size / grid.tp
        seconds += rates.collective(share * grid.cp * keys, grid.cp, grid.tp * grid.cp)
        if grid.ep * grid.etp > 1:
            # A token's row goes once to every rank with a part of an expert that it chose.
            is_chosen = 1 - (1 - 1 / grid.ep) ** self.language.routers[2]
            sent = hidden / grid.tp * (grid.ep * grid.etp - 1) * is_chosen
            seconds += 2 * rates.message(sent, grid.ep * grid.etp - 1)
        return seconds

    def _gathers(self, name: str) -> np.ndarray:
        """Return the seconds in which FSDP2 gathers weights, (P,)."""
        grid = self.layout.grids[name]
        shards = grid.dp // grid.dp_replicate if grid.engine == "fsdp" else 1
        weights = np.array([part.weights for part in self.parts[name]]) / grid.tp * self.size
        return self.rates.collective(weights, shards, shards * grid.tp)

    def _stage_messages(self, name: str, tokens: np.ndarray) -> np.ndarray:
        """Return the seconds of a message from a stage to the next, (M, L)."""
        grid, settings = self.layout.grids[name], self.settings[name]
        if grid.pp == 1:
            return np.zeros(tokens.shape)
        parts = grid.cp * (grid.tp if grid.sp else 1)
        width = settings.hidden_size * self.size
        return self.rates.message(tokens / parts * width, grid.size // grid.pp)

    def _rows(self, name: str, microbatch: PlannedMicrobatch) -> Rows:
        """Return the lanes that exchange rows of a microbatch, and the seconds of each message."""
        samples, items = microbatch.samples, microbatch.items[name]
        to = samples.lane[samples.item_sample[items.item]]
        lanes, language = self.layout.item_grids[name], self.layout.language
        keys, place = np.unique(items.lane * language.dp + to, return_inverse=True)
        pairs = np.stack((keys // language.dp, keys % language.dp), axis=1)
        levels = 1 + getattr(self.settings[name], "num_levels", 0)
        wire = self.recipe.bridge.wire_dtype
        number = self.size if wire == "auto" else DTYPES[wire].itemsize
        row = self.language.hidden_size * levels * number
        sizes = np.bincount(place, samples.item_rows[items.item], len(keys)) * row
        sent = np.bincount(pairs[:, 0], sizes, lanes.dp) / lanes.tp
        received = np.bincount(pairs[:, 1], sizes, language.dp) / (language.tp * language.cp)
        most: Sequence[float] = np.maximum(sent[pairs[:, 0]], received[pairs[:, 1]]).tolist()
        span = self.layout.world_size
        return Rows(pairs, np.array([self.rates.message(size, span) for size in most]))
