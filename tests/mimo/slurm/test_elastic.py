"""With fewer nodes a job goes on with fewer lanes, the same steps and the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mimo.checkpoint.hf.recipes import load_phases
from mimo.errors import InputError, RecipeError, StartError
from mimo.model.recipe_checks import check_recipe
from mimo.slurm.elastic import fit
from mimo.slurm.script import prepare
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.runs import run

NODES_OF_FOUR = (
    "cluster.gpus_per_node=4",
    "train.micro_batch_size=1",
    "train.global_batch_size=16",
)
# 4 lanes of 2 ranks and 4 of 1: 3 nodes.
TWELVE = ("language.grid={tp: 2, dp: 4}", "encoders.vision.grid.dp=4", *NODES_OF_FOUR)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("elastic")
    tiny.write_samples(directory)
    return tiny.write_recipe(directory)


def fitted(path: Path, nodes: int, *overrides: str) -> tuple[list[str], int]:
    """What is overridden beyond what was, and the number of ranks."""
    found, placement = fit(path, overrides, nodes)
    kept = [one for one in overrides if one in found]
    assert found[: len(kept)] == kept
    assert len(placement.nodes) <= nodes
    (layout,) = load_phases(path, found).each(lambda recipe: check_recipe(recipe, None))
    assert len(placement.node_of()) == layout.world_size
    return found[len(kept) :], layout.world_size


@pytest.mark.parametrize("nodes", [3, 4])
def test_a_job_that_fits_stays_as_it_is(path: Path, nodes: int) -> None:
    assert fitted(path, nodes, *TWELVE) == ([], 12)


def test_the_ratio_of_lanes_is_kept_where_it_can_be(path: Path) -> None:
    # 2 + 2 · 2 ranks on 8 places; 4 + 2 · 2 would fill them.
    halves = ["encoders.vision.grid.dp=2", "language.grid.dp=2"]
    assert fitted(path, 2, *TWELVE) == (halves, 6)
    assert fitted(path, 1, *TWELVE) == (["encoders.vision.grid.dp=1", "language.grid.dp=1"], 3)


def test_else_the_fewest_places_are_unused(path: Path) -> None:
    # 3 lanes for 4: no other number of lanes has that ratio.
    overrides = (*TWELVE, "encoders.vision.grid.dp=3")
    assert fitted(path, 2, *overrides) == (["language.grid.dp=2"], 7)


def test_microbatches_of_a_lane_stay_whole(path: Path) -> None:
    # 3 of 4 lanes would fit beside one encoder lane, but 16 samples are not 3 times as many.
    overrides = ("language.grid={tp: 1, dp: 4}", *NODES_OF_FOUR)
    assert fitted(path, 1, *overrides) == (["language.grid.dp=2"], 3)


def test_colocated_encoders_have_the_ranks_of_the_language_model(path: Path) -> None:
    overrides = (
        "language.grid={tp: 2, dp: 4}", "encoders.vision.placement=colocated",
        "encoders.vision.grid.dp=8", *NODES_OF_FOUR,
    )  # fmt: skip
    expected = ["encoders.vision.grid.dp=4", "language.grid.dp=2"]
    assert fitted(path, 1, *overrides) == (expected, 4)


def test_ranks_that_were_given_by_hand_follow_one_another(path: Path) -> None:
    overrides = (*TWELVE, "encoders.vision.grid.rank_offset=8", "language.grid.rank_offset=0")
    found, size = fitted(path, 2, *overrides)
    assert size == 6
    assert "encoders.vision.grid.rank_offset=null" in found


def test_more_microbatches_must_still_interleave(path: Path) -> None:
    overrides = (
        "language.grid={pp: 2, vpp: 2, dp: 4}", "language.model.num_layers=4", *NODES_OF_FOUR
    )  # fmt: skip
    assert fitted(path, 2, *overrides) == (["language.grid.dp=2"], 5)


def test_phases_shrink_to_the_same_ranks(path: Path) -> None:
    own = path.with_name("phases.yaml")
    second = "language: {grid: {tp: 4, dp: 2}}"
    phases = f"phases:\n  - {{name: one}}\n  - {{name: two, {second}}}\n"
    own.write_text(phases + path.read_text())
    found, placement = fit(own, TWELVE, 2)
    # What was given for a key that all phases now have is gone: it would be refused.
    assert found == [
        TWELVE[0],
        *NODES_OF_FOUR,
        "phases.0.encoders.vision.grid.dp=2",
        "phases.0.language.grid.dp=2",
        "phases.1.encoders.vision.grid.dp=2",
        "phases.1.language.grid.dp=1",
    ]
    assert len(placement.node_of()) == 6


def test_a_file_system_that_fails_is_not_taken_for_too_few_nodes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StartError("recipe.yaml: cannot be read: Stale file handle")

    monkeypatch.setattr("mimo.slurm.script.fit", fail)
    with pytest.raises(StartError, match="Stale file handle"):
        prepare(path, TWELVE, form="elastic")


def test_what_fits_nowhere_says_how_many_nodes_are_enough(path: Path) -> None:
    overrides = ("language.grid={tp: 4, pp: 2, dp: 2}", *NODES_OF_FOUR)
    with pytest.raises(InputError, match=r"got 2 nodes of 4 ranks.* needs 3 \(vision: .*8 ranks\)"):
        fit(path, overrides, 2)
    assert len(fit(path, overrides, 3)[1].nodes) == 3


def test_nodes_of_two_kinds_are_refused(path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cluster\.encoder_nodes: nodes of two kinds"):
        fit(path, (*TWELVE, "cluster.encoder_nodes={gpus_per_node: 2}"), 1)


# --------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_fewer_lanes_follow_the_same_losses(path: Path, run_ranks: RunRanks) -> None:
    overrides = (
        "language.grid.dp=2", "train.micro_batch_size=2", "cluster.gpus_per_node=2",
        "train.log_every=1",
    )  # fmt: skip
    fewer, placement = fit(path, overrides, 1)
    assert len(placement.node_of()) == 2
    losses = []
    for name, own in (("many", overrides), ("few", fewer)):
        run(run_ranks, path, *own, f"name={name}")
        lines = (path.parent / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)])
    assert len(losses[0]) == 3
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
