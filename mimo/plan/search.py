"""Search the layouts of a recipe on a number of GPUs: `mimo plan`.

A closed form ranks all layouts that tile the GPUs. In this order they are checked, as by `mimo
check`, and pruned by the memory formula. The first that remain are simulated over the data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import getitem
from typing import Any

from mimo.config.schema import Recipe
from mimo.config.source import dotted
from mimo.errors import InputError, RecipeError, format_bytes
from mimo.families.registry import language_settings
from mimo.model.dataset import Dataset
from mimo.model.memory import memory_by_role
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import LANGUAGE, Layout, num_microbatches, run_ahead
from mimo.plan.forecast import Forecast, forecast, plans
from mimo.plan.rates import Gpu, Rates
from mimo.plan.work import StepWork

Overrides = Mapping[str, Any]

_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_NUM_SIMULATED, _QUICK_STEPS = 48, 2
_NUM_BEST, _STEPS = 5, 16
_MAX_TENSOR, _MAX_CONTEXT, _MAX_STAGES, _MAX_CHUNKS, _MAX_EXPERT = 8, 8, 16, 4, 64
_NEARBY = 16  # numbers of GPUs that an error message tries, up and down
_MIN_GAIN = 0.005  # of a step's time, to accept a longer run-ahead, which takes memory
_RECOMPUTE, _BATCH = "language.recompute", "train.micro_batch_size"


@dataclass(frozen=True)
class Choice:
    """A layout with its forecast. memory, role: bytes and role of the rank that needs most."""

    overrides: Overrides
    recipe: Recipe
    layout: Layout
    forecast: Forecast
    memory: float
    role: str

    @property
    def seconds(self) -> float:
        return self.forecast.percentile(50)


@dataclass(frozen=True)
class SearchResult:
    """Layouts, best first. counts: numbers of layouts ranked, refused, too large, simulated."""

    choices: Sequence[Choice]
    counts: Mapping[str, int]


def searched_keys(recipe: Recipe) -> list[str]:
    """Return the keys that the search sets and `--fix` accepts."""
    keys = [_BATCH, _RECOMPUTE]
    keys += [f"language.grid.{axis}" for axis in ("tp", "cp", "pp", "vpp", "ep")]
    for module in (dotted(recipe.key_of(n)) for n in (*recipe.encoders, *recipe.generators)):
        keys += [f"{module}.placement", f"{module}.grid.tp", f"{module}.grid.dp"]
    return keys + [f"encoders.{name}.run_ahead" for name in recipe.encoders]


def search(
    recipe: Recipe, dataset: Dataset, rates: Rates, gpu: Gpu, num_gpus: int, fixed: Overrides
) -> SearchResult:
    """Return the best layouts on exactly ``num_gpus``. Raises InputError if there is none."""
    space = Space(recipe, num_gpus, rates.ranks_per_node, fixed)
    ranked = _ranked(space, dataset, rates)
    fitting, too_large, refusals = list[Choice](), list[tuple[float, str]](), list[str]()
    simulated = list[Overrides]()
    for overrides in ranked:
        if len(fitting) == _NUM_SIMULATED:
            break
        if (without := {**overrides, _RECOMPUTE: "none"}) in simulated:
            continue  # recomputing only costs time
        try:
            candidate, layout = space.check(overrides)
        except RecipeError as error:
            refusals.append(error.problems[0])
            continue
        memory, role = largest_rank(candidate, layout)
        if memory > gpu.memory:
            too_large.append((memory, role))
            continue
        result = forecast(candidate, layout, dataset, rates, _QUICK_STEPS)
        fitting.append(Choice(overrides, candidate, layout, result, memory, role))
        simulated.append(without)
    if not fitting:
        raise InputError(f"--gpus {num_gpus}: {_why_refused(space, too_large, refusals, gpu)}")
    best = sorted(fitting, key=lambda choice: choice.seconds)[:_NUM_BEST]
    final = [_with_best_run_ahead(space, choice, dataset, rates, gpu) for choice in best]
    counts = {"ranked": len(ranked), "refused": len(refusals), "too large": len(too_large)}
    counts["simulated"] = len(fitting)
    return SearchResult(sorted(final, key=lambda choice: choice.seconds), counts)


def largest_rank(recipe: Recipe, layout: Layout) -> tuple[float, str]:
    """Return the bytes of the rank that needs most, over all its modules, and its role."""
    roles = memory_by_role(recipe, layout)
    colocated = sum(role.total for role in roles if role.module in layout.colocated)
    others = [role for role in roles if role.module not in layout.colocated]
    return max((r.total + colocated * (r.module == LANGUAGE), r.role) for r in others)


def _with_best_run_ahead(
    space: Space, choice: Choice, dataset: Dataset, rates: Rates, gpu: Gpu
) -> Choice:
    """Forecast the choice over more steps, with a longer run-ahead where it helps and fits."""
    recipe, layout = choice.recipe, choice.layout
    choice = replace(choice, forecast=forecast(recipe, layout, dataset, rates, _STEPS))
    for name in recipe.encoders.keys() - layout.colocated:
        key, longer = f"encoders.{name}.run_ahead", 2 * run_ahead(recipe, layout, name)
        if key in space.fixed or longer > num_microbatches(recipe, layout):
            continue
        overrides = {**choice.overrides, key: longer}
        candidate, _ = space.check(overrides)
        result = forecast(candidate, layout, dataset, rates, _STEPS)
        other = Choice(overrides, candidate, layout, result, *largest_rank(candidate, layout))
        if other.seconds < (1 - _MIN_GAIN) * choice.seconds and other.memory <= gpu.memory:
            choice = other
    return choice


@dataclass(frozen=True)
class Space:
    """All layouts of a recipe on ``num_gpus``, as overrides. fixed: values that stay, by key."""

    recipe: Recipe
    num_gpus: int
    ranks_per_node: int
    fixed: Overrides

    def check(self, overrides: Overrides) -> tuple[Recipe, Layout]:
        """Return the recipe with the overrides, and its layout. Raises RecipeError."""
        data = self.recipe.model_dump(mode="json")
        for key, value in overrides.items():
            *sections, name = key.split(".")
            reduce(getitem, sections, data)[name] = value
        try:
            recipe = Recipe.model_validate(data)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        return recipe, check_recipe(recipe, self.num_gpus)

    def _values(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        return (self.fixed[key],) if key in self.fixed else values

    def __iter__(self) -> Iterator[Overrides]:
        modules = (*self.recipe.encoders, *self.recipe.generators)
        for places in itertools.product(*map(self._placements, modules)):
            left = self.num_gpus - sum(ranks for ranks, _ in places)
            shared = {key: value for _, part in places for key, value in part.items()}
            if left > 0:
                yield from ({**self.fixed, **shared, **grid} for grid in self._language(left))

    def _placements(self, name: str) -> Iterator[tuple[int, Overrides]]:
        """Yield the placements of an encoder or generator: ranks of its own, and overrides.

        Numbers of disjoint lanes are powers of two, and three times these.
        """
        key, sp = dotted(self.recipe.key_of(name)), self.recipe.module(name).grid.sp
        lanes = sorted(n for power in _POWERS for n in (power, 3 * power))
        for placement in self._values(f"{key}.placement", ("disjoint", "colocated")):
            is_disjoint = placement == "disjoint"
            for tp, dp in itertools.product(
                self._values(f"{key}.grid.tp", _up_to(_MAX_TENSOR) if is_disjoint else (1,)),
                self._values(f"{key}.grid.dp", lanes if is_disjoint else (None,)),
            ):
                ranks = tp * dp if is_disjoint else 0
                if ranks < self.num_gpus and tp <= self.ranks_per_node:
                    grid = _grid(key, tp=tp, sp=sp and tp > 1, pp=1, dp=dp)
                    yield ranks, {f"{key}.placement": placement, **grid}

    def _language(self, ranks: int) -> Iterator[Overrides]:
        """Yield grids of the language model on these ranks, microbatch sizes and recomputing."""
        train, language, grid = self.recipe.train, language_settings(self.recipe), "language.grid"
        layers, is_fsdp = language.num_layers, self.recipe.language.engine == "fsdp"
        batches = {train.micro_batch_size}
        if self.recipe.data.tokens_per_microbatch is None:
            batches |= {1, 2, 4, 8}
        stages = range(1, 2 if is_fsdp else _MAX_STAGES + 1)
        for tp, cp, pp in itertools.product(
            self._values(f"{grid}.tp", _up_to(min(_MAX_TENSOR, self.ranks_per_node))),
            self._values(f"{grid}.cp", _up_to(1 if is_fsdp else _MAX_CONTEXT)),
            self._values(f"{grid}.pp", [n for n in stages if layers % n == 0]),
        ):
            dp, rest = divmod(ranks, tp * cp * pp)
            if rest or not dp:
                continue
            chunks = range(1, _MAX_CHUNKS + 1) if pp > 1 else (1,)
            shared_by = math.gcd(dp * cp * tp, language.routers[1] or 1)  # ranks and experts
            expert_ranks = [n for n in _up_to(_MAX_EXPERT) if shared_by % n == 0]
            for vpp, batch, recompute, ep in itertools.product(
                self._values(f"{grid}.vpp", [n for n in chunks if layers % (pp * n) == 0] or [1]),
                self._values(_BATCH, sorted(batches)),
                self._values(_RECOMPUTE, ("none", "full")),
                self._values(f"{grid}.ep", expert_ranks),
            ):
                count, rest = divmod(train.global_batch_size, batch * dp)
                if count and not rest and (vpp == 1 or count % pp == 0):
                    sizes = _grid("language", tp=tp, sp=tp > 1, cp=cp, pp=pp, vpp=vpp, ep=ep, dp=dp)
                    yield {**sizes, _BATCH: batch, _RECOMPUTE: recompute}


def _up_to(most: int) -> list[int]:
    return [power for power in _POWERS if power <= most]


def _grid(key: str, **sizes: int | None) -> Overrides:
    return {f"{key}.grid.{axis}": size for axis, size in {**sizes, "rank_offset": None}.items()}


def _ranked(space: Space, dataset: Dataset, rates: Rates) -> list[Overrides]:
    """Return all layouts, sorted by their estimated time."""
    layouts = [*space]
    for overrides in layouts:
        with suppress(RecipeError):
            recipe, layout = space.check(overrides)
            (plan,) = plans(recipe, layout, dataset, 1)
            work = StepWork(recipe, layout, dataset, rates)
            estimate = partial(_estimate, work, work.flops.of(plan), plan.num_tokens)
            return sorted(layouts, key=estimate)
    return layouts


def _estimate(
    work: StepWork, flops: Mapping[str, float], num_tokens: int, overrides: Overrides
) -> float:
    """Return a step's seconds by a closed form. flops: of a step by module."""
    recipe, rates, language, size = work.recipe, work.rates, work.language, work.size
    axes = ("tp", "cp", "pp", "vpp", "dp")
    tp, cp, pp, vpp, dp = (overrides[f"language.grid.{axis}"] for axis in axes)
    calls, recomputes = rates.call + rates.call_back, overrides[_RECOMPUTE] == "full"
    count = recipe.train.global_batch_size / (overrides[_BATCH] * dp)
    seconds_of, ends = dict[str, float](), [0.0]
    for name in flops:
        forward, backward = rates.seconds_per_flop(name)
        seconds_of[name] = flops[name] * (forward + 2 * backward) / 3
    seconds = seconds_of[LANGUAGE] * (4 / 3 if recomputes else 1)
    for name in (*recipe.encoders, *recipe.generators):
        key = dotted(recipe.key_of(name))
        if overrides[f"{key}.placement"] == "colocated":
            seconds += seconds_of[name]
            continue
        ranks = overrides[f"{key}.grid.dp"] * overrides[f"{key}.grid.tp"]
        of_calls = count * work.settings[name].num_layers * calls
        ends.append(seconds_of[name] / ranks + of_calls)
    numbers = num_tokens / (count * dp) * size  # bytes of a number for each token of a microbatch
    keys = 2 * numbers * language.num_query_groups * language.head_size / tp
    pass_of_layer = 4 * rates.collective(numbers / cp * language.hidden_size, tp, tp)
    pass_of_layer += rates.collective(keys, cp, tp * cp) + 0.5 * calls
    passes = count * language.num_layers / pp * (3 if recomputes else 2)
    seconds = seconds / (tp * cp * pp * dp) + passes * pass_of_layer
    elements = work.parts[LANGUAGE].weights.sum() * recipe.trains(LANGUAGE) / (tp * pp)
    tail = 2 * rates.collective(elements * max(4, size), dp * cp, dp * cp * tp)
    tail += elements / (dp * cp) * rates.element
    return max(*ends, seconds * (1 + (pp - 1) / (vpp * count))) + tail


def _why_refused(
    space: Space, too_large: Sequence[tuple[float, str]], refusals: Sequence[str], gpu: Gpu
) -> str:
    count = space.num_gpus
    if too_large:
        size, role = min(too_large)
        return (
            f"no layout fits {format_bytes(gpu.memory)} of {gpu.name}; the smallest needs "
            f"{format_bytes(size)} ({role}); give about {math.ceil(count * size / gpu.memory)} "
            f"GPUs, or larger ones"
        )
    if refusals:
        return f"every layout is refused, the first because: {refusals[0]}"
    nearby = range(max(1, count - _NEARBY + 1), count + _NEARBY)
    nearest = sorted(nearby, key=lambda number: abs(number - count))
    others = (f"give {n} GPUs" for n in nearest if any(replace(space, num_gpus=n)))
    batch = space.recipe.train.global_batch_size
    return (
        f"no grids tile {count} GPUs with train.global_batch_size {batch} and "
        f"{language_settings(space.recipe).num_layers} layers; "
        f"{next(others, 'fix fewer keys')}, or change the batch"
    )
