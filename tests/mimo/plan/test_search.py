"""The search's best layout is that of a plain loop over all of them, and keeps what is fixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.errors import InputError, RecipeError
from mimo.model.dataset import Dataset
from mimo.model.memory import memory_by_role
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.plan import search as searching
from mimo.plan.forecast import forecast
from mimo.plan.gpus import GPUS, Gpu
from mimo.plan.rates import Rates, rates_of_gpu
from mimo.plan.search import Choice, Found, Space, search, searched_keys
from tests.cases import quick, quick_values
from tests.mimo import drawings, tiny

H100 = GPUS["h100"]
ASSUMED = rates_of_gpu(H100, 8)
# Work takes most of the time, so that lanes of the tower and balance matter; and messages count.
BUSY = Rates("busy", {"": 1e-9}, {"": 1e-9}, 1e-4, 1e-8, node=1e8, network=1e7, latency=1e-5)
LAYERS = ["language.model.num_layers=4", "train.steps=2"]
AUTO = {"encoders.vision.run_ahead": "auto"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    tiny.write_samples(folder)
    return tiny.write_recipe(folder)


@pytest.fixture(autouse=True)
def _nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_SIMULATED", 10**9)


def searched(
    path: Path,
    num_gpus: int,
    fixed: Mapping[str, Any],
    *overrides: str,
    gpu: Gpu = H100,
    rates: Rates = ASSUMED,
) -> Found:
    """Search, and check what holds of every layout that a search returns."""
    recipe = load_recipe(path, [*LAYERS, *overrides])
    found = search(recipe, tiny.open_sources(recipe), rates, gpu, num_gpus, fixed)
    times = [choice.forecast.percentile(50) for choice in found.choices]
    assert times == sorted(times)
    for choice in found.choices:
        texts = [f"{key}={'null' if v is None else v}" for key, v in choice.overrides.items()]
        again = load_recipe(path, [*LAYERS, *overrides, *texts])
        layout = check_recipe(again, num_gpus)
        assert layout == choice.layout
        assert layout.world_size == num_gpus == len({*ranks_of(layout)})
        assert memory_of(again, layout) == choice.memory <= gpu.memory
        assert fixed.items() <= choice.overrides.items()
    return found


def ranks_of(layout: Layout) -> Iterator[int]:
    for grid in layout.grids.values():
        yield from grid.ranks


def memory_of(recipe: Recipe, layout: Layout) -> float:
    return max(role.total for role in memory_by_role(recipe, layout))


def brute_force(path: Path, num_gpus: int) -> Iterator[tuple[Recipe, Layout]]:
    """Yield every layout of the tiny recipe on these GPUs, by loops over its keys."""
    towers = [("colocated", 1, None)]
    towers += [("disjoint", tp, dp) for tp in (1, 2, 4) for dp in range(1, num_gpus)]
    for (placement, tower_tp, tower_dp), tp, cp, pp, vpp, dp, batch in product(
        towers, (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), range(1, num_gpus + 1), (1, 2, 4, 8)
    ):
        own = tower_tp * tower_dp if tower_dp is not None else 0
        if own + tp * cp * pp * dp != num_gpus or (vpp > 1 and pp == 1) or 4 % (pp * vpp):
            continue
        overrides = [
            *LAYERS,
            f"encoders.vision.placement={placement}",
            f"encoders.vision.grid={{tp: {tower_tp}, dp: {tower_dp or 'null'}}}",
            f"language.grid={{tp: {tp}, cp: {cp}, pp: {pp}, vpp: {vpp}, dp: {dp}}}",
            f"language.grid.sp={str(tp > 1).lower()}",
            f"train.micro_batch_size={batch}",
        ]
        try:
            recipe = load_recipe(path, overrides)
            yield recipe, check_recipe(recipe, num_gpus)
        except RecipeError:
            continue


def shape(layout: Layout) -> tuple[Any, ...]:
    grids = [(g.tp, g.sp, g.cp, g.pp, g.vpp, g.dp) for g in layout.grids.values()]
    return (*grids, layout.colocated)


WORLDS = {
    f"{num_gpus} GPUs, {rates.name}": (num_gpus, rates)
    for num_gpus in (2, 3, 4, 6)
    for rates in (ASSUMED, BUSY)
}


@pytest.mark.parametrize(
    "world", quick_values(WORLDS, "2 GPUs, h100", "3 GPUs, busy", "4 GPUs, busy")
)
def test_the_best_layout_is_that_of_a_loop_over_all(path: Path, world: tuple[int, Rates]) -> None:
    num_gpus, rates = world
    dataset = tiny.open_sources(load_recipe(path))
    times, shapes = [], set[Any]()
    for recipe, layout in brute_force(path, num_gpus):
        times.append(forecast(recipe, layout, dataset, rates).percentile(50))
        shapes.add((shape(layout), recipe.train.micro_batch_size))
    found = searched(path, num_gpus, AUTO, rates=rates)
    assert len(shapes) == len(times)
    best = [choice.forecast.percentile(50) for choice in found.choices]
    assert best == pytest.approx(sorted(times)[: len(best)])
    # Five GPUs for a tower is no size that the search tries; otherwise it simulates all.
    assert found.counts["simulated"] <= len(times)
    assert num_gpus == 6 or found.counts["simulated"] == len(times)


def test_a_longer_run_ahead_is_taken_where_it_helps(path: Path) -> None:
    fixed = {"encoders.vision.placement": "disjoint", "train.micro_batch_size": 1}
    fixed |= {f"language.grid.{axis}": 1 for axis in ("tp", "cp", "pp")}
    # The tower has little to do in a microbatch of text, much in one of images.
    rates = replace(BUSY, forward={"vision": 2e-8, "": 1e-9}, backward={"vision": 2e-8, "": 1e-9})
    texts = [*LAYERS, "language.grid.dp=1", *(f"{k}={v}" for k, v in fixed.items())]
    times = list[float]()
    for ahead in ("auto", 2):
        recipe = load_recipe(path, [*texts, f"encoders.vision.run_ahead={ahead}"])
        made = forecast(recipe, check_recipe(recipe, 2), tiny.open_sources(recipe), rates)
        times.append(made.percentile(50))
    assert times[1] < 0.995 * times[0]
    (longer,) = searched(path, 2, fixed, rates=rates).choices
    assert longer.overrides["encoders.vision.run_ahead"] == 2
    assert longer.forecast.percentile(50) == pytest.approx(times[1])
    (shorter,) = searched(path, 2, {**fixed, **AUTO}, rates=rates).choices
    assert shorter.forecast.percentile(50) == pytest.approx(times[0])


@pytest.mark.parametrize(
    "fixed",
    [
        {"language.grid.tp": 2},
        {"language.grid.pp": 2, "language.grid.vpp": 2},
        {"encoders.vision.placement": "colocated", "encoders.vision.grid.dp": 2}
        | {"encoders.vision.grid.tp": 2},
        {"encoders.vision.placement": "disjoint", "encoders.vision.grid.dp": 3},
        {"train.micro_batch_size": 3, "language.recompute": "selective"},
        {"encoders.vision.placement": "disjoint", "encoders.vision.run_ahead": 3},
    ],
    ids=lambda fixed: "-".join(key.split(".")[-1] for key in fixed),
)
def test_a_fixed_key_has_its_value_in_every_layout(path: Path, fixed: dict[str, Any]) -> None:
    found = searched(path, 4, fixed)
    recipe = found.choices[0].recipe
    assert fixed.keys() <= {*searched_keys(recipe)}
    for choice in found.choices:
        data = choice.recipe.model_dump(mode="json")
        for key, value in fixed.items():
            inner = data
            for name in key.split("."):
                inner = inner[name]
            assert inner == value


GRIDS = ("{tp: 2, sp: true, dp: 1}", "{pp: 2, dp: 1}", "{tp: 2, dp: 1, rank_offset: 4}")


@pytest.mark.parametrize("grid", quick(GRIDS, GRIDS[0]))
def test_the_grid_of_the_recipe_does_not_narrow_the_search(path: Path, grid: str) -> None:
    free = searched(path, 3, {})
    given = searched(path, 3, {}, f"encoders.vision.grid={grid}", "language.grid.dp=2")
    assert given.counts == free.counts
    assert [shape(c.layout) for c in given.choices] == [shape(c.layout) for c in free.choices]


def test_generators_are_placed_too(tmp_path: Path) -> None:
    path = drawings.write_recipe(tmp_path)
    found = searched(path, 3, {}, drawings.GENERATOR, "train.global_batch_size=8")
    places = {choice.overrides["generators.image.placement"] for choice in found.choices}
    assert places <= {"disjoint", "colocated"}
    assert all("image" in choice.layout.generators for choice in found.choices)


# ------------------------------------------------------------------------------- memory


# Layers that take more than the vocabulary.
WIDE = "language.model.ffn_hidden_size=4096"


def all_choices(path: Path, num_gpus: int, fixed: Mapping[str, Any]) -> list[tuple[Any, float]]:
    """Return overrides and memory of all layouts that pass their check."""
    space, sizes = Space(load_recipe(path, [*LAYERS, WIDE]), num_gpus, 8, fixed), []
    for overrides in space:
        try:
            sizes.append((overrides, memory_of(*space.check(overrides))))
        except RecipeError:
            continue
    return sizes


def gpu_of(memory: float) -> Gpu:
    return Gpu("small", memory, 1e12, 1e9, 1e9)


def test_a_gpu_too_small_for_one_stage_forces_two(path: Path) -> None:
    fixed = {f"language.grid.{axis}": 1 for axis in ("tp", "cp")}
    fixed |= {"encoders.vision.placement": "disjoint", "encoders.vision.grid.dp": 1}
    every = all_choices(path, 3, fixed)
    least = {pp: min(m for o, m in every if o["language.grid.pp"] == pp) for pp in (1, 2)}
    assert least[2] < least[1]
    assert any(c.layout.language.pp == 1 for c in searched(path, 3, fixed, WIDE).choices)
    found = searched(path, 3, fixed, WIDE, gpu=gpu_of((least[1] + least[2]) / 2))
    assert {choice.layout.language.pp for choice in found.choices} == {2}
    assert found.counts["too large"] >= sum(o["language.grid.pp"] == 1 for o, _ in every)


def test_recomputing_is_chosen_only_where_a_layout_does_not_fit_without(path: Path) -> None:
    fixed = {"encoders.vision.placement": "colocated", "language.grid.cp": 1}
    every = all_choices(path, 3, fixed)
    sizes = {tuple(overrides.items()): memory for overrides, memory in every}
    ends = sorted(sizes.values())
    chosen = set[str]()
    for memory in (ends[0], ends[len(ends) // 4], ends[len(ends) // 2], ends[-1]):
        found = searched(path, 3, fixed, WIDE, gpu=gpu_of(memory))
        for choice in found.choices:
            without = tuple({**choice.overrides, "language.recompute": "none"}.items())
            fits = sizes[without] <= memory
            assert choice.overrides["language.recompute"] == ("none" if fits else "full")
            chosen.add(choice.recipe.language.recompute)
    assert chosen == {"none", "full"}


def test_where_nothing_fits_the_smallest_layout_and_enough_gpus_are_named(path: Path) -> None:
    least = min(memory for _, memory in all_choices(path, 2, {}))
    recipe = load_recipe(path, [*LAYERS, WIDE])
    dataset: Dataset = tiny.open_sources(recipe)
    with pytest.raises(InputError, match=r"--gpus 2: no layout fits .* give about (\d+) GPUs"):
        search(recipe, dataset, ASSUMED, gpu_of(least - 1), 2, {})
    choice: Choice = searched(path, 2, {}, WIDE, gpu=gpu_of(least)).choices[0]
    assert choice.memory == least
