"""The language model alone takes the same steps on any grid as on one rank.

Packed segments with the three-dimensional positions of images, and dense batches; loss, gradient
norm, every gradient and the weights. Two lanes with different numbers of loss tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import language_steps
from tests.cases import quick, quick_values
from tests.conftest import RunRanks
from tests.language_steps import Job, Outcome, assert_same, outcome

TOLERANCE = 1e-5
FP64_TOLERANCE = 1e-10

GRIDS: dict[str, dict[str, Any]] = {
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "cp2 tp2 sp": {"cp": 2, "tp": 2, "sp": True},
    "cp2 pp2 dp2": {"cp": 2, "pp": 2, "dp": 2},
}
FP64_GRIDS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"tp": 2, "sp": True},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2": {"dp": 2},
    "tp2 cp2 dp2": {"tp": 2, "sp": True, "cp": 2, "dp": 2},
}


def size(grid: dict[str, Any]) -> int:
    return grid.get("tp", 1) * grid.get("cp", 1) * grid.get("pp", 1) * grid.get("dp", 1)


def run(run_ranks: RunRanks, job: Job, function: Any = language_steps.train) -> Outcome:
    results = run_ranks(function, size(dict(job.grid)), job)
    return outcome(results, gradients=not job.distributed)


@pytest.fixture(scope="module")
def one_rank(run_ranks: RunRanks) -> Any:
    """A job's outcome on one rank, without what must not change it."""
    found: dict[str, Outcome] = {}

    def of(job: Job) -> Outcome:
        plain = replace(
            job, grid={}, recompute="none", overlap=False, distributed=False, scatter_embedding=True
        )
        key = repr(plain)
        if key not in found:
            found[key] = run(run_ranks, plain)
        return found[key]

    return of


@pytest.mark.parametrize("dense", quick_values({"packed": False, "dense": True}, "packed"))
@pytest.mark.parametrize("grid", quick_values(GRIDS, "cp2 tp2 sp"))
def test_context_parallel_ranks_take_the_steps_of_one(
    run_ranks: RunRanks, one_rank: Any, grid: dict[str, Any], dense: bool
) -> None:
    job = Job(grid=grid, steps=2, dense=dense)
    assert_same(run(run_ranks, job), one_rank(job), TOLERANCE)


@pytest.mark.parametrize("recompute", quick(["selective", "full"], "selective"))
def test_recomputed_activations_change_nothing_under_context_parallelism(
    run_ranks: RunRanks, one_rank: Any, recompute: str
) -> None:
    job = Job(grid={"cp": 2, "tp": 2, "sp": True}, recompute=recompute)
    assert_same(run(run_ranks, job), one_rank(job), TOLERANCE)


def test_an_untied_head_learns_the_same_under_context_parallelism(
    run_ranks: RunRanks, one_rank: Any
) -> None:
    job = Job(grid={"cp": 2, "pp": 2}, settings={"tie_word_embeddings": False})
    assert_same(run(run_ranks, job), one_rank(job), TOLERANCE)


@pytest.mark.parametrize("grid", quick_values(FP64_GRIDS, "tp2 cp2 dp2"))
def test_in_fp64_any_grid_equals_one_rank_to_ten_digits(
    run_ranks: RunRanks, one_rank: Any, grid: dict[str, Any]
) -> None:
    job = Job(grid=grid, dtype=torch.float64, steps=2, optimizer="adam", learning_rate=0.01)
    got = run(run_ranks, job)
    assert {p["weight"].dtype.name for p in got.parameters.values()} == {"float64"}
    assert {p["gradient"].dtype.name for p in got.parameters.values()} == {"float64"}
    assert_same(got, one_rank(job), FP64_TOLERANCE)


@pytest.mark.parametrize(
    "scatter_embedding", quick_values({"scattered": True, "whole": False}, "whole")
)
def test_token_ids_alone_keep_their_length_under_sequence_parallelism(
    run_ranks: RunRanks, one_rank: Any, scatter_embedding: bool
) -> None:
    job = Job(grid={"tp": 2, "sp": True}, scatter_embedding=scatter_embedding)
    assert_same(run(run_ranks, job), one_rank(job), TOLERANCE)


@pytest.mark.parametrize(
    "grid",
    quick_values({k: {**GRIDS, **FP64_GRIDS}[k] for k in ("tp2 sp", "cp2 tp2 sp")}, "tp2 sp"),
)
def test_distilling_the_language_tower_alone_equals_one_rank(
    run_ranks: RunRanks, one_rank: Any, grid: dict[str, Any]
) -> None:
    job = Job(grid=grid, steps=4, learning_rate=0.001, distil=True, scatter_embedding=False)
    got, expected = run(run_ranks, job), one_rank(job)
    assert expected.losses[-1] < expected.losses[0], "nothing was learnt"
    assert_same(got, expected, TOLERANCE)
