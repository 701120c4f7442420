"""The search finds the best layouts of a plain loop over all, and keeps fixed values."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from mimo.model.memory import memory_by_role
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.plan import search as searching
from mimo.plan.forecast import forecast
from mimo.plan.rates import GPUS, Gpu, Rates, rates_of_gpu
from mimo.plan.search import SearchResult, Space, search, searched_keys
from tests.cases import quick_values
from tests.mimo import tiny

H100 = GPUS["h100"]
ASSUMED = rates_of_gpu(H100, 8)
# Work takes most of the time, so lanes of the tower and balance matter; messages cost time too.
BUSY = Rates("busy", {"": 1e-9}, {"": 1e-9}, 1e-4, 2e-4, 1e-8, node=1e8, network=1e7, latency=1e-5)
LAYERS = ["language.model.num_layers=4", "train.steps=2"]
AUTO = {"encoders.vision.run_ahead": "auto"}


@pytest.fixture(autouse=True)
def _simulate_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_NUM_SIMULATED", 10**9)


def searched(
    folder: Path,
    num_gpus: int,
    fixed: Mapping[str, Any],
    *overrides: str,
    gpu: Gpu = H100,
    rates: Rates = ASSUMED,
) -> SearchResult:
    """Search, and check every returned layout: it is valid, fits and keeps fixed values."""
    recipe = load_recipe(folder / "tiny.yaml", [*LAYERS, *overrides])
    result = search(recipe, tiny.open_sources(recipe), rates, gpu, num_gpus, fixed)
    for choice in result.choices:
        texts = [f"{key}={'null' if v is None else v}" for key, v in choice.overrides.items()]
        again = load_recipe(folder / "tiny.yaml", [*LAYERS, *overrides, *texts])
        layout = check_recipe(again, num_gpus)
        assert layout == choice.layout
        assert num_gpus == len({r for grid in layout.grids.values() for r in grid.ranks})
        assert memory_of(again, layout) == choice.memory <= gpu.memory
        assert fixed.items() <= choice.overrides.items()
    return result


def memory_of(recipe: Recipe, layout: Layout) -> float:
    """Return the bytes of the rank that needs most, over all its modules."""
    roles = memory_by_role(recipe, layout)
    ranks = range(layout.world_size)
    return max(sum(role.total for role in roles if rank in role.ranks) for rank in ranks)


def brute_force(folder: Path, num_gpus: int) -> Iterator[tuple[Recipe, Layout]]:
    """Yield every layout of the tiny recipe on these GPUs, by loops over its keys."""
    towers = [("colocated", 1, None)]
    towers += [("disjoint", tp, dp) for tp in (1, 2, 4) for dp in range(1, num_gpus)]
    for (placement, tower_tp, tower_dp), tp, cp, pp, vpp, dp, batch in product(
        towers, (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), range(1, num_gpus + 1), (1, 2, 4, 8)
    ):
        tower_ranks = tower_tp * tower_dp if tower_dp is not None else 0
        if tower_ranks + tp * cp * pp * dp != num_gpus or (vpp > 1 and pp == 1) or 4 % (pp * vpp):
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
            recipe = load_recipe(folder / "tiny.yaml", overrides)
            yield recipe, check_recipe(recipe, num_gpus)
        except RecipeError:
            continue


def shape(layout: Layout) -> tuple[Any, ...]:
    grids = [(g.tp, g.sp, g.cp, g.pp, g.vpp, g.dp) for g in layout.grids.values()]
    return (*grids, layout.colocated)


WORLDS = {
    f"{num_gpus} GPUs, {name}": (num_gpus, rates)
    for num_gpus in (2, 3, 4, 6)
    for name, rates in (("assumed", ASSUMED), ("busy", BUSY))
}


@pytest.mark.parametrize("world", quick_values(WORLDS, "2 GPUs, assumed", "3 GPUs, busy"))
def test_the_best_layouts_are_those_of_brute_force(folder: Path, world: tuple[int, Rates]) -> None:
    num_gpus, rates = world
    dataset = tiny.open_sources(load_recipe(folder / "tiny.yaml"))
    every = brute_force(folder, num_gpus)
    times = [forecast(*layout, dataset, rates).percentile(50) for layout in every]
    result = searched(folder, num_gpus, AUTO, rates=rates)
    best = [choice.forecast.percentile(50) for choice in result.choices]
    assert best == pytest.approx(sorted(times)[: len(best)])
    # The search does not try a tower of five GPUs; otherwise it simulates all layouts.
    assert num_gpus == 6 or result.counts["simulated"] == len(times)


@pytest.mark.parametrize(
    "fixed",
    [
        {"language.grid.pp": 2, "language.grid.vpp": 2},
        {"encoders.vision.placement": "colocated", "encoders.vision.grid.dp": 2}
        | {"encoders.vision.grid.tp": 2},
        {"encoders.vision.placement": "disjoint", "encoders.vision.grid.dp": 3},
        {"train.micro_batch_size": 3, "language.recompute": "selective"},
        {"encoders.vision.placement": "disjoint", "encoders.vision.run_ahead": 3},
    ],
)
def test_a_fixed_key_has_its_value_in_every_layout(folder: Path, fixed: dict[str, Any]) -> None:
    recipe = searched(folder, 4, fixed).choices[0].recipe
    assert fixed.keys() <= {*searched_keys(recipe)}


def test_the_grid_of_the_recipe_does_not_narrow_the_search(folder: Path) -> None:
    grid = "encoders.vision.grid={tp: 2, sp: true, pp: 2, dp: 1, rank_offset: 4}"
    free, given = searched(folder, 3, {}), searched(folder, 3, {}, grid)
    assert given.counts == free.counts
    assert [shape(c.layout) for c in given.choices] == [shape(c.layout) for c in free.choices]


# Layers that take more memory than the vocabulary.
WIDE = "language.model.ffn_hidden_size=4096"


def sizes_of(folder: Path, fixed: Mapping[str, Any]) -> dict[tuple[Any, ...], float]:
    """Return the memory of all layouts on three GPUs, by the items of their overrides."""
    space = Space(load_recipe(folder / "tiny.yaml", [*LAYERS, WIDE]), 3, 8, fixed)
    return {tuple(o.items()): memory_of(*space.check(o)) for o in space}


def test_a_gpu_too_small_for_one_stage_forces_two(folder: Path) -> None:
    fixed = {f"language.grid.{axis}": 1 for axis in ("tp", "cp")}
    fixed |= {"encoders.vision.placement": "disjoint", "encoders.vision.grid.dp": 1}
    sizes = sizes_of(folder, fixed).items()
    least = {pp: min(m for o, m in sizes if ("language.grid.pp", pp) in o) for pp in (1, 2)}
    assert any(c.layout.language.pp == 1 for c in searched(folder, 3, fixed, WIDE).choices)
    result = searched(folder, 3, fixed, WIDE, gpu=replace(H100, memory=(least[1] + least[2]) / 2))
    assert {choice.layout.language.pp for choice in result.choices} == {2}
    assert result.counts["too large"] >= sum(("language.grid.pp", 1) in o for o, _ in sizes)


def test_recomputing_is_chosen_only_where_a_layout_does_not_fit_without(folder: Path) -> None:
    fixed = {"encoders.vision.placement": "colocated", "language.grid.cp": 1}
    sizes = sizes_of(folder, fixed)
    chosen = set[str]()
    for memory in np.quantile([*sizes.values()], [0, 0.25, 0.5, 1]).tolist():
        gpu = replace(H100, memory=memory)
        for choice in searched(folder, 3, fixed, WIDE, gpu=gpu).choices:
            without = tuple({**choice.overrides, "language.recompute": "none"}.items())
            fits = sizes[without] <= memory
            assert choice.overrides["language.recompute"] == ("none" if fits else "full")
            chosen.add(choice.recipe.language.recompute)
    assert chosen == {"none", "full"}
