"""Runs of the tiny recipe that `mimo launch` submits to the tests' SLURM."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGUSR1

import psutil

from tests.conftest import RunRanks
from tests.mimo.runs import command, metrics, run
from tests.mimo.tiny import write_recipe, write_samples
from tests.slurm.cluster import Slurm

STEPS = 60
LAYOUT = ["language.grid.dp=2", "train.micro_batch_size=2", f"train.steps={STEPS}"]
"""Three ranks: the encoder's, then two lanes of the language model."""
NODES_OF_TWO = [
    "cluster.gpus_per_node=0",
    "cluster.ranks_per_node=2",
    "cluster.exclusive=false",
    "cluster.preflight=false",
]
_MINUTES = 8.0  # that a job may take, on a machine that does other things as well
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@dataclass(frozen=True)
class Launched:
    """A run and its jobs. Methods that wait raise AssertionError, with all logs, after a while."""

    slurm: Slurm
    run: Path
    jobs: Sequence[str]

    @property
    def job(self) -> str:
        (job,) = self.jobs
        return job

    @property
    def launch(self) -> Path:
        return self.run / "launch"

    def steps(self) -> list[int]:
        """Return the steps in the metrics, in the order in which they were written."""
        return [line["step"] for line in self._metrics()]

    def losses(self) -> dict[int, float]:
        """Return the loss of each step; of a repeated step, the last."""
        return {line["step"]: line["loss"] for line in self._metrics()}

    def wait_for_step(self, step: int) -> None:
        self._wait(lambda: max(self.steps(), default=-1) >= step)

    @contextmanager
    def held(self, step: int, job: str | None = None) -> Iterator[Callable[[], bool]]:
        """Suspend rank 0 after a step, and so the run, until the end of the context.

        Yields a function that returns whether SLURM has sent the rank a signal since.
        """
        self.wait_for_step(step)
        number = self.slurm.job(job or self.job)["JobId"]  # that of an array's task
        try:
            rank = self.slurm.rank_processes(number)[0]
            rank.suspend()
        except (KeyError, psutil.NoSuchProcess):
            raise AssertionError(f"rank 0 has ended before it was held\n{self.logs()}") from None

        def has_signal() -> bool:
            try:
                if rank.status() != psutil.STATUS_STOPPED:  # a preempted one is also told to go on
                    return True
                text = Path(f"/proc/{rank.pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
                raise AssertionError(f"rank 0 was killed unwarned\n{self.logs()}") from None
            (pending,) = re.findall(r"^ShdPnd:\s*(\w+)", text, re.MULTILINE)
            return bool(int(pending, 16) & 1 << (SIGUSR1 - 1))

        try:
            yield has_signal
        finally:
            with suppress(psutil.NoSuchProcess):
                rank.resume()

    def wait_for_start(self, number: int, job: str) -> None:
        """Wait until a job runs that was requeued this many times."""
        self._wait(lambda: int(self.slurm.job(job)["Restarts"]) >= number and self.runs(job))

    def minutes(self) -> int:
        """Return the whole minutes that the job's last start has run."""
        hours, minutes, _ = self.slurm.job(self.job)["RunTime"].split(":")
        return 60 * int(hours) + int(minutes)

    def set_time_limit(self, minutes: int) -> None:
        self.slurm.command("scontrol", "update", f"jobid={self.job}", f"timelimit={minutes}")

    def runs(self, job: str) -> bool:
        return self.slurm.job(job)["JobState"] == "RUNNING"

    def end(self, job: str | None = None) -> str:
        """Wait for the end of a job; return state, exit code and signal: `COMPLETED 0:0`."""
        self._wait(lambda: self.slurm.job(job or self.job)["JobState"] in _ENDED)
        state = self.slurm.job(job or self.job)
        return f"{state['JobState']} {state['ExitCode']}"

    def mimo(self, *arguments: str | Path) -> str:
        """Return what a command prints, which must succeed."""
        return command_in(self.slurm, *arguments)

    def check_what_is_shown(self) -> None:
        """Assert that status, logs and report of the run show its jobs and its last step."""
        status, last = self.mimo("status", self.run), max(self.steps())
        for job in self.jobs:
            assert job in status, status
        assert f"{last + 1} of " in status, status
        assert re.search(r"\[rank 0\] .*step", self.mimo("logs", self.run))
        page = self.run / "report.html"
        page.unlink(missing_ok=True)
        self.mimo("report", self.run)
        assert all(job in page.read_text() for job in self.jobs)

    def logs(self) -> str:
        """Return all that jobs and ranks have printed."""
        paths = sorted(path for path in self.launch.iterdir() if path.suffix in (".out", ".log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    def _metrics(self) -> list[dict]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _wait(self, condition: Callable[[], object]) -> None:
        try:
            self.slurm.wait_for(condition, 60 * _MINUTES)
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None


def tiny(folder: Path) -> Path:
    """Write a recipe with data into the folder."""
    write_samples(folder)
    return write_recipe(folder)


def losses_without_slurm(run_ranks: RunRanks, folder: Path, *overrides: str) -> dict[int, float]:
    """Return the losses of the same run on this machine, by step."""
    recipe = tiny(folder)
    run(run_ranks, recipe, *LAYOUT, *overrides)
    return {line["step"]: line["loss"] for line in metrics(recipe)}


def launch(slurm: Slurm, recipe: Path, *arguments: str | Path) -> Launched:
    """Call `mimo launch`, which submits nothing without `--submit`."""
    text = command_in(slurm, "launch", recipe, *LAYOUT, *NODES_OF_TWO, *arguments)
    submitted = re.search(r"submitted (.*);", text)
    jobs = submitted[1].split(", ") if submitted else []
    return Launched(slurm, recipe.parent / "runs" / "tiny", jobs)


def command_in(slurm: Slurm, *arguments: str | Path) -> str:
    """Return what a command of mimo prints, whose jobs go to this SLURM; it must succeed."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, env=slurm.environment, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
