"""Search the layouts of a recipe on a number of GPUs: `mimo plan`.

A closed form ranks all layouts that tile the GPUs. In this order they are checked, as by `mimo
check`, and pruned by the memory formula. The first that remain are simulated over the data.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mimo.config.schema import Recipe
from mimo.errors import InputError, RecipeError, format_bytes
from mimo.families.registry import language_settings, module_settings
from mimo.model.dataset import Dataset
from mimo.model.memory import memory_by_role
from mimo.model.recipe_checks import check_recipe
from mimo.model.step_plan import StepFlops
from mimo.parallel.grids import LANGUAGE, Layout, num_microbatches, run_ahead
from mimo.plan.forecast import Forecast, forecast, plans
from mimo.plan.rates import Gpu, Rates
from mimo.plan.work import StepWork

Overrides = Mapping[str, Any]

_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_NUM_SIMULATED, _QUICK_STEPS = 48, 2
_NUM_BEST, _STEPS = 5, 16
_MAX_STAGES, _MAX_CHUNKS, _MAX_CONTEXT = 16, 4, 8
_NEARBY = 16  # numbers of GPUs that an error message tries, up and down
_MIN_GAIN = 0.005  # of a step's time, to accept a longer run-ahead, which takes memory
_RECOMPUTE = "language.recompute"
_LANGUAGE_KEYS = ("tp", "cp", "pp", "vpp", "ep")


@dataclass(frozen=True)
class Choice:
    """A layout with its forecast. memory, role: bytes and role of the rank that needs most."""

    overrides: Overrides
    recipe: Recipe
    layout: Layout
    forecast: Forecast
    memory: float
    role: str


@dataclass(frozen=True)
class SearchResult:
    """Layouts, best first. counts: numbers of layouts ranked, refused, too large, simulated."""

    choices: Sequence[Choice]
    counts: Mapping[str, int]


def searched_keys(recipe: Recipe) -> list[str]:
    """Return the keys that the search sets and `--fix` accepts."""
    keys = ["train.micro_batch_size", _RECOMPUTE]
    keys += [f"language.grid.{axis}" for axis in _LANGUAGE_KEYS]
    for name in (*recipe.encoders, *recipe.generators):
        prefix = _key(recipe, name)
        keys += [f"{prefix}.placement", f"{prefix}.grid.tp", f"{prefix}.grid.dp"]
    return keys + [f"encoders.{name}.run_ahead" for name in recipe.encoders]


def search(
    recipe: Recipe, dataset: Dataset, rates: Rates, gpu: Gpu, num_gpus: int, fixed: Overrides
) -> SearchResult:
    """Return the best layouts on exactly ``num_gpus``. Raises InputError if there is none."""
    space = Space(recipe, num_gpus, rates.ranks_per_node, fixed)
    ranked = _ranked(space, dataset, rates)
    counts = {"ranked": len(ranked), "refused": 0, "too large": 0}
    fitting, smallest, refusal = list[Choice](), None, ""
    simulated = set[tuple[tuple[str, Any], ...]]()
    for overrides in ranked:
        rest = tuple((key, value) for key, value in overrides.items() if key != _RECOMPUTE)
        if rest in simulated:  # already, without recomputing, which only costs time
            continue
        try:
            candidate, layout = space.check(overrides)
        except RecipeError as error:
            counts["refused"] += 1
            refusal = refusal or error.problems[0]
            continue
        memory = largest_rank(candidate, layout)
        if memory[0] > gpu.memory:
            counts["too large"] += 1
            smallest = min(
                smallest or (*memory, overrides), (*memory, overrides), key=operator.itemgetter(0)
            )
            continue
        result = forecast(candidate, layout, dataset, rates, _QUICK_STEPS)
        fitting.append(Choice(overrides, candidate, layout, result, *memory))
        simulated.add(rest)
        if len(simulated) == _NUM_SIMULATED:
            break
    counts["simulated"] = len(simulated)
    if not fitting:
        raise InputError(_no_layout_message(space, smallest, refusal, gpu))
    best = sorted(fitting, key=_seconds)[:_NUM_BEST]
    final = [_with_best_run_ahead(space, choice, dataset, rates, gpu) for choice in best]
    return SearchResult(sorted(final, key=_seconds), counts)


def largest_rank(recipe: Recipe, layout: Layout) -> tuple[float, str]:
    """Return the bytes of the rank that needs most, over all its modules, and its role."""
    roles = memory_by_role(recipe, layout)
    colocated = sum(role.total for role in roles if role.module in layout.colocated)
    others = [role for role in roles if role.module not in layout.colocated]
    return max((r.total + colocated * (r.module == LANGUAGE), r.role) for r in others)


def _seconds(choice: Choice) -> float:
    return choice.forecast.percentile(50)


def _with_best_run_ahead(
    space: Space, choice: Choice, dataset: Dataset, rates: Rates, gpu: Gpu
) -> Choice:
    """Forecast the choice over more steps, with a longer run-ahead where it helps and fits."""
    recipe, layout = choice.recipe, choice.layout
    whole = forecast(recipe, layout, dataset, rates, _STEPS)
    choice = replace(choice, forecast=whole)
    for name in recipe.encoders.keys() - layout.colocated:
        key = f"encoders.{name}.run_ahead"
        longer = 2 * run_ahead(recipe, layout, name)
        if key in space.fixed or longer > num_microbatches(recipe, layout):
            continue
        overrides = {**choice.overrides, key: longer}
        candidate, _ = space.check(overrides)
        memory = largest_rank(candidate, layout)
        result = forecast(candidate, layout, dataset, rates, _STEPS)
        gains = result.percentile(50) < (1 - _MIN_GAIN) * _seconds(choice)
        if gains and memory[0] <= gpu.memory:
            choice = Choice(overrides, candidate, layout, result, *memory)
    return choice


class Space:
    """All layouts of a recipe on ``num_gpus``, as overrides. fixed: values that stay, by key."""

    def __init__(
        self, recipe: Recipe, num_gpus: int, ranks_per_node: int, fixed: Overrides
    ) -> None:
        self.recipe, self.num_gpus, self.fixed = recipe, num_gpus, fixed
        self.ranks_per_node = ranks_per_node
        self.language = language_settings(recipe)
        self.item_modules = [*recipe.encoders, *recipe.generators]
        self._data = recipe.model_dump(mode="json")

    def check(self, overrides: Overrides) -> tuple[Recipe, Layout]:
        """Return the recipe with the overrides, and its layout. Raises RecipeError."""
        data = self._data
        for key, value in overrides.items():
            data = _with_value(data, key.split("."), value)
        try:
            recipe = Recipe.model_validate(data)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        return recipe, check_recipe(recipe, self.num_gpus)

    def _values(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        fixed = self.fixed.get(key)
        return values if fixed is None else (fixed,)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for places in itertools.product(*map(self._placements, self.item_modules)):
            left = self.num_gpus - sum(ranks for ranks, _ in places)
            shared = {key: value for _, part in places for key, value in part.items()}
            if left > 0:
                yield from (shared | own for own in self._language(left))

    def _placements(self, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the placements of an encoder or generator: ranks of its own, and overrides.

        Numbers of disjoint lanes are powers of two, and three times these.
        """
        key, sp = _key(self.recipe, name), self.recipe.module(name).grid.sp
        fixed = {k: v for k, v in self.fixed.items() if k == f"{key}.run_ahead"}
        lanes = sorted(n for power in _POWERS for n in (power, 3 * power))
        for placement in self._values(f"{key}.placement", ("disjoint", "colocated")):
            is_disjoint = placement == "disjoint"
            for tp, dp in itertools.product(
                self._values(f"{key}.grid.tp", (1, 2, 4, 8) if is_disjoint else (1,)),
                self._values(f"{key}.grid.dp", lanes if is_disjoint else (None,)),
            ):
                ranks = tp * dp if is_disjoint else 0
                if ranks < self.num_gpus and tp <= self.ranks_per_node:
                    grid = {"tp": tp, "sp": sp and tp > 1, "pp": 1, "dp": dp, "rank_offset": None}
                    sizes = {f"{key}.grid.{axis}": size for axis, size in grid.items()}
                    yield ranks, {f"{key}.placement": placement, **sizes, **fixed}

    def _language(self, ranks: int) -> Iterator[dict[str, Any]]:
        train, grid = self.recipe.train, "language.grid"
        layers, is_fsdp = self.language.num_layers, self.recipe.language.engine == "fsdp"
        batches: Sequence[int] = sorted({1, 2, 4, 8, train.micro_batch_size})
        if self.recipe.data.tokens_per_microbatch is not None:
            batches = (train.micro_batch_size,)
        stages = [
            n for n in range(1, _MAX_STAGES + 1) if layers % n == 0 and not (is_fsdp and n > 1)
        ]
        contexts = (1,) if is_fsdp else [n for n in _POWERS if n <= _MAX_CONTEXT]
        tensors = [n for n in _POWERS if n <= min(8, self.ranks_per_node)]
        for tp, cp, pp in itertools.product(
            self._values(f"{grid}.tp", tensors),
            self._values(f"{grid}.cp", contexts),
            self._values(f"{grid}.pp", stages),
        ):
            dp, rest = divmod(ranks, tp * cp * pp)
            if rest or not dp:
                continue
            chunks = [n for n in range(1, _MAX_CHUNKS + 1) if layers % (pp * n) == 0 and pp > 1]
            for vpp, batch, recompute, ep in itertools.product(
                self._values(f"{grid}.vpp", chunks or (1,)),
                self._values("train.micro_batch_size", batches),
                self._values(_RECOMPUTE, ("none", "full")),
                self._values(f"{grid}.ep", self._expert_ranks(dp * cp * tp)),
            ):
                count, rest = divmod(train.global_batch_size, batch * dp)
                if rest or not count or (vpp > 1 and count % pp):
                    continue
                yield {
                    **{f"{grid}.tp": tp, f"{grid}.sp": tp > 1, f"{grid}.cp": cp, f"{grid}.pp": pp},
                    **{f"{grid}.vpp": vpp, f"{grid}.ep": ep, f"{grid}.dp": dp},
                    f"{grid}.rank_offset": None,
                    "train.micro_batch_size": batch,
                    _RECOMPUTE: recompute,
                }

    def _expert_ranks(self, ranks: int) -> Sequence[int]:
        experts = self.language.routers[1]
        if not experts:
            return (1,)
        return [n for n in _POWERS if ranks % n == 0 and experts % n == 0 and n <= 64]


def _key(recipe: Recipe, module: str) -> str:
    return ".".join(map(str, recipe.key_of(module)))


def _with_value(data: Mapping[str, Any], key: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of nested data with a value set; the rest is shared."""
    first, *rest = key
    inner = _with_value(data.get(first) or {}, rest, value) if rest else value
    return {**data, first: inner}


def _ranked(space: Space, dataset: Dataset, rates: Rates) -> list[dict[str, Any]]:
    """Return all layouts, sorted by their estimated time."""
    layouts = [*space]
    for overrides in layouts:
        try:
            recipe, layout = space.check(overrides)
        except RecipeError:
            continue
        estimate = _Estimate(recipe, layout, dataset, rates)
        return sorted(layouts, key=lambda overrides: estimate.seconds(overrides))
    return layouts


class _Estimate:
    """Estimate of a step's time by a closed form, from a planned step's FLOPs and tokens."""

    def __init__(self, recipe: Recipe, layout: Layout, dataset: Dataset, rates: Rates) -> None:
        (plan,) = plans(recipe, layout, dataset, 1)
        flops = StepFlops(recipe, dataset.readers[0].chat.vocab_size, dataset).of(plan)
        self.recipe, self.rates, self.tokens = recipe, rates, plan.num_tokens
        self.seconds_of = {}
        for name, count in flops.items():
            first, back = rates.seconds_per_flop(name)
            self.seconds_of[name] = count * (first + 2 * back) / 3
        self.calls = rates.call + rates.call_back  # of a layer, forward and backward
        self.language = language_settings(recipe)
        self.layers = {name: module_settings(recipe, name).num_layers for name in flops}
        work = StepWork(recipe, layout, dataset, rates)
        self.size, self.wide = work.size, max(4, work.size)
        self.weights = work.parts[LANGUAGE].weights.sum()

    def seconds(self, overrides: Overrides) -> float:
        """Return the estimated seconds of a step."""
        grid = {axis: overrides[f"language.grid.{axis}"] for axis in (*_LANGUAGE_KEYS, "dp")}
        tp, cp, pp, vpp, dp = (grid[axis] for axis in ("tp", "cp", "pp", "vpp", "dp"))
        ranks, recompute = tp * cp * pp * dp, overrides[_RECOMPUTE] == "full"
        count = self.recipe.train.global_batch_size / (overrides["train.micro_batch_size"] * dp)
        work = self.seconds_of[LANGUAGE] * (4 / 3 if recompute else 1) / ranks
        tokens = self.tokens / (count * dp) / cp
        layers = self.layers[LANGUAGE] / pp
        hidden = tokens * self.language.hidden_size * self.size
        passes = count * layers * (3 if recompute else 2)
        work += passes * (4 * self.rates.collective(hidden, tp, tp) + 0.5 * self.calls)
        keys = 2 * tokens * cp * self.language.num_query_groups * self.language.head_size
        work += passes * self.rates.collective(keys * self.size / tp, cp, tp * cp)
        times = [0.0]
        for name in (*self.recipe.encoders, *self.recipe.generators):
            key = _key(self.recipe, name)
            if overrides[f"{key}.placement"] == "colocated":
                work += self.seconds_of[name] / ranks
            else:
                lanes = overrides[f"{key}.grid.dp"]
                calls = count * self.layers[name] * self.calls
                times.append(self.seconds_of[name] / (lanes * overrides[f"{key}.grid.tp"]) + calls)
        elements = self.weights / (tp * pp) * self.recipe.trains(LANGUAGE)
        ranks = dp * cp
        tail = 2 * self.rates.collective(elements * self.wide, ranks, ranks * tp)
        tail += elements / ranks * self.rates.element
        return max(*times, work * (1 + (pp - 1) / (vpp * count))) + tail


def _no_layout_message(
    space: Space, smallest: tuple[float, str, Overrides] | None, refusal: str, gpu: Gpu
) -> str:
    count = space.num_gpus
    if smallest is not None:
        size, role, overrides = smallest
        layout = " ".join(f"{k}={v}" for k, v in overrides.items() if k.startswith("language.grid"))
        return (
            f"--gpus {count}: no layout fits {format_bytes(gpu.memory)} of {gpu.name}; the "
            f"smallest needs {format_bytes(size)} ({role}, with {layout}); give about "
            f"{math.ceil(count * size / gpu.memory)} GPUs, or larger ones"
        )
    if refusal:
        return f"--gpus {count}: every layout is refused, the first because: {refusal}"
    nearby = [n for k in range(1, _NEARBY) for n in (count - k, count + k) if n > 0]
    spaces = {n: Space(space.recipe, n, space.ranks_per_node, space.fixed) for n in nearby}
    nearest = next(
        (f"give {n} GPUs" for n, other in spaces.items() if any(other)), "fix fewer keys"
    )
    batch, layers = space.recipe.train.global_batch_size, space.language.num_layers
    return (
        f"--gpus {count}: no grids tile {count} GPUs with train.global_batch_size {batch} and "
        f"{layers} layers; {nearest}, or change the batch"
    )
