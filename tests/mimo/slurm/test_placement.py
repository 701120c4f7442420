"""Ranks lie on the least nodes that hold their tensor-parallel groups, and few bytes cross."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.phases import PhasedRecipe
from mimo.errors import RecipeError
from mimo.parallel.build import build_layout
from mimo.parallel.grids import Layout
from mimo.slurm.placement import Component, Placement, in_order, num_nodes, place
from mimo.slurm.traffic import traffic
from tests.mimo import tiny

UNEVEN = ("language.grid={tp: 4, dp: 4}", "train.global_batch_size=16")
BOTH_KINDS = ("cluster.gpus_per_node=4", "cluster.encoder_nodes={ranks_per_node: 2}")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_recipe(tmp_path_factory.mktemp("placement"))


def loaded(path: Path, *overrides: str) -> tuple[PhasedRecipe, list[Layout]]:
    phased = load_phases(path, overrides)
    return phased, phased.each(build_layout)


def bytes_across(phased: PhasedRecipe, layouts: Sequence[Layout], placement: Placement) -> float:
    node_of = np.array(placement.node_of())
    return sum(one.across(node_of) for one in traffic(phased.phases[0].recipe, layouts[0]))


def groups_on_one_node(layout: Layout, placement: Placement) -> bool:
    node_of = np.array(placement.node_of())
    groups = [node_of[grid.ranks].reshape(-1, grid.tp) for grid in layout.grids.values()]
    return all((one == one[:, :1]).all() for one in groups)


def test_17_ranks_on_nodes_of_8_keep_their_tensor_parallel_groups_whole(path: Path) -> None:
    phased, layouts = loaded(path, *UNEVEN)
    before, after = in_order(phased, layouts), place(phased, layouts)
    assert [len(node) for node in before.nodes] == [8, 8, 1]
    assert not groups_on_one_node(layouts[0], before)
    # The encoder's rank shares a node with a lane, and two lanes share one.
    assert after.nodes == ((0, 1, 2, 3, 4), tuple(range(5, 13)), tuple(range(13, 17)))
    assert after.node_of() == (0,) * 5 + (1,) * 8 + (2,) * 4
    assert bytes_across(phased, layouts, after) < bytes_across(phased, layouts, before) / 4


def test_ranks_that_exchange_rows_share_a_node_where_that_saves_most(path: Path) -> None:
    # Without gradients to sum, an encoder's lanes have nothing to do with each other.
    overrides = ("language.grid={pp: 2, dp: 2}", "encoders.vision.grid.dp=2", "language.lora={}")
    phased, layouts = loaded(
        path, *overrides, "encoders.vision.freeze=true", "cluster.gpus_per_node=3",
        "train.global_batch_size=8",
    )  # fmt: skip
    # A lane of the language model and one of the encoder; stages as 2, 4 and 3, 5.
    assert place(phased, layouts).nodes in (
        ((0, 2, 4), (1, 3, 5)),
        ((0, 3, 5), (1, 2, 4)),
        ((0, 2, 3), (1, 4, 5)),
        ((0, 1, 2), (3, 4, 5)),
    )
    assert bytes_across(phased, layouts, place(phased, layouts)) < bytes_across(
        phased, layouts, in_order(phased, layouts)
    )


def test_a_group_that_no_node_holds_is_on_as_few_as_possible(path: Path) -> None:
    phased, layouts = loaded(
        path, "language.grid={tp: 4, dp: 2}", "encoders.vision.grid.dp=1",
        "cluster.gpus_per_node=3", "train.global_batch_size=8",
    )  # fmt: skip
    placement = place(phased, layouts)
    assert len(placement.nodes) == num_nodes(phased, layouts) == 3
    node_of = placement.node_of()
    assert [len(set(node_of[first : first + 4])) for first in (1, 5)] == [2, 2]


@pytest.mark.parametrize(("tp", "units"), [(1, 2), (4, 4)])
def test_groups_of_an_encoder_on_the_same_ranks_stay_whole_too(
    path: Path, tp: int, units: int
) -> None:
    phased, layouts = loaded(
        path, "language.grid={tp: 2, dp: 4}", "encoders.vision.placement=colocated",
        f"encoders.vision.grid={{tp: {tp}, dp: {8 // tp}}}", "cluster.gpus_per_node=5",
        "train.global_batch_size=16",
    )  # fmt: skip
    placement = place(phased, layouts)
    assert groups_on_one_node(layouts[0], placement)
    assert all(len(node) % units == 0 for node in placement.nodes)


grids = st.tuples(st.sampled_from([1, 2, 4]), *(st.integers(1, top) for top in (2, 2, 4)))


@settings(max_examples=40)
@given(grids, grids, st.booleans(), st.integers(1, 8), st.sampled_from([1, 100]))
def test_a_placement_is_never_worse_than_ranks_in_order(
    path: Path,
    language: tuple[int, int, int, int],
    encoder: tuple[int, int, int, int],
    colocated: bool,
    places: int,
    num_batches: int,
) -> None:
    tp, cp, pp, dp = language
    own = f"{{tp: {encoder[0]}, pp: {encoder[2]}, dp: {encoder[3]}}}"
    if colocated:
        share = min(encoder[0], tp * dp)
        own = f"{{tp: {share}, dp: {tp * cp * pp * dp // share}}}"
    phased, layouts = loaded(
        path, f"language.grid={{tp: {tp}, cp: {cp}, pp: {pp}, dp: {dp}}}",
        f"encoders.vision.placement={'colocated' if colocated else 'disjoint'}",
        f"encoders.vision.grid={own}" if not colocated or (tp * cp * pp * dp) % share == 0
        else f"encoders.vision.grid={{dp: {tp * cp * pp * dp}}}",
        f"cluster.gpus_per_node={places}", f"train.global_batch_size={4 * dp * num_batches}",
    )  # fmt: skip
    before, after = in_order(phased, layouts), place(phased, layouts)
    assert sorted(rank for node in after.nodes for rank in node) == [*range(layouts[0].world_size)]
    assert all(list(node) == sorted(node) and len(node) <= places for node in after.nodes)
    assert after.nodes[0][0] == 0
    assert after == place(phased, layouts)
    largest = max(grid.tp for grid in layouts[0].grids.values())
    if largest <= places:
        assert groups_on_one_node(layouts[0], after)
    if groups_on_one_node(layouts[0], before):
        assert len(after.nodes) == len(before.nodes)
        least = bytes_across(phased, layouts, before) * (1 + 1e-9)
        assert bytes_across(phased, layouts, after) <= least


def test_1024_ranks_fill_128_nodes(path: Path) -> None:
    phased, layouts = loaded(
        path, "encoders.vision.grid.dp=128", "language.grid={tp: 4, pp: 4, cp: 2, dp: 28}",
        "train.global_batch_size=112",
    )  # fmt: skip
    placement = place(phased, layouts)
    assert [len(node) for node in placement.nodes] == [8] * 128
    assert groups_on_one_node(layouts[0], placement)


# ---------------------------------------------------------------- heterogeneous jobs


def test_a_heterogeneous_job_has_its_encoders_on_nodes_of_their_own(path: Path) -> None:
    phased, layouts = loaded(
        path, "encoders.vision.grid.dp=3", "language.grid={tp: 2, dp: 3}", *BOTH_KINDS
    )
    assert place(phased, layouts, hetjob=True).components == (
        Component("encoders", ((0, 1), (2,))),
        Component("language", ((3, 4, 5, 6), (7, 8))),
    )
    assert place(phased, layouts, hetjob=True) == in_order(phased, layouts, hetjob=True)
    assert num_nodes(phased, layouts, hetjob=True) == 4
    assert place(phased, layouts, hetjob=True).node_of() == (0, 0, 1, 2, 2, 2, 2, 3, 3)


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (("encoders.vision.placement=colocated",), "encoders: ", "no encoder is disjoint"),
        (("language.grid.rank_offset=0",), "language.grid.rank_offset: got 0", "come before"),
    ],
)
def test_a_heterogeneous_job_needs_encoders_that_come_first(
    path: Path, overrides: tuple[str, ...], key: str, reason: str
) -> None:
    phased, layouts = loaded(path, *overrides)
    with pytest.raises(RecipeError) as caught:
        place(phased, layouts, hetjob=True)
    assert key in str(caught.value)
    assert reason in str(caught.value)


# ---------------------------------------------------------------------------- phases


def phases(path: Path, second: str) -> Path:
    own = path.with_name("phases.yaml")
    text = f"phases:\n  - {{name: one}}\n  - {{name: two, {second}}}\n"
    own.write_text(text + path.read_text())
    return own


def test_groups_of_all_phases_stay_whole(path: Path) -> None:
    second = "language: {grid: {tp: 4, dp: 2}}"
    phased, layouts = loaded(
        phases(path, second), "language.grid={tp: 2, dp: 4}", "cluster.gpus_per_node=6",
        "train.global_batch_size=16",
    )  # fmt: skip
    placement = place(phased, layouts)
    assert all(groups_on_one_node(layout, placement) for layout in layouts)


def test_phases_with_other_numbers_of_ranks_are_refused(path: Path) -> None:
    phased, layouts = loaded(phases(path, "language: {grid: {dp: 3}}"))
    with pytest.raises(RecipeError, match=r"language.grid.*got 4 ranks, but phase 1 .* has 2"):
        place(phased, layouts)
