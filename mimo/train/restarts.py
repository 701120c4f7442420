"""Restarts of all ranks after one failed: from where, how often, and the incidents that tell of it.

The launcher restarts the ranks that it started. Torchrun's agent does so too, unknown to its ranks.
"""

import json
import multiprocessing
import os
import shutil
import socket
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil

from mimo.checkpoint.folder import latest_checkpoint
from mimo.errors import EXIT_CONTINUE, InputError, format_bytes
from mimo.runtime.heartbeat import RANKS, read_states
from mimo.runtime.processes import RankError
from mimo.runtime.run_files import METRICS, incidents, record

_STARTED_BY = ".begun_by"
_LAST_BYTES = 1 << 16  # of metrics.jsonl; far more than a line has


class NotRestarted(InputError):
    """A restart would not help, or is not wanted."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def job_name() -> str:
    """Return a name that this job shares with its later attempts, and with no other job."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        launcher = multiprocessing.parent_process()  # None in the launcher itself
        return _name_of(os.getpid() if launcher is None or launcher.pid is None else launcher.pid)
    # With a static rendezvous torchrun gives every job this name.
    return _name_of(os.getppid()) if run_id == "none" else run_id


def _name_of(pid: int) -> str:
    # Each start of a container has the same process numbers and host name.
    created = ""
    with suppress(psutil.Error):  # the starter of a container's first process is outside of it
        created = f"{psutil.Process(pid).create_time():.2f}"
    return f"{socket.gethostname()} {pid} {created}"


def note_start(run_dir: Path, start: float) -> None:
    """Note in the folder which job has started there, and when.

    start: on the monotonic clock, which later attempts on other machines do not share.
    """
    (run_dir / _STARTED_BY).write_text(f"{job_name()}\n{time.time() - (time.monotonic() - start)}")


def start_time(run_dir: Path) -> float:
    """Return when the job that is restarted first started, in seconds since 1970; 0 if unknown."""
    return _started_by(run_dir)[1]


def has_earlier_attempt(run_dir: Path) -> bool:
    """Return whether this job, whose ranks torchrun restarts, has started in the folder before."""
    return _started_by(run_dir)[0] == job_name()


def _started_by(run_dir: Path) -> tuple[str, float]:
    try:
        name, seconds = (run_dir / _STARTED_BY).read_text().split("\n")
        return name, float(seconds)
    except (OSError, ValueError):
        return "", 0.0


def is_requeued() -> bool:
    """Whether SLURM starts this job again, or after another job of a chain."""
    requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    return requeued or "SLURM_JOB_DEPENDENCY" in os.environ


def _steps_done(run_dir: Path) -> list[int]:
    """Return the number of steps in the metrics, as a list; empty if there is none."""
    try:
        with (run_dir / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            last = json.loads(file.read().splitlines()[-1])
        return [last["step"] + ("validation_loss" not in last)]
    except (OSError, ValueError, IndexError):  # none yet, or it was being written
        return []


def record_restart(
    run_dir: Path, max_restarts: int, started: float = 0.0, cause: str = "", rank: int | None = None
) -> None:
    """Record that all ranks restart after a failure, and print it in one line.

    started: when the job started, in seconds since 1970; it may have the name of the job that it
    continues, whose incidents do not count. cause, rank: read from the ranks' files if not known.
    Raises NotRestarted if a restart would not help.
    """
    if not run_dir.is_dir():
        text = f"{run_dir} is gone: not started again; restore the folder or start another run"
        raise NotRestarted(text, 1)
    # Restarts, signals and ends for lack of finite numbers name their job. Times are whole seconds.
    of_job = [
        incident
        for incident in incidents(run_dir)
        if incident.get("job") == job_name()
        and datetime.fromisoformat(incident["time"]).timestamp() >= int(started)
    ]
    if of_job and (kind := of_job[-1]["kind"]) != "restart":
        code = EXIT_CONTINUE if kind == "signal" else 1
        raise NotRestarted(f"{of_job[-1]['text']}: not started again", code)
    newest = latest_checkpoint(run_dir)
    checkpoint = newest and newest.name
    states = read_states(run_dir, time.time()).values()
    if not cause:
        cause = "a rank was killed or ended without a word"
        failed = next((state for state in states if state.failure), None)
        if failed is not None:
            rank, cause = failed.rank, f"rank {failed.rank} failed: {failed.failure}"
    # Ranks write where they are now and then, but metrics have each step that is done.
    steps = [state.step for state in states if state.activity != "setup"] + _steps_done(run_dir)
    step, source = max(steps, default=None), checkpoint or "the beginning"
    text = f"restart {len(of_job) + 1} of {max_restarts}, from {source}: {cause}"
    text += f", at step {step}" if steps else ""
    print(text, flush=True)
    facts = {"rank": rank, "cause": cause, "checkpoint": checkpoint}
    record(run_dir, "restart", text, step, **facts, job=job_name())


def record_signal(run_dir: Path, signal_name: str) -> None:
    """Record that a signal ended the ranks, and remove their files; their launcher calls it."""
    done, checkpoint = max(_steps_done(run_dir), default=0), latest_checkpoint(run_dir)
    last = f"the last checkpoint is {checkpoint.name}" if checkpoint else "without a checkpoint"
    text = f"ended at once by {signal_name} after step {done}; {last}"
    record(run_dir, "signal", text, done - 1, reasons=[signal_name], job=job_name())
    shutil.rmtree(run_dir / RANKS, ignore_errors=True)


def record_killed_rank(run_dir: Path, error: RankError) -> None:
    """Record a rank that ended without reporting, with where it last was; its launcher calls it."""
    if error.traceback:
        return  # it has reported itself
    state = read_states(run_dir, time.time()).get(error.rank)
    if state is None:  # it ended too early
        record(run_dir, "crash", str(error), rank=error.rank)
        return
    memory = format_bytes(state.resident_bytes)
    text = f"{state} {error.reason}, last seen {state.where}, with {memory} of resident memory"
    if "SIGKILL" in error.reason:
        text += "; where nobody sent that, the kernel did for lack of memory (see dmesg)"
    text = f"{text}; {state.batch}" if state.batch else text
    print(text, file=sys.stderr)
    record(run_dir, "crash", text, state.step, rank=error.rank, activity=state.activity)
