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
    """A run and its jobs. Times out, with all logs, where a job does not get on."""

    slurm: Slurm
    run: Path
    jobs: Sequence[str]

    @property
    def job(self) -> str:
        """The only one."""
        (job,) = self.jobs
        return job

    @property
    def launch(self) -> Path:
        """The folder of the script and of what jobs print."""
        return self.run / "launch"

    def steps(self) -> list[int]:
        """Those in the metrics, in the order in which they were written."""
        return [line["step"] for line in self._metrics()]

    def losses(self) -> dict[int, float]:
        """By step; what was trained last counts."""
        return {line["step"]: line["loss"] for line in self._metrics()}

    def wait_for_step(self, step: int) -> None:
        """Until it has been trained."""
        self._wait(lambda: max(self.steps(), default=-1) >= step)

    @contextmanager
    def held(self, step: int, job: str | None = None) -> Iterator[Callable[[], bool]]:
        """After a step rank 0 stands still, and so the run: it does not end before what comes.

        Yields what says whether SLURM has sent the rank a signal since.
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
                told = Path(f"/proc/{rank.pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
                raise AssertionError(f"rank 0 was killed unwarned\n{self.logs()}") from None
            (pending,) = re.findall(r"^ShdPnd:\s*(\w+)", told, re.MULTILINE)
            return bool(int(pending, 16) & 1 << (SIGUSR1 - 1))

        try:
            yield has_signal
        finally:
            with suppress(psutil.NoSuchProcess):
                rank.resume()

    def wait_for_start(self, number: int, job: str) -> None:
        """Until a job runs that was put into the queue again so often."""
        self._wait(lambda: int(self.slurm.job(job)["Restarts"]) >= number and self.runs(job))

    def minutes(self) -> int:
        """Return the whole minutes that the job's last start has run."""
        hours, minutes, _ = self.slurm.job(self.job)["RunTime"].split(":")
        return 60 * int(hours) + int(minutes)

    def set_time_limit(self, minutes: int) -> None:
        """Change the time limit of the job."""
        self.slurm.command("scontrol", "update", f"jobid={self.job}", f"timelimit={minutes}")

    def runs(self, job: str) -> bool:
        """Whether it has nodes now."""
        return self.slurm.job(job)["JobState"] == "RUNNING"

    def end(self, job: str | None = None) -> str:
        """How a job has ended, once it has: `COMPLETED 0:0`, with exit code and signal."""
        self._wait(lambda: self.slurm.job(job or self.job)["JobState"] in _ENDED)
        told = self.slurm.job(job or self.job)
        return f"{told['JobState']} {told['ExitCode']}"

    def mimo(self, *arguments: str | Path) -> str:
        """What a command prints. Fails unless it succeeds."""
        return command_in(self.slurm, *arguments)

    def check_what_is_shown(self) -> None:
        """Status, logs and report of the run tell of its jobs and its last step."""
        told, last = self.mimo("status", self.run), max(self.steps())
        for job in self.jobs:
            assert job in told, told
        assert f"{last + 1} of " in told, told
        assert re.search(r"\[rank 0\] .*step", self.mimo("logs", self.run))
        page = self.run / "report.html"
        page.unlink(missing_ok=True)
        self.mimo("report", self.run)
        assert all(job in page.read_text() for job in self.jobs)

    def preflight(self) -> list[str]:
        """The node of each rank by the look at the nodes before the last start; all were fit."""
        table = json.loads((self.launch / "preflight.json").read_text())
        assert table["ok"], table
        return table["nodes"]

    def logs(self) -> str:
        """All that jobs and ranks have printed."""
        paths = sorted(path for path in self.launch.iterdir() if path.suffix in (".out", ".log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    def _metrics(self) -> list[dict]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _wait(self, holds: Callable[[], object]) -> None:
        try:
            self.slurm.wait_for(holds, 60 * _MINUTES)
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None


def tiny(folder: Path) -> Path:
    """A recipe with data in the folder."""
    write_samples(folder)
    return write_recipe(folder)


def losses_without_slurm(run_ranks: RunRanks, folder: Path, *overrides: str) -> dict[int, float]:
    """By step, of the same run on this machine."""
    recipe = tiny(folder)
    run(run_ranks, recipe, *LAYOUT, *overrides)
    return {line["step"]: line["loss"] for line in metrics(recipe)}


def launch(slurm: Slurm, recipe: Path, *arguments: str | Path) -> Launched:
    """What `mimo launch` makes of a recipe; nothing is submitted without its `--submit`."""
    told = command_in(slurm, "launch", recipe, *LAYOUT, *NODES_OF_TWO, *arguments)
    found = re.search(r"submitted (.*);", told)
    jobs = found[1].split(", ") if found else []
    return Launched(slurm, recipe.parent / "runs" / "tiny", jobs)


def command_in(slurm: Slurm, *arguments: str | Path) -> str:
    """What a command of mimo prints where jobs go to this SLURM. Fails unless it succeeds."""
    told = subprocess.run(
        command(*arguments), capture_output=True, text=True, env=slurm.environment, timeout=120
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout
