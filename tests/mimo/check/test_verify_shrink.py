"""Scaling layouts down: pure integers, against the rules themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mimo.check.layouts import recipe_cells
from mimo.check.scale import scale_recipe
from mimo.check.shrink import cover, keep_axes, lane_ratio, parallel_axes, place, shrink
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from tests.mimo.check.cells import RECIPE

AXES = ("tp", "cp", "pp", "dp")


@st.composite
def layouts(
    draw: st.DrawFn,
    cp: tuple[int, ...] = (1, 2, 4),
    max_encoders: int = 2,
    has_copies: bool = False,
    has_generators: bool = False,
) -> Layout:
    """Any layout that could be in a recipe, of up to thousands of ranks.

    has_copies: whether lanes may have copies of the weights. has_generators: whether there may be
    a generator.
    """

    def copied(grid: GridSpec) -> GridSpec:
        divisors = [n for n in range(1, grid.dp + 1) if grid.dp % n == 0 and has_copies]
        return replace(grid, dp_replicate=draw(st.sampled_from(divisors or [1])))

    pp = draw(st.sampled_from((1, 2, 3, 4, 8)))
    tp = draw(st.sampled_from((1, 2, 3, 4, 8)))
    language = GridSpec(
        LANGUAGE,
        tp=tp,
        sp=tp > 1 and draw(st.booleans()),
        cp=draw(st.sampled_from(cp)),
        pp=pp,
        vpp=draw(st.sampled_from((1, 2, 4))) if pp > 1 else 1,
        dp=draw(st.integers(1, 9)),
    )
    modules, colocated = {}, []
    for name in ("vision", "audio")[: draw(st.integers(1, max_encoders))]:
        encoder_tp = draw(st.sampled_from((1, 2, 3, 4)))
        if draw(st.booleans()):
            assume(language.size % encoder_tp == 0)
            colocated.append(name)
            grid = GridSpec(name, tp=encoder_tp, dp=language.size // encoder_tp)
        else:
            stages = draw(st.sampled_from((1, 2, 4)))
            grid = GridSpec(name, tp=encoder_tp, pp=stages, dp=draw(st.integers(1, 12)))
        modules[name] = copied(grid)
    generators = ["image"] if has_generators and draw(st.booleans()) else []
    for name in generators:  # they have lanes alone
        grid = GridSpec(name, dp=draw(st.integers(1, 12)), engine="fsdp")
        if pp == 1 and draw(st.booleans()):
            colocated.append(name)
            grid = replace(grid, dp=language.size)
        modules[name] = copied(grid)
    language = copied(language)
    names = [name for name in (*modules, LANGUAGE) if name not in colocated]
    # Any order of the disjoint modules.
    offsets = {name: number for number, name in enumerate(draw(st.permutations(names)))}
    for name in modules.keys() & offsets.keys():
        modules[name] = replace(modules[name], rank_offset=offsets[name])
    language = replace(language, rank_offset=offsets[LANGUAGE])
    return place(language, modules, colocated, draw(st.booleans()), generators)


def ratios(layout: Layout) -> dict[str, str]:
    return {n: lane_ratio(grid.dp, layout.language.dp) for n, grid in layout.item_grids.items()}


def disjoint_order(layout: Layout) -> list[str]:
    names = [name for name in layout.grids if name not in layout.colocated]
    return sorted(names, key=lambda name: layout.grids[name].rank_offset)


@given(layouts(has_copies=True, has_generators=True))
@settings(max_examples=300, deadline=None)
def test_a_shrunk_layout_keeps_every_kind_and_is_not_larger(layout: Layout) -> None:
    small = shrink(layout)
    assert small.world_size <= layout.world_size
    assert small.colocated == layout.colocated
    assert ratios(small) == ratios(layout)
    assert disjoint_order(small) == disjoint_order(layout)
    assert (small.blocks > 1) == (layout.blocks > 1)
    for name, grid in layout.grids.items():
        shrunk = small.grids[name]
        assert (shrunk.sp, shrunk.vpp > 1) == (grid.sp, grid.vpp > 1)
        kinds = [(g.dp_replicate > 1, g.dp_replicate == g.dp) for g in (shrunk, grid)]
        assert kinds[0] == kinds[1]
        assert shrunk.dp % shrunk.dp_replicate == 0
        assert [getattr(shrunk, a) > 1 for a in AXES] == [getattr(grid, a) > 1 for a in AXES]
    for name in small.colocated:
        assert small.item_grids[name].ranks == small.language.ranks
    assert shrink(small).world_size == small.world_size


@pytest.mark.parametrize(
    ("lanes", "encoder_lanes", "expected"),
    [
        (1, 1, (1, 1)),
        (6, 6, (2, 2)),
        (1, 8, (1, 2)),
        (3, 12, (2, 4)),
        (16, 1, (2, 1)),
        (16, 4, (4, 2)),
        (4, 6, (2, 3)),
        (9, 6, (3, 2)),
    ],
)
def test_lanes_become_the_fewest_with_the_same_kind_of_ratio(
    lanes: int, encoder_lanes: int, expected: tuple[int, int]
) -> None:
    encoders = {"vision": GridSpec("vision", dp=encoder_lanes)}
    small = shrink(place(GridSpec(LANGUAGE, dp=lanes), encoders, ()))
    assert (small.language.dp, small.encoders["vision"].dp) == expected


@pytest.mark.slow
@given(layouts(has_copies=True, has_generators=True), st.integers(2, 12))
@settings(max_examples=30, deadline=None)
def test_covering_layouts_fit_and_have_every_axis_and_every_pair_that_fits(
    layout: Layout, max_ranks: int
) -> None:
    axes = parallel_axes(layout)
    try:
        covered = cover(layout, max_ranks)
    except ValueError:
        # Some axis has no layout, also not in company.
        sets = [frozenset(c) for n in range(len(axes) + 1) for c in combinations(axes, n)]
        fitting = [s for s in sets if (r := keep_axes(layout, s)) and _fits(r, max_ranks)]
        assert set(axes) - set().union(*fitting) or not fitting
        return
    for part in covered.parts:
        assert part.layout.world_size <= max_ranks
        assert set(parallel_axes(part.layout)) == part.axes
    sets = [part.axes for part in covered.parts]
    assert set().union(*sets) == set(axes)
    assert not any(smaller < larger for smaller in sets for larger in sets)
    for pair in combinations(axes, 2):
        together = any({*pair} <= kept for kept in sets)
        assert together != (pair in covered.uncovered)
        alone = keep_axes(layout, frozenset(pair))
        if alone is not None and _fits(alone, max_ranks):
            assert together


def _fits(layout: Layout, max_ranks: int) -> bool:
    return shrink(layout).world_size <= max_ranks


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    """With two encoders of different media."""
    second = "encoders.audio={family: qwen_vl, media: audio, placeholder: '<|audio_pad|>', model: "
    sizes = "{num_layers: 9, hidden_size: 5120, ffn_hidden_size: 13824, num_attention_heads: 40}}"
    return load_recipe(RECIPE, [second + sizes])


# Without cp: recipes cannot use it yet.
@given(layout=layouts(cp=(1,)), run_ahead=st.sampled_from(("auto", 40)))
@settings(max_examples=60, deadline=None)
def test_the_scaled_recipe_is_accepted_on_the_shrunk_layout(
    recipe: Recipe, layout: Layout, run_ahead: int | str
) -> None:
    encoders = {
        name: recipe.encoders[name].model_copy(update={"run_ahead": run_ahead})
        for name in layout.encoders
    }
    ahead = recipe.model_copy(update={"encoders": encoders})
    small = shrink(layout)
    # Builds the layout from the recipe's keys and compares; families check their sizes.
    scaled = scale_recipe(ahead, small, Path("never-written"), "fp32")
    assert scaled.recipe.data.tokenizer.startswith("never-written")
    assert scaled.layout == small


def test_a_recipe_of_72_billion_parameters_and_without_its_data_is_scaled_down() -> None:
    large = [
        "language.model={num_layers: 80, hidden_size: 8192, ffn_hidden_size: 29568, "
        "num_attention_heads: 64, num_query_groups: 8, head_size: 128, "
        "mrope_section: [24, 20, 20]}",
        "language.grid={tp: 8, sp: true, pp: 4, dp: 4}",
        "encoders.vision.grid={tp: 2, dp: 8}",
        "train.global_batch_size=256",
        "data.tokenizer=/no/such/tokenizer",
        "data.sources=[{path: /no/such/shards}]",
    ]
    cells = recipe_cells(load_recipe(RECIPE, large), 8, full=False)
    assert "language tp8 sp pp4 dp4" in cells.notes[0]
    assert all(cell.layout.world_size <= 8 for cell in cells.cells)
    assert len(cells.cells) > 1
    for cell in cells.cells:
        assert any(note.startswith(f"  {cell.name}: vision ") for note in cells.notes)
    scaled = scale_recipe(cells.cells[0].recipe, cells.cells[0].layout, Path("never"), "fp32")
    model = scaled.recipe.language.model
    assert model["num_attention_heads"] == 2 * model["num_query_groups"]
    assert (model["head_size"], model["mrope_section"]) == (8, [2, 1, 1])
    assert model["tie_word_embeddings"] is False
    assert model["hidden_size"] <= 64
    # On its own 144 ranks the model is as small.
    (whole,) = recipe_cells(load_recipe(RECIPE, large), 8, full=True).cells
    assert whole.layout.world_size == 8 * 4 * 4 + 16
    scaled = scale_recipe(whole.recipe, whole.layout, Path("never"), "fp32")
    assert scaled.recipe.language.model["num_attention_heads"] == 16
