from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from mimo.parallel.build import build_layout
from mimo.parallel.grids import GridSpec, Layout, num_microbatches, run_ahead
from tests.mimo.config.test_recipe import RECIPE

SIZE = st.integers(1, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


def ranks(layout: Layout) -> dict[str, tuple[int, int]]:
    return {name: (grid.ranks[0], grid.ranks[-1]) for name, grid in layout.grids.items()}


def problems(recipe: Recipe, world_size: int | None = None) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        build_layout(recipe, world_size)
    return str(caught.value).splitlines()


def test_a_grid_lists_its_ranks_with_tp_fastest_then_cp_dp_pp() -> None:
    grid = GridSpec("language", tp=2, cp=2, dp=2, pp=2, rank_offset=10)
    assert [grid.rank(tp=1), grid.rank(cp=1), grid.rank(dp=1), grid.rank(pp=1)] == [11, 12, 14, 18]
    assert grid.coords(10 + 1 + 4 + 8) == (1, 1, 0, 1)  # dp, pp, cp, tp


@given(tp=SIZE, cp=SIZE, dp=SIZE, pp=SIZE, offset=st.integers(0, 9))
def test_coordinates_and_ranks_are_inverse(tp: int, cp: int, dp: int, pp: int, offset: int) -> None:
    grid = GridSpec("m", tp=tp, cp=cp, dp=dp, pp=pp, rank_offset=offset)
    assert len({grid.coords(rank) for rank in grid.ranks}) == grid.size == tp * cp * dp * pp
    for rank in grid.ranks:
        assert grid.rank(**grid.coords(rank)._asdict()) == rank


def test_encoders_come_first_then_the_language_model(path: Path) -> None:
    recipe = load_recipe(path, ["encoders.audio={family: x, grid: {dp: 2}}"])
    layout = build_layout(recipe)
    assert ranks(layout) == {"vision": (0, 0), "audio": (1, 2), "language": (3, 4)}
    assert layout.world_size == 5
    assert [layout.modules_of(rank) for rank in (0, 2, 3)] == [
        ("vision",),
        ("audio",),
        ("language",),
    ]


def test_a_rank_offset_moves_a_module_and_the_others_fill_the_rest(path: Path) -> None:
    layout = build_layout(load_recipe(path, ["language.grid.rank_offset=0"]))
    assert ranks(layout) == {"vision": (2, 2), "language": (0, 1)}


def test_one_missing_dp_is_derived_from_the_world_size(path: Path) -> None:
    layout = build_layout(load_recipe(path), world_size=5)
    assert layout.language.dp == 2
    layout = build_layout(
        load_recipe(path, ["language.grid.dp=1", "encoders.vision.grid.dp=null"]), world_size=5
    )
    assert layout.encoders["vision"].dp == 3


@pytest.mark.parametrize(
    ("lanes", "language", "most", "blocks"),
    [
        (4, "dp: 2", 512, 1),
        (4, "dp: 2", 2, 2),  # as many lanes of the encoder
        (4, "{dp: 4, tp: 2}", 4, 2),  # as many ranks of the language model
        (4, "{dp: 4, tp: 2, pp: 2}", 4, 2),  # of one of its stages
        (4, "dp: 2", 1, 2),  # no more blocks than lanes of either
        (3, "dp: 2", 1, 1),
        (6, "dp: 4", 1, 2),
    ],
)
def test_ends_with_many_ranks_are_cut_into_the_fewest_blocks_of_lanes(
    path: Path, lanes: int, language: str, most: int, blocks: int
) -> None:
    grid = language if language.startswith("{") else f"{{{language}}}"
    overrides = [f"encoders.vision.grid.dp={lanes}", f"language.grid={grid}"]
    overrides += ["train.global_batch_size=4", f"bridge.block_ranks={most}"]
    layout = build_layout(load_recipe(path, overrides))
    assert layout.blocks_of("vision") == layout.blocks == blocks


def test_microbatches_divide_the_global_batch_among_lanes(path: Path) -> None:
    recipe = load_recipe(path, ["train.global_batch_size=24", "train.micro_batch_size=2"])
    assert num_microbatches(recipe, build_layout(recipe, 7)) == 4


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ([], 6, "language.grid.dp: cannot be derived: 5 of 6 ranks remain beside vision 1"),
        ([], 1, "language.grid.dp: cannot be derived: 0 of 1 ranks remain beside vision 1"),
        (["language.grid.dp=1"], 4, "language.grid: got 4 ranks, but the grids need 3"),
        (["encoders.vision.grid.dp=null"], 4, "only one module may leave dp out"),
        (["language.grid.rank_offset=4"], None, "would be used by no module"),
        (
            ["language.grid.rank_offset=1", "encoders.vision.grid.dp=2"],
            None,
            "rank 0 of 4 would be used by no module",
        ),
        (
            ["language.grid.rank_offset=1", "encoders.vision.grid={dp: 2, rank_offset: 0}"],
            None,
            "rank 1 would be used twice (vision ranks 0-1, language ranks 1-2)",
        ),
        (["encoders.vision.grid.vpp=2"], None, "grid.vpp: got 2, but interleaved pipeline stages"),
        (["encoders.vision.grid.cp=2"], None, "grid.cp: got 2, but context parallelism in an enc"),
        (["train.global_batch_size=3"], 5, "got 3, needs a multiple of 2"),
        (["data.sequence_length=31"], None, "data.sequence_length: got 31, needs a multiple of 2"),
        (
            ["language.grid.pp=3", "encoders.vision.run_ahead=1"],
            None,
            "encoders.vision.run_ahead: got 1, which would deadlock: language.grid.pp 3 with vpp 1 "
            "needs at least 2; use auto",
        ),
    ],
)
def test_a_layout_that_cannot_work_names_the_key_and_both_numbers(
    path: Path, overrides: list[str], world_size: int | None, expected: str
) -> None:
    (line,) = problems(load_recipe(path, overrides), world_size)
    assert expected in line


def test_layout_errors_point_at_the_line_or_the_override_and_come_together(path: Path) -> None:
    recipe = load_recipe(path, ["data.sequence_length=31"])
    batch, length = problems(recipe, 7)
    assert batch.startswith(f"{path}:16: train.global_batch_size: got 4, needs a multiple of 3")
    assert length.startswith("override 'data.sequence_length=31': data.sequence_length: got 31")


def test_colocated_encoder_gets_all_ranks_of_the_language_model(path: Path) -> None:
    colocated = ["encoders.vision.placement=colocated", "encoders.vision.grid={tp: 2}"]
    layout = build_layout(load_recipe(path, ["language.grid={tp: 1, pp: 2, dp: 2}", *colocated]))
    assert layout.world_size == 4
    assert layout.encoders["vision"].dp == 2
    assert layout.encoders["vision"].ranks == layout.language.ranks
    assert layout.modules_of(3) == ("vision", "language")


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_automatic_run_ahead_is_one_more_than_needed(path: Path, pp: int) -> None:
    recipe = load_recipe(path, [f"language.grid.pp={pp}", "train.global_batch_size=24"])
    assert run_ahead(recipe, build_layout(recipe), "vision") == pp


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["encoders.vision.grid={dp: 3}", "language.grid.dp=2"],
            "a colocated module has all 4 ranks",
        ),
        (
            ["encoders.vision.grid={tp: 1, rank_offset: 1}"],
            "encoders.vision.grid.rank_offset: a colocated module has the ranks",
        ),
        (
            [
                "encoders.vision.grid={tp: 1}",
                "encoders.vision.encode_group=3",
                "language.grid={pp: 2, vpp: 2}",
                "train.global_batch_size=4",
            ],
            "encoders.vision.encode_group: got 3, needs a multiple of language.grid.pp 2",
        ),
        (
            [
                "encoders.vision.grid={tp: 1}",
                "encoders.audio={family: qwen_vl, placement: colocated, encode_group: 2}",
            ],
            "encoders.vision.encode_group: got all, but encoders.audio has 2",
        ),
    ],
)
def test_colocated_encoder_that_cannot_keep_its_group_or_place_is_refused(
    path: Path, overrides: list[str], expected: str
) -> None:
    colocated = ["encoders.vision.placement=colocated", *overrides]
    found = problems(load_recipe(path, colocated))
    assert any(expected in line for line in found), found
