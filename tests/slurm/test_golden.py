"""SLURM accepts the scripts that are kept as files, for 128 nodes too."""

from __future__ import annotations

import pytest

from tests.mimo.slurm.test_golden import ARRAY, CASES, GOLDEN
from tests.slurm.cluster import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_sbatch_finds_nodes_for_every_script(slurm: Slurm) -> None:
    for name in (*CASES, ARRAY):
        script = GOLDEN / f"{name}.sh"
        words = ["sbatch", "--test-only", script]
        if "--partition" not in script.read_text():
            words[1:1] = ["--partition=gpu"]
        slurm.command(*words)
