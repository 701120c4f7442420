"""Jobs whose ranks were started one by one, as torchrun and srun do."""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from mimo.runtime.processes import RanksFailed
from mimo.runtime.ranks import RENDEZVOUS, run_on_cpu
from tests.conftest import RunRanks

RANKS = 3
SETTINGS = ("language.grid.dp=2", "train.micro_batch_size=2")
# Run the command line on all ranks; returns exit codes, and what each rank printed.
Trained = Callable[..., tuple[list[int], list[str]]]


def as_task_of_srun(port: int) -> None:
    """Change this rank's environment to that of srun's tasks."""
    rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    del os.environ[RENDEZVOUS]
    os.environ |= {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "77",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }


def train(port: int, folder: Path, arguments: list[str], broken_rank: int | None = None) -> int:
    """The command line as a task; what it prints goes to `printed_<rank>`. Returns exit codes."""
    from mimo.cli.main import app

    rank = int(os.environ["RANK"])
    as_task_of_srun(port)
    if rank == broken_rank:
        arguments = [*arguments, "train.stepps=3"]
    with (
        (folder / f"printed_{rank}").open("w") as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        return app(["train", *arguments], standalone_mode=False) or 0


@contextmanager
def other_program(port: int = 0, greeting: bytes | None = None, host: str = "") -> Iterator[int]:
    """Something that has a port of this machine, and says nothing or something else."""
    with socket.create_server((host, port)) as server:

        def greet() -> None:
            while True:
                try:
                    visitor, _ = server.accept()
                except OSError:
                    return
                with visitor:
                    visitor.sendall(greeting or b"")

        if greeting is not None:
            threading.Thread(target=greet, daemon=True).start()
        yield server.getsockname()[1]


def free_port(host: str = "") -> int:
    with other_program(host=host) as port:
        return port


@pytest.fixture
def trained(run_ranks: RunRanks, recipe: Path) -> Trained:
    def run(*arguments: str, **kwargs: Any) -> tuple[list[int], list[str]]:
        target = functools.partial(kwargs.pop("target", train), **kwargs)
        args = (free_port(), recipe.parent, [str(recipe), *SETTINGS, *arguments])
        try:
            codes = run_on_cpu(target, args, RANKS, timeout_seconds=60)
        except RanksFailed as failure:
            codes = [error.exit_code for error in failure.errors]
        printed = [(recipe.parent / f"printed_{rank}").read_text() for rank in range(RANKS)]
        return codes, printed

    return run
