"""A job across two nodes, from its preflight to its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.launched import launch, tiny

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_recipe_trains_across_two_nodes_as_it_does_on_one(
    slurm: Slurm, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    job = launch(slurm, tiny(tmp_path), "cluster.preflight=true")
    job.wait_for_step(0)
    status = job.mimo("status", job.run)
    assert "running" in status, status
    assert job.end() == "COMPLETED 0:0", job.logs()
    assert job.losses() == undisturbed
    # One log a rank, each from its node.
    for rank in range(3):
        assert (job.launch / f"rank_{rank}.log").exists()
    assert (job.launch / "preflight.json").exists()
    assert job.mimo("logs", job.run)
    assert job.mimo("report", job.run)
    print(status, job.mimo("status", job.run), job.mimo("logs", job.run), job.logs())
