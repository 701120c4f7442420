"""Jobs across several nodes, from a look at the nodes to the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import RunRanks
from tests.slurm.cluster import NODES, Slurm
from tests.slurm.launched import STEPS, launch, losses_without_slurm, tiny

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_recipe_trains_across_four_nodes_and_goes_on_after_its_time_limit(
    slurm: Slurm, run_ranks: RunRanks, tmp_path: Path
) -> None:
    lanes = "encoders.vision.grid.dp=2"
    undisturbed = losses_without_slurm(run_ranks, tmp_path / "undisturbed", lanes)
    nodes = [
        "cluster.preflight=true",
        "cluster.ranks_per_node=1",
        "cluster.time_limit='60'",
        "cluster.signal_seconds=100",
    ]
    job = launch(slurm, tiny(tmp_path), lanes, *nodes, "--submit")
    with job.held(5) as is_warned:
        assert slurm.ranks_of(job.job) == dict(enumerate(NODES))
        status = job.mimo("status", job.run)
        assert "running" in status.lower(), status
        # A fixed limit would warn before step 5 where ranks start slowly. SLURM counts minutes and
        # looks at the time twice in each, so it warns within 80 s.
        job.set_time_limit(job.minutes() + 3)
        slurm.wait_for(is_warned, 120)
    job.wait_for_start(1, job.job)
    job.set_time_limit(60)
    assert "exit code 75" in job.logs()
    assert job.end() == "COMPLETED 0:0", job.logs()
    assert job.steps() == [*range(STEPS)]
    assert job.losses() == undisturbed
    assert f"preflight: 4 ranks on {', '.join(NODES)}\n" in job.logs()
    assert f"step {STEPS}/{STEPS}" in job.mimo("logs", job.run)
    job.check_what_is_shown()


def test_an_array_trains_two_recipes_at_once_on_the_same_nodes(
    slurm: Slurm, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    recipe, other = tiny(tmp_path), tmp_path / "other.yaml"
    other.write_text(recipe.read_text().replace("name: tiny", "name: other"))
    same_nodes = "cluster.options=['--nodelist=node1,node2']"
    both = launch(slurm, recipe, other, same_nodes, "--array", "--submit")
    first = replace(both, jobs=both.jobs[:1])
    second = replace(both, jobs=both.jobs[1:], run=both.run.with_name("other"))
    slurm.wait_for(lambda: first.steps() or second.steps(), 120)
    ahead, behind = (first, second) if first.steps() else (second, first)
    with ahead.held(0):
        behind.wait_for_step(0)
        assert first.runs(first.job)
        assert second.runs(second.job)
    for job in (first, second):
        assert job.end() == "COMPLETED 0:0", job.logs()
        assert job.losses() == undisturbed
        job.check_what_is_shown()


def test_encoders_train_on_a_node_of_their_own_and_go_on_there(
    slurm: Slurm, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    job = launch(slurm, tiny(tmp_path), "cluster.preflight=true", "--hetjob", "--submit")
    with job.held(10) as has_signal:
        ranks = slurm.ranks_of(job.job)
        assert [*ranks] == [0, 1, 2]
        assert ranks[0] != ranks[1] == ranks[2]
        slurm.command("scancel", "--signal=USR1", job.job)
        slurm.wait_for(has_signal, 30)
    job.wait_for_start(1, job.job)
    assert job.end() == "COMPLETED 0:0", job.logs()
    assert job.losses() == undisturbed
    assert job.steps() == [*range(STEPS)]
    assert "preflight: ok\n" in job.logs()
    job.check_what_is_shown()
