"""A real SLURM for the tests of this folder, installed where it is missing."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.conftest import RunRanks
from tests.slurm.cluster import Slurm
from tests.slurm.launched import losses_without_slurm

_PACKAGES = {"sbatch": "slurm-wlm", "munged": "munge"}


@pytest.fixture(scope="session")
def installed() -> None:
    """SLURM and munge, by Debian's packages.

    Without them tests are skipped, or fail where the variable MIMO_NEEDS_SLURM is set.
    """
    if os.geteuid() != 0:
        _give_up("a SLURM of its own needs root")
    with (Path(tempfile.gettempdir()) / "mimo-tests-apt.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another worker may be installing
        missing = [package for program, package in _PACKAGES.items() if not shutil.which(program)]
        if missing:
            _install(missing)


def _install(missing: list[str]) -> None:
    if shutil.which("apt-get") is None:
        _give_up(f"{', '.join(missing)} missing, and there is no apt-get")
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-qq", "--no-install-recommends", *missing],
    ):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        if done.returncode != 0:
            _give_up(f"{' '.join(command)}: {done.stderr[-500:]}")


@pytest.fixture(scope="session")
def started(installed: None) -> Iterator[Slurm]:
    """Four nodes on this machine."""
    with Slurm() as running:
        yield running


@pytest.fixture
def slurm(started: Slurm) -> Iterator[Slurm]:
    """The same; after the test it has no jobs and all its nodes."""
    yield started
    started.heal()


@pytest.fixture(scope="session")
def undisturbed(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses by step of the same run without SLURM."""
    return losses_without_slurm(run_ranks, tmp_path_factory.mktemp("undisturbed"))


def _give_up(reason: str) -> NoReturn:
    if os.environ.get("MIMO_NEEDS_SLURM"):
        pytest.fail(reason)
    pytest.skip(reason)
