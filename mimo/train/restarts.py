"""Starting all ranks again after one of them failed: from where, how often, and what is kept of it.

The launcher does so for its ranks. Under torchrun its elastic agent does, and ranks find out.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from mimo.checkpoint.folder import newest_checkpoint
from mimo.errors import EXIT_CONTINUE, InputError
from mimo.model.memory import in_words, memory_in_words
from mimo.runtime.processes import RankError
from mimo.train.incidents import incidents, record
from mimo.train.run_files import METRICS, RANKS, read_states

_IN_VAIN = 3  # failures at one step, without a new checkpoint between them, are not by chance
_BEGUN_BY = ".begun_by"
_LAST_BYTES = 1 << 16  # of metrics.jsonl; far more than a line has


class NotRestarted(InputError):
    """Restarting would not help, or is not wanted."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Failure:
    """How the ranks of a run ended. rank: None if that is not known; nor may the step be."""

    cause: str
    rank: int | None
    step: int | None

    def __str__(self) -> str:
        return self.cause if self.step is None else f"{self.cause}, at step {self.step}"


def job_name() -> str:
    """What this job has in common with its later attempts, and with no other job."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        launcher = multiprocessing.parent_process()  # None in the launcher itself
        return _name_of(os.getpid() if launcher is None or launcher.pid is None else launcher.pid)
    # Without a rendezvous of its own torchrun calls every job alike.
    return _agent() if run == "none" else run


def _agent() -> str:
    """The process of torchrun that started this rank, and starts it again."""
    return _name_of(os.getppid())


def _name_of(pid: int) -> str:
    # In a container numbers of processes, and names of hosts, come again at each start of it.
    began = ""
    with suppress(psutil.Error):  # whoever started a container's first process is outside of it
        began = f"{psutil.Process(pid).create_time():.2f}"
    return f"{socket.gethostname()} {pid} {began}"


def say_begun(run_dir: Path, began: float) -> None:
    """Note in the folder which job has begun there, and when.

    began: on the monotonic clock, which later attempts on other machines do not have.
    """
    at = time.time() - (time.monotonic() - began)
    (run_dir / _BEGUN_BY).write_text(f"{job_name()}\n{_agent()}\n{at}")


def begun_at(run_dir: Path) -> float:
    """When the job began whose ranks start again, in seconds since 1970.

    A job that is requeued may have the name of the one before.
    """
    try:
        return float((run_dir / _BEGUN_BY).read_text().split("\n")[2])
    except (OSError, ValueError, IndexError):
        return 0.0


def has_begun(run_dir: Path, restart: int) -> bool:
    """Whether an earlier attempt of this job of torchrun has begun in the folder.

    restart: how often the ranks of this machine were started again; it may be 0 when those of
    another one failed. A person may give the same name to several jobs. Others than torchrun may
    start several jobs from one process, such as a shell.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        name, agent, _ = (run_dir / _BEGUN_BY).read_text().split("\n")
    except (FileNotFoundError, ValueError):
        return False
    return agent == _agent() or (restart > 0 and name == job_name())


def follows_another() -> bool:
    """Whether SLURM starts this job again, or after another one of a chain.

    Of the start before a node may be lost, whose locks a file server keeps for a while.
    """
    requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    return requeued or "SLURM_JOB_DEPENDENCY" in os.environ


def failure_of(run_dir: Path, cause: str = "", rank: int | None = None) -> Failure:
    """How the ranks ended that last wrote to ``run_dir``.

    cause, rank: if they are known; if not, what a rank has left word of, if any has.
    """
    # They write where they are now and then, but each step that is done.
    steps, failures = _steps_done(run_dir), dict[int, str]()
    for number, state in read_states(run_dir, time.time()).items():
        steps += [state.step] if state.activity != "setup" else []
        failures |= {number: state.failure} if state.failure else {}
    if not cause:
        rank = min(failures, default=None)
        cause = "a rank was killed or ended without a word"
        if rank is not None:
            cause = f"rank {rank} failed: {failures[rank]}"
    return Failure(cause, rank, max(steps, default=None))


