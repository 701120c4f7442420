"""Jobs that end early: cancelled, or with a mistake in the recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.launched import launch, tiny

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_cancelled_job_leaves_no_process_and_does_not_come_back(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = launch(slurm, tiny(tmp_path), "train.steps=100000", "--submit")
    job.wait_for_step(0)
    slurm.command("scancel", job.job)
    slurm.wait_for(lambda: not slurm.processes_of(job.job), 40)
    assert job.end().startswith("CANCELLED"), job.logs()
    assert slurm.job(job.job)["Restarts"] == "0"
    job.check_what_is_shown()
    assert "CANCELLED" in job.mimo("status", job.run)


def test_a_wrong_recipe_fails_before_any_rank_starts(slurm: Slurm, tmp_path: Path) -> None:
    job = launch(slurm, tiny(tmp_path))
    recipe = job.launch / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("optimizer: sgd", "optimizer: sdg"))
    number = slurm.command("sbatch", "--parsable", job.launch / "job.sh").strip()
    job = replace(job, jobs=[number])
    assert job.end() == "FAILED 2:0", job.logs()
    assert "sdg" in (job.launch / f"job_{number}.out").read_text()
    assert not [*job.launch.glob("rank_*.log")]
    problem = "train.optimizer: should be 'adam' or 'sgd'; got 'sdg'"
    status = job.mimo("status", job.run)
    assert "no rank has started yet" in status
    assert problem in status
    assert problem in job.mimo("logs", job.run)
    job.mimo("report", job.run)
    assert "no rank has started" in (job.run / "report.html").read_text()
