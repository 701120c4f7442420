"""Ranks lie in order, tensor-parallel groups on one node; `--explain` prints where each rank is."""

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
from mimo.slurm.placement import Component, Placement, explain, place, split_groups
from tests.mimo import tiny
from tests.mimo.drawings import GENERATOR

UNEVEN = ("language.grid={tp: 4, dp: 4}", "train.global_batch_size=16")
BOTH_KINDS = ("cluster.gpus_per_node=4", "cluster.encoder_nodes={ranks_per_node: 2}")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_recipe(tmp_path_factory.mktemp("placement"))


def loaded(path: Path, *overrides: str) -> tuple[PhasedRecipe, list[Layout]]:
    phased = load_phases(path, overrides)
    return phased, phased.each(build_layout)


def groups_on_one_node(layout: Layout, placement: Placement) -> bool:
    node_of = np.array(placement.node_of())
    groups = [node_of[grid.ranks].reshape(-1, grid.tp) for grid in layout.grids.values()]
    return all((nodes == nodes[:, :1]).all() for nodes in groups)


def test_a_group_that_no_node_holds_is_on_as_few_as_possible_and_is_named(path: Path) -> None:
    phased, layouts = loaded(
        path, "language.grid={tp: 4, dp: 2}", "encoders.vision.grid.dp=1",
        "cluster.gpus_per_node=3", "train.global_batch_size=8",
    )  # fmt: skip
    placement = place(phased, layouts)
    node_of = placement.node_of()
    assert [len(set(node_of[first : first + 4])) for first in (1, 5)] == [2, 2]
    (warning,) = split_groups(layouts, placement)
    assert warning.startswith("tp 4 of language is across 2 nodes")


grids = st.tuples(st.sampled_from([1, 2, 4]), *(st.integers(1, top) for top in (2, 2, 4)))


@settings(max_examples=40)
@given(grids, grids, st.booleans(), st.integers(1, 8))
def test_ranks_are_in_order_and_groups_stay_whole_where_a_node_holds_them(
    path: Path,
    language: tuple[int, int, int, int],
    encoder: tuple[int, int, int, int],
    colocated: bool,
    places: int,
) -> None:
    tp, cp, pp, dp = language
    grid = f"{{tp: {encoder[0]}, pp: {encoder[2]}, dp: {encoder[3]}}}"
    if colocated:
        share = min(encoder[0], tp * dp)
        grid = f"{{tp: {share}, dp: {tp * cp * pp * dp // share}}}"
    phased, layouts = loaded(
        path, f"language.grid={{tp: {tp}, cp: {cp}, pp: {pp}, dp: {dp}}}",
        f"encoders.vision.placement={'colocated' if colocated else 'disjoint'}",
        f"encoders.vision.grid={grid}" if not colocated or (tp * cp * pp * dp) % share == 0
        else f"encoders.vision.grid={{dp: {tp * cp * pp * dp}}}",
        f"cluster.gpus_per_node={places}", f"train.global_batch_size={4 * dp}",
    )  # fmt: skip
    placement = place(phased, layouts)
    assert [rank for node in placement.nodes for rank in node] == [*range(layouts[0].world_size)]
    assert all(0 < len(node) <= places for node in placement.nodes)
    whole = groups_on_one_node(layouts[0], placement)
    assert whole == (split_groups(layouts, placement) == [])
    if max(grid.tp for grid in layouts[0].grids.values()) <= places:
        assert whole


# ---------------------------------------------------------------- heterogeneous jobs


def test_a_heterogeneous_job_has_its_encoders_on_separate_nodes(path: Path) -> None:
    phased, layouts = loaded(
        path, "encoders.vision.grid.dp=3", "language.grid={tp: 2, dp: 3}", *BOTH_KINDS
    )
    placement = place(phased, layouts, hetjob=True)
    assert placement.components == (
        Component("encoders", 2, ((0, 1), (2,))),
        Component("language", 4, ((3, 4, 5, 6), (7, 8))),
    )
    assert placement.node_of() == (0, 0, 1, 2, 2, 2, 2, 3, 3)


def test_disjoint_generators_are_on_the_nodes_of_the_language_model(path: Path) -> None:
    phased, layouts = loaded(
        path, GENERATOR, "generators.image.grid.dp=2", "encoders.vision.grid.dp=3",
        "language.grid={tp: 2, dp: 3}", *BOTH_KINDS,
    )  # fmt: skip
    placement = place(phased, layouts, hetjob=True)
    assert placement.components == (
        Component("encoders", 2, ((0, 1), (2,))),
        Component("language", 4, ((3, 4, 5, 6), (7, 8, 9, 10))),
    )
    table = [line.split() for line in explain(phased, layouts, placement).splitlines()]
    assert ["7-8", "3", "language", "2", "0-1", "0", "0"] in table
    assert [["9", "3", "image", *"0000"], ["10", "3", "image", *"1000"]] == table[-2:]


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (("encoders.vision.placement=colocated",), "encoders: ", "no encoder is disjoint"),
        (
            ("encoders.vision.placement=colocated", GENERATOR),
            "encoders: ",
            "no encoder is disjoint",
        ),
        (("language.grid.rank_offset=0",), "language.grid.rank_offset: got 0", "come before"),
        (
            (GENERATOR, "generators.image.grid.rank_offset=0"),
            "generators.image.grid.rank_offset: got 0",
            "come before",
        ),
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
    file = path.with_name("phases.yaml")
    text = f"phases:\n  - {{name: one}}\n  - {{name: two, {second}}}\n"
    file.write_text(text + path.read_text())
    return file


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


# ------------------------------------------------------------------------- --explain

EXPLAINED = """\
nodes 0-2, all: 17 ranks, up to 8 on a node

ranks  node  module    lane   tp  cp  pp
0         0  vision       0    0   0   0
1-4       0  language     0  0-3   0   0
5-8       1  language     1  0-3   0   0
9-12      1  language     2  0-3   0   0
13-16     2  language     3  0-3   0   0
"""
TWO_KINDS = """\
nodes 0, encoders: 2 ranks, up to 2 on a node
nodes 1-2, language: 4 ranks, up to 3 on a node

ranks  node  module    lane   tp  cp  pp
0         0  vision       0    0   0   0
1         0  vision       1    0   0   0
2-4       1  language     0  0-2   0   0
5         2  language     0    3   0   0
tp 4 of language is across 2 nodes, which have no room for a tensor-parallel group; lower tp, or \
use larger nodes
"""


def explained(path: Path, overrides: Sequence[str], hetjob: bool = False) -> str:
    phased, layouts = loaded(path, *overrides)
    return explain(phased, layouts, place(phased, layouts, hetjob))


def test_each_group_has_a_line_and_components_and_split_groups_are_named(path: Path) -> None:
    assert explained(path, UNEVEN) == EXPLAINED
    overrides = ("encoders.vision.grid.dp=2", "language.grid={tp: 4, dp: 1}")
    nodes = ("cluster.gpus_per_node=3", "cluster.encoder_nodes={ranks_per_node: 2}")
    assert explained(path, [*overrides, *nodes], hetjob=True) == TWO_KINDS


def test_phases_are_explained_one_by_one(path: Path) -> None:
    text = explained(phases(path, "encoders: {vision: {freeze: true}}"), ())
    assert text.index("phase 1 of 2, one") < text.index("phase 2 of 2, two")
