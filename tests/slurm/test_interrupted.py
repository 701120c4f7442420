"""Jobs that SLURM interrupts, which go on where they were, with the same losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm.cluster import NODES, Slurm
from tests.slurm.launched import STEPS, launch, tiny

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_preempted_job_saves_and_goes_on_when_there_are_nodes_again(
    slurm: Slurm, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    job = launch(slurm, tiny(tmp_path), "--submit")
    with job.held(10) as has_signal:
        urgent = ["--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null"]
        slurm.command("sbatch", *urgent, "--wrap=sleep 1")
        slurm.wait_for(has_signal, 30)
    job.wait_for_start(1, job.job)
    assert "exit code 75" in job.logs()
    assert job.end() == "COMPLETED 0:0", job.logs()
    assert job.steps() == [*range(STEPS)], "nothing is lost"
    assert job.losses() == undisturbed
    job.check_what_is_shown()


def test_the_next_job_of_a_chain_goes_on_after_the_warning_signal_and_no_other_comes_between(
    slurm: Slurm, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    job = launch(slurm, tiny(tmp_path), "cluster.restarts=0", "--chain", "3", "--submit")
    first, second, third = job.jobs
    with job.held(10, first) as has_signal:
        between = slurm.command("sbatch", "--parsable", job.launch / "job.sh").strip()
        assert job.end(between) == "FAILED 1:0", job.logs()
        assert "another job is writing to this run folder" in job.logs()
        slurm.command("scancel", "--signal=USR1", first)  # what `--signal=USR1@...` sends
        slurm.wait_for(has_signal, 30)
    assert job.end(first) == "FAILED 75:0", job.logs()
    assert job.end(second) == "COMPLETED 0:0", job.logs()
    assert job.end(third).startswith("CANCELLED"), "all is done"
    assert job.steps() == [*range(STEPS)]
    assert job.losses() == undisturbed
    job.check_what_is_shown()


def test_a_job_whose_nodes_die_goes_on_on_another_then_with_fewer_lanes_on_fewer(
    slurm: Slurm, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    recipe, options = tiny(tmp_path), ["train.save_every=10", "cluster.preflight=true", "--submit"]
    job = launch(slurm, recipe, *options)
    job.wait_for_step(12)
    _, second = slurm.nodes_of(job.job)
    slurm.kill_node(second)
    job.wait_for_start(1, job.job)
    nodes = slurm.nodes_of(job.job)
    assert len(nodes) == 2
    assert second not in nodes
    job.wait_for_step(30)
    for node in {*NODES} - {*nodes, second}:
        slurm.command("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    slurm.kill_node(nodes[0])  # where the script runs
    slurm.wait_for(lambda: slurm.job(job.job)["JobState"] == "PENDING", 60)
    slurm.command("scancel", job.job)
    last = launch(slurm, recipe, *options, "language.grid.dp=1")
    assert last.end() == "COMPLETED 0:0", last.logs()
    assert slurm.nodes_of(last.job) == nodes[1:], slurm.logs()
    assert job.losses() == pytest.approx(undisturbed, rel=1e-5)
    assert f"preflight: 2 ranks on {nodes[1]}\n" in last.logs()
    replace(job, jobs=[job.job, last.job]).check_what_is_shown()
