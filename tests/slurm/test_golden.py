"""SLURM accepts the scripts that are kept as files, for 128 nodes too."""

from __future__ import annotations

import subprocess

import pytest

from tests.mimo.cluster.test_golden import ARRAY, CASES, GOLDEN, shell_of_a_rank
from tests.slurm.cluster import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_sbatch_finds_nodes_for_every_script(slurm: Slurm) -> None:
    slurm.command(
        *("scontrol", "create", "reservation=spring_2026", "users=root", "starttime=now"),
        *("duration=1:00:00", "nodes=gpu[129-138]"),
    )
    for name in (*CASES, ARRAY):
        script = GOLDEN / f"{name}.sh"
        words = ["sbatch", "--test-only", script]
        if "--partition" not in script.read_text():
            words[1:1] = ["--partition=gpu"]
        slurm.command(*words)


def test_shellcheck_finds_nothing_in_any_script(installed: None) -> None:
    # SC2016: values of the recipe are meant not to expand.
    # SC2154: in what ranks are wrapped in, `logs` comes from the script around it.
    scripts = [["--exclude=SC2016", *GOLDEN.glob("*.sh")], ["--exclude=SC2154", "-"]]
    for arguments in scripts:
        told = subprocess.run(
            ["shellcheck", *arguments],
            input=shell_of_a_rank(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert told.returncode == 0, told.stdout
