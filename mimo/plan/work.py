"""Work and seconds of a planned step, by module, microbatch, lane and part of the layers.

FLOPs are those of `mimo.families.flops`, plus padding and recomputation. All collectives and
messages count with their bytes. Letters: M microbatches, L lanes, P parts of the layers, U units of
`mimo.families.flops`, D lanes of the language model.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mimo.config.schema import Recipe
from mimo.families.flops import Product, flops_per_unit
from mimo.families.registry import language_settings, trainable_names
from mimo.families.wire import DTYPES
from mimo.model.dataset import Dataset
from mimo.model.memory import parameters_by_role
from mimo.model.module_sizes import IN_LAYER, microbatches_at_once
from mimo.model.step_plan import PlannedMicrobatch, StepFlops, StepPlan
from mimo.parallel.grids import LANGUAGE, Layout, encode_group, overlap_of, run_ahead
from mimo.plan.rates import Rates
from mimo.plan.schedules import ModuleCosts, StepTasks


@dataclass(frozen=True)
class Parts:
    """The parts of a module's layers. units: names of U units.

    forward, backward: (P, U) FLOPs of one of each unit. layers, weights: (P,) layers and elements.
    """

    units: list[str]
    forward: np.ndarray
    backward: np.ndarray
    layers: np.ndarray
    weights: np.ndarray


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
        hides_gathers = math.isinf(rates.cores)  # on a CPU they stop the work
        work = self.forward * per_flop
        others = rates.call * self.calls + self.messages
        forward = work + others + np.maximum(self.gathers - work * hides_gathers, 0)
        if not self.backward.any():
            return forward, np.zeros_like(forward)
        work = self.backward * per_flop_back + self.num_repeated * work
        others = rates.call_back * self.calls + self.messages + self.num_repeated * others
        return forward, work + others + np.maximum(self.gathers - work * hides_gathers, 0)


class StepWork:
    """The work of a recipe's steps in one layout. dataset: the training samples."""

    def __init__(self, recipe: Recipe, layout: Layout, dataset: Dataset, rates: Rates) -> None:
        self.recipe, self.layout = recipe, layout
        self.rates = rates.with_threads(recipe.train.threads_per_rank, layout.world_size)
        self.size = DTYPES[recipe.train.precision].itemsize
        self.flops = StepFlops(recipe, dataset.readers[0].chat.vocab_size, dataset)
        self.settings, self.language = self.flops.settings, language_settings(recipe)
        self.parts = {name: self._parts(name) for name in layout.grids}

    # ------------------------------------------------------------------ what does not change

    def _parts(self, name: str) -> Parts:
        """Split a module's products over the chunks of its stages."""
        grid, module = self.layout.grids[name], self.recipe.module(name)
        num_parts = grid.pp * grid.vpp
        per_part = max(1, self.settings[name].num_layers // num_parts)
        split: list[list[Product]] = [[] for _ in range(num_parts)]
        layers: list[set[str]] = [set() for _ in range(num_parts)]
        place = 0
        for product in self.flops.products[name]:
            match = IN_LAYER(product.parameter or "")
            if match is not None:
                place = min(int(match[1]) // per_part, num_parts - 1)
                layers[place].add(match[0])
            elif product.parameter is not None and any(layers):
                place = num_parts - 1
            split[place].append(product)
        is_trained, passes = trainable_names(self.recipe, name), self.flops.passes_gradient[name]
        first, total = list[dict[str, float]](), list[dict[str, float]]()
        for products in split:
            first.append(flops_per_unit(products, lambda _: False))
            total.append(flops_per_unit(products, is_trained, passes, module.lora))
            names = (p.parameter for p in products if p.parameter is not None)
            passes = passes or bool(module.lora) or any(map(is_trained, names))
        units = list(dict.fromkeys(unit for of_part in first for unit in of_part))
        forward, both = (
            np.array([[flops.get(unit, 0.0) for unit in units] for flops in of_parts])
            for of_parts in (first, total)
        )
        backward = both - forward
        if module.recompute == "selective" and backward.any():
            backward += forward * [unit.endswith("pair") for unit in units]
        weights = [sum(p.forward / 2 for p in products if p.parameter) for products in split]
        num_layers = np.array([max(1, len(numbers)) for numbers in layers])
        return Parts(units, forward, backward, num_layers, np.array(weights))

    @cached_property
    def elements(self) -> dict[str, tuple[float, float]]:
        """Trained and updated elements of a rank by module, in its largest role."""
        elements = dict.fromkeys(self.layout.grids, (0.0, 0.0))
        for role in parameters_by_role(self.recipe, self.layout):
            grid, trained = self.layout.grids[role.module], role.gradients / max(4, self.size)
            shares = grid.dp * grid.cp if self.recipe.train.distributed_optimizer else 1
            if grid.engine == "fsdp":
                shares = grid.dp // grid.dp_replicate
            elements[role.module] = max(elements[role.module], (trained, trained / shares))
        return elements

    # ------------------------------------------------------------------ one step

    def tasks(self, plan: StepPlan) -> StepTasks:
        """Return the tasks of a planned step."""
        ahead = {n: run_ahead(self.recipe, self.layout, n) for n in self.layout.encoders}
        group = encode_group(self.recipe) or len(plan.microbatches)
        return StepTasks(self.layout, self.costs(plan), ahead, group)

    def costs(self, plan: StepPlan) -> dict[str, ModuleCosts]:
        """Return the seconds of a planned step's passes and messages by module."""
        costs = {}
        for name in self.layout.grids:
            tokens = self.tokens(plan, name)
            passes = self.passes(plan, name, tokens)
            microbatches = plan.microbatches if name != LANGUAGE else ()
            costs[name] = ModuleCosts(
                *passes.seconds(name, self.rates),
                message=self._stage_messages(name, tokens),
                has_backward=bool(passes.backward.any()),
                rows=np.array([self._rows(name, microbatch) for microbatch in microbatches]),
            )
        return costs

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
        num_inputs = self.settings[name].num_inputs if name in self.layout.encoders else math.prod
        tokens = []
        for microbatch in plan.microbatches:
            inputs = [num_inputs(tuple(g)) for g in self.flops.grids(microbatch, name).tolist()]
            lanes = microbatch.items[name].lane
            tokens.append(np.bincount(lanes, inputs, self.layout.grids[name].dp))
        return np.array(tokens)

    def passes(self, plan: StepPlan, name: str, tokens: np.ndarray) -> Passes:
        """Return the work of a module's passes. tokens: (M, L) of each lane."""
        grid, parts = self.layout.grids[name], self.parts[name]
        counts = np.array([self._counts(name, microbatch) for microbatch in plan.microbatches])
        at_once = microbatches_at_once(self.recipe, self.layout, name)
        is_first = np.arange(len(tokens))[:, None, None] % at_once == 0
        shards = grid.dp // grid.dp_replicate if grid.engine == "fsdp" else 1
        gathered = parts.weights / grid.tp * self.size
        return Passes(
            counts @ parts.forward.T / (grid.tp * grid.cp),
            counts @ parts.backward.T / (grid.tp * grid.cp),
            self._layer_messages(name, tokens)[:, :, None] * parts.layers,
            self.rates.collective(gathered, shards, shards * grid.tp),
            is_first * (1 + parts.layers),
            num_repeated=int(self.recipe.module(name).recompute == "full"),
        )

    def _counts(self, name: str, microbatch: PlannedMicrobatch) -> np.ndarray:
        """Return the number of each unit by lane, (L, U)."""
        samples, counts = microbatch.samples, list[dict[str, float]]()
        lanes = range(self.layout.grids[name].dp)
        if name == LANGUAGE:
            for lane in lanes:
                mask = samples.lane == lane
                lengths = samples.segment_length[mask]
                padding = samples.lane_tokens[lane] - lengths.sum()  # as a segment
                rows = samples.item_rows[mask[samples.item_sample]]
                losses = int(samples.loss_tokens[mask].sum())
                counts.append(self.language.counts(np.append(lengths, padding), rows, losses))
        else:
            items, grids = microbatch.items[name], self.flops.grids(microbatch, name)
            for lane in lanes:
                mask = items.lane == lane
                is_generator = name in self.recipe.generators
                rows = (samples.item_rows[items.item[mask]],) if is_generator else ()
                counts.append(self.settings[name].counts(grids[mask], *rows) if mask.any() else {})
        units = self.parts[name].units
        return np.array([[of_lane.get(unit, 0.0) for unit in units] for of_lane in counts])

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

    def _stage_messages(self, name: str, tokens: np.ndarray) -> np.ndarray:
        """Return the seconds of a message from a stage to the next, (M, L)."""
        grid = self.layout.grids[name]
        if grid.pp == 1:
            return np.zeros(tokens.shape)
        sent = tokens / (grid.cp * (grid.tp if grid.sp else 1)) * self.size
        return self.rates.message(sent * self.settings[name].hidden_size, grid.size // grid.pp)

    def _rows(self, name: str, microbatch: PlannedMicrobatch) -> np.ndarray:
        """Return the seconds of the messages of a microbatch's rows, (L, D); NaN without rows."""
        samples, items = microbatch.samples, microbatch.items[name]
        lanes, language = self.layout.grids[name], self.layout.language
        wire = self.recipe.bridge.wire_dtype
        number = self.size if wire == "auto" else DTYPES[wire].itemsize
        row = self.language.hidden_size * (1 + getattr(self.settings[name], "num_levels", 0))
        sizes = np.zeros((lanes.dp, language.dp))
        to = samples.lane[samples.item_sample[items.item]]
        np.add.at(sizes, (items.lane, to), samples.item_rows[items.item] * row * number)
        sent = sizes.sum(axis=1, keepdims=True) / lanes.tp
        received = sizes.sum(axis=0) / (language.tp * language.cp)
        seconds = self.rates.message(np.maximum(sent, received), self.layout.world_size)
        return np.where(sizes > 0, seconds, np.nan)
