"""`mimo train`: check everything that can be checked, make the run folder, start the ranks."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from mimo.checkpoint.folder import final_checkpoint, latest_checkpoint
from mimo.checkpoint.resume import Run
from mimo.errors import EXIT_CONTINUE, InputError
from mimo.runtime.processes import RankError
from mimo.runtime.ranks import end_at_once, launch, rank_environment
from mimo.runtime.run_lock import run_lock
from mimo.runtime.signals import exit_on_second_signal
from mimo.train.job import PRELOAD, Job, Request
from mimo.train.restarts import note_start, record_killed_rank, record_signal


def main(
    path: Path,
    overrides: Sequence[str],
    num_ranks: int | None = None,
    *,
    resume: bool = False,
    resume_from: Path | None = None,
    max_restarts: int = 0,
    site: Path | None = None,
) -> int:
    """Train on ranks of this machine, or be a rank of torchrun or srun; returns an exit code."""
    start = time.monotonic()
    request = Request(path, overrides, num_ranks, resume, resume_from, site)
    environment = rank_environment()
    if environment is not None:
        if max_restarts:
            raise InputError(
                "--max-restarts is for ranks that `mimo train` starts itself: give it to torchrun; "
                "under srun, let the batch script start the job again with --resume"
            )
        exit_on_second_signal()
        from mimo.train.entry import join_job

        return end_at_once(join_job(request, environment, start))
    job = request.check(None)
    with run_lock(job.phased.run_dir):
        return train_here(job, max_restarts, start)


def train_here(job: Job, max_restarts: int, start: float) -> int:
    """Train on ranks of this machine, restarting them after failures; returns an exit code."""
    runs, failures, restarts = job.begin(), list[RankError](), 0
    if runs:
        note_start(job.phased.run_dir, start)
    while True:
        code = _launch(job, runs, start, failures)
        if code != 1 or not failures or restarts == max_restarts:
            return code
        restarts += 1
        cause = failures.pop()
        runs = job.restart(max_restarts, str(cause).splitlines()[0], cause.rank)


def _launch(job: Job, runs: Sequence[Run], start: float, failures: list[RankError]) -> int:
    for run in runs:
        if job.phased.has_phases:
            print(run, flush=True)
        run_dir = run.recipe.run_dir

        def on_failure(error: RankError, run_dir: Path = run_dir) -> None:
            record_killed_rank(run_dir, error)
            failures.append(error)

        args = (run.recipe, run.layout, run_dir, run.start, job.phased.run_dir, start)
        target = "mimo.train.entry:run_rank"
        code = launch(target, args, run.layout.world_size, PRELOAD, run_dir, on_failure)
        if code > 128:
            record_signal(run_dir, signal.Signals(code - 128).name)
        last = final_checkpoint(run.recipe)
        if code == EXIT_CONTINUE and run is runs[-1] and latest_checkpoint(run_dir) == last:
            return 0  # it was asked to stop when it had nothing left to do
        if code != 0:
            return code
    return 0