def _steps_done(run_dir: Path) -> list[int]:
    """How many steps are in the metrics; empty if none is."""
    try:
        with (run_dir / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            last = json.loads(file.read().splitlines()[-1])
        return [last["step"] + ("validation_loss" not in last)]
    except (OSError, ValueError, IndexError):  # none yet, or it was being written
        return []


def check_again(run_dir: Path, failure: Failure, began: float = 0.0) -> None:
    """Raise NotRestarted if the ranks need not start again after a ``failure`` of this job.

    began: as of `begun_at`.
    """
    if not run_dir.is_dir():
        text = f"{run_dir} is gone: not started again; restore the folder or start another run"
        raise NotRestarted(text, 1)
    own = _incidents_of_job(run_dir, began)
    if own and (kind := own[-1]["kind"]) != "restart":
        code = EXIT_CONTINUE if kind == "signal" else 1
        raise NotRestarted(f"{own[-1]['text']}: not started again", code)
    last = own[1 - _IN_VAIN :]
    same = (failure.step, _name(newest_checkpoint(run_dir)))
    if [(one["step"], one.get("checkpoint")) for one in last] == [same] * (_IN_VAIN - 1):
        raise NotRestarted(
            f"{failure}: {_IN_VAIN} failures there without a new checkpoint, so restarting would "
            "not help",
            1,
        )


def _incidents_of_job(run_dir: Path, began: float) -> list[dict]:
    """Restarts, signals and ends for lack of finite numbers; others do not name their job."""
    own = (one for one in incidents(run_dir) if one.get("job") == job_name())
    # Incidents have whole seconds.
    return [one for one in own if datetime.fromisoformat(one["time"]).timestamp() >= int(began)]


def say_restart(run_dir: Path, failure: Failure, most: int, began: float = 0.0) -> None:
    """Record that all ranks start again, and print it in one line.

    most: restarts of this job. began: as of `begun_at`.
    """
    checkpoint = _name(newest_checkpoint(run_dir))
    number = 1 + len(_incidents_of_job(run_dir, began))
    text = f"restart {number} of {most}, from {checkpoint or 'the beginning'}: {failure}"
    print(text, flush=True)
    record(
        run_dir,
        "restart",
        text,
        failure.step,
        rank=failure.rank,
        cause=failure.cause,
        checkpoint=checkpoint,
        job=job_name(),
    )


def _name(checkpoint: Path | None) -> str | None:
    return checkpoint.name if checkpoint else None


def say_ended(run_dir: Path, signal_name: str) -> None:
    """Keep an incident of a run whose ranks a signal ended at once; their launcher calls it.

    What the ranks last said of themselves is removed, so that nobody takes them for running.
    """
    done, checkpoint = max(_steps_done(run_dir), default=0), newest_checkpoint(run_dir)
    last = f"the last checkpoint is {checkpoint.name}" if checkpoint else "without a checkpoint"
    text = f"ended at once by {signal_name} after step {done}; {last}"
    record(run_dir, "signal", text, done - 1, reasons=[signal_name], job=job_name())
    shutil.rmtree(run_dir / RANKS, ignore_errors=True)


def say_killed(run_dir: Path, error: RankError) -> None:
    """Keep an incident of a rank that ended without a word, with where it last was.

    For the process that started it.
    """
    if error.traceback:
        return  # it has done so itself
    state = read_states(run_dir, time.time(), [error.rank]).get(error.rank)
    if state is None:  # it ended too early
        record(run_dir, "crash", str(error), rank=error.rank)
        return
    memory = in_words(state.resident_bytes)
    text = f"{state} {error.reason}, last seen {state.where}, with {memory} of resident memory"
    if "SIGKILL" in error.reason:
        text += "; where nobody sent that, the kernel did for lack of memory (see dmesg)"
    text = f"{text}; {state.batch}" if state.batch else text
    if state.memory:
        text += f"; after its first update it held {memory_in_words(state.memory)}"
    print(text, file=sys.stderr)
    facts = {"activity": state.activity, "memory": state.memory}
    record(run_dir, "crash", text, state.step, rank=error.rank, **facts)
