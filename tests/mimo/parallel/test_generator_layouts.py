"""Where generators stand, which ranks they connect to, and what they cost the language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.model.memory import RoleMemory, memory_by_role
from mimo.parallel.build import build_layout
from mimo.parallel.connections import bridge_ends, sender_receiver_pairs
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout, Link, run_ahead, variables_of
from tests.mimo import tiny
from tests.mimo.drawings import GENERATOR

COLOCATED = "generators.image.placement=colocated"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_recipe(tmp_path_factory.mktemp("layouts"))


def layout_of(path: Path, *overrides: str, world_size: int | None = None) -> Layout:
    return build_layout(load_recipe(path, [GENERATOR, *overrides]), world_size)


def ranks(layout: Layout) -> dict[str, range]:
    return {name: grid.ranks for name, grid in layout.grids.items()}


def test_generators_come_after_the_language_model(path: Path) -> None:
    second = GENERATOR.replace("generators.image", "generators.sketch")
    layout = layout_of(path, second, "generators.image.grid.dp=2", "language.grid.tp=2")
    assert ranks(layout) == {
        "vision": range(1), "language": range(1, 3), "image": range(3, 5), "sketch": range(5, 6)
    }  # fmt: skip
    assert layout.world_size == 6
    assert [layout.modules_of(rank) for rank in (0, 2, 4)] == [
        ("vision",),
        ("language",),
        ("image",),
    ]
    assert [*layout.item_grids] == ["vision", "image", "sketch"]


def test_a_rank_offset_moves_a_generator_and_the_others_fill_the_rest(path: Path) -> None:
    layout = layout_of(path, "generators.image.grid={dp: 2, rank_offset: 0}")
    assert ranks(layout) == {"vision": range(2, 3), "language": range(3, 4), "image": range(2)}


def test_a_generators_lanes_are_derived_from_the_world_size(path: Path) -> None:
    lanes = ["generators.image.grid.dp=null", "language.grid.dp=2", "train.micro_batch_size=2"]
    assert layout_of(path, *lanes, world_size=6).generators["image"].dp == 3
    assert layout_of(path, *lanes).generators["image"].dp == 1


def test_a_colocated_generator_has_a_lane_on_each_rank_of_the_language_model(path: Path) -> None:
    layout = layout_of(path, COLOCATED, "generators.image.grid.dp=null", "language.grid.tp=2")
    assert layout.generators["image"].ranks == layout.language.ranks == range(1, 3)
    assert layout.generators["image"].dp == 2
    assert layout.modules_of(2) == ("language", "image")
    assert layout.world_size == 3


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (["generators.image.grid.dp=2"], 3, "language.grid: got 3 ranks, but the grids need 4"),
        (
            ["generators.image.grid={dp: 1, rank_offset: 1}", "language.grid.rank_offset=1"],
            None,
            "generators.image.grid.rank_offset: rank 1 would be used twice",
        ),
        (
            [COLOCATED, "language.grid={tp: 2, dp: 1}"],
            None,
            "generators.image.grid: got tp 1 · cp 1 · pp 1 · dp 1 = 1 rank, but a colocated module "
            "has all 2 ranks",
        ),
        (
            [COLOCATED, "generators.image.grid={dp: 1, rank_offset: 1}"],
            None,
            "generators.image.grid.rank_offset: a colocated module has the ranks",
        ),
        (
            [COLOCATED, "generators.image.grid.dp=null", "language.grid.pp=2"],
            None,
            "generators.image.placement: got colocated, but language.grid.pp is 2",
        ),
        (
            ["generators.image.grid={dp: 3, dp_replicate: 2}"],
            None,
            "generators.image.grid.dp_replicate: got 2, but it must divide the lanes, dp 3",
        ),
        (
            ["encoders.vision.run_ahead=1", "language.grid.pp=2"],
            None,
            "encoders.vision.run_ahead: got 1, which would deadlock: language.grid.pp 2 with vpp "
            "1, which runs ahead for a generator, needs at least 2; use auto",
        ),
    ],
)
def test_a_layout_that_cannot_work_names_the_key_and_both_numbers(
    path: Path, overrides: list[str], world_size: int | None, expected: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        layout_of(path, *overrides, world_size=world_size)
    assert any(expected in line for line in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("language", "overrides", "ahead"),
    [
        ("{pp: 1}", [], 1),
        ("{pp: 3}", [], 1),
        ("{pp: 2, vpp: 2}", [], 0),  # keeps Megatron's warm-up
        ("{pp: 1}", [COLOCATED, "generators.image.grid.dp=null"], 0),
    ],
)
def test_without_interleaving_the_language_model_runs_ahead_for_a_disjoint_generator(
    path: Path, language: str, overrides: list[str], ahead: int
) -> None:
    stages = [f"language.grid={language}", "language.model.num_layers=12"]
    stages += ["train.micro_batch_size=1"]
    assert layout_of(path, *stages, *overrides).ahead == ahead
    assert build_layout(load_recipe(path, stages)).ahead == 0


def test_encoders_run_ahead_of_a_language_model_that_runs_ahead(path: Path) -> None:
    stages = ["language.grid.pp=3", "train.micro_batch_size=1"]
    plain, drawing = (load_recipe(path, [*stages, *more]) for more in ([], [GENERATOR]))
    assert run_ahead(plain, build_layout(plain), "vision") == 3
    assert run_ahead(drawing, build_layout(drawing), "vision") == 4


def test_each_stage_keeps_the_activations_of_a_microbatch_more(path: Path) -> None:
    def roles(*overrides: str) -> dict[str, RoleMemory]:
        recipe = load_recipe(path, ["train.micro_batch_size=1", *overrides])
        return {role.role: role for role in memory_by_role(recipe, build_layout(recipe))}

    stages = ["language.grid.pp=3", "language.model.num_layers=3"]
    plain, drawing = roles(*stages), roles(*stages, GENERATOR)
    names = [f"language, {place} stage" for place in ("first", "middle", "last")]
    ratios = [drawing[name].activations / plain[name].activations for name in names]
    assert ratios == pytest.approx([4 / 3, 3 / 2, 2 / 1])
    one, ahead = roles()["language"], roles(GENERATOR)["language"]
    assert ahead.activations == 2 * one.activations
    beside = roles(GENERATOR, COLOCATED, "generators.image.grid.dp=null")
    assert beside["language"].activations == one.activations
    # A step of one microbatch has none to run ahead with.
    single = "train.micro_batch_size=12"
    assert roles(single, GENERATOR)["language"].activations == roles(single)["language"].activations


# -------------------------------------------------------------------------- connections

# Two stages of two tensor-parallel ranks, between an encoder and a generator of three lanes.
STAGES = Layout(
    GridSpec(LANGUAGE, tp=2, pp=2, rank_offset=1),
    {"vision": GridSpec("vision")},
    8,
    generators={"image": GridSpec("image", dp=3, rank_offset=5, engine="fsdp")},
)


def test_the_last_stage_sends_rows_to_every_lane_of_a_generator() -> None:
    (link,) = STAGES.links_of("image")
    assert (link, link.name) == (Link("image", stage=1, chunks=(0,)), "image")
    assert bridge_ends(STAGES, link) == [([3, 4], [5, 6, 7])]
    pairs = sender_receiver_pairs(STAGES)
    assert pairs["bridge of image"] == [(3, 5), (4, 6), (3, 7)]
    assert pairs["bridge of vision"] == [(0, 1), (0, 2)]


def test_a_link_starts_at_the_last_chunk_of_an_interleaved_stage(path: Path) -> None:
    grid = "language.grid={pp: 2, vpp: 2}"
    layout = layout_of(path, grid, "language.model.num_layers=4", "train.micro_batch_size=1")
    assert layout.links_of("image") == (Link("image", stage=1, chunks=(1,)),)


def test_kernels_load_at_the_start_at_both_ends_of_a_generators_bridge() -> None:
    eager = [
        rank
        for rank in range(STAGES.world_size)
        if ("CUDA_MODULE_LOADING", "EAGER")
        in [(v.name, v.value) for v in variables_of(STAGES, rank)]
    ]
    assert eager == [*range(8)], "the first stage is at the encoder's bridge"


def first_messages(rank: int) -> list[tuple[bool, int, str]]:
    """Whether each first message comes in, its peer and its group's way."""
    import torch.distributed as dist

    from mimo.parallel.groups import build_topology

    batch, messages = dist.batch_isend_irecv, list[tuple[bool, int, str]]()

    def record(operations: Any) -> Any:
        for p2p in operations:
            name = p2p.group.group_desc
            if name.startswith("bridge.image"):
                messages.append((p2p.op is dist.irecv, p2p.peer, name.rpartition(".")[-1]))
        return batch(operations)

    dist.batch_isend_irecv = record
    build_topology(STAGES)
    return sorted(messages)


def test_ranks_are_connected_the_way_that_rows_and_gradients_go(run_ranks: Any) -> None:
    messages = run_ranks(first_messages, STAGES.world_size)
    assert messages[:3] == [[], [], []]
    for rank in (3, 4):
        expected = [(False, lane, "forward") for lane in (5, 6, 7)]
        assert messages[rank] == expected + [(True, lane, "backward") for lane in (5, 6, 7)]
    for rank in (5, 6, 7):
        expected = [(False, stage, "backward") for stage in (3, 4)]
        assert messages[rank] == expected + [(True, stage, "forward") for stage in (3, 4)]


def test_a_generators_lanes_leave_the_blocks_of_encoders_as_they_are(path: Path) -> None:
    lanes = ["encoders.vision.grid.dp=4", "language.grid.dp=4", "bridge.block_ranks=1"]
    lanes += ["train.global_batch_size=16"]
    for dp, blocks in ((3, 1), (4, 4)):
        layout = layout_of(path, *lanes, f"generators.image.grid.dp={dp}")
        assert (layout.blocks_of("vision"), layout.blocks_of("image")) == (4, blocks)
        (link,) = layout.links_of("image")
        assert len(bridge_ends(layout, link)) == blocks
