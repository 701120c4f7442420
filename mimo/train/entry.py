"""Where a rank begins: it sets up environment, device and kernels, and then imports the engine.

Megatron imports Transformer Engine, which initialises the GPU.
"""

import os
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

from data.index.build import IndexTask, build_here
from mimo.checkpoint.manifest import Unreadable
from mimo.checkpoint.resume import (
    Choice,
    Listed,
    Run,
    Start,
    choose,
    files_to_compare,
    split_by_bytes,
    wrong_checksums,
)
from mimo.config.schema import Recipe
from mimo.device import has_gpu, local_device
from mimo.errors import InputError, StartError, file_system_failed
from mimo.model.dataset import item_processors, open_tokenizer
from mimo.model.indexing import build_nothing, shares, tasks_of
from mimo.model.recipe_checks import check_data
from mimo.ops.acceleration import this_machine
from mimo.parallel.grids import Layout, variables_of
from mimo.runtime.hang_monitor import flight_recorder_variables
from mimo.runtime.processes import end_with_failed_thread, exit_code_of
from mimo.runtime.ranks import RankEnv, rank_environment, set_variables
from mimo.runtime.rendezvous import Refused, Rendezvous
from mimo.runtime.run_lock import keep_lock, run_lock
from mimo.train.job import Job, Request
from mimo.train.restarts import has_earlier_attempt, is_requeued, note_start, start_time

# How far apart in time ranks may arrive when no readable recipe gives a timeout.
_RENDEZVOUS_SECONDS = 600.0
# After a host of the failed attempt is gone, a file server keeps its locks for a while.
_LOCK_SECONDS = 120.0


def run_rank(
    recipe: Recipe, layout: Layout, run_dir: Path, start: Start, locked: Path, job_start: float
) -> int:
    """Be one rank of a job launched on this machine; returns an exit code.

    locked: the folder whose lock the launcher holds. job_start: on the monotonic clock.
    """
    keep_lock(locked)
    prepare_process(layout, run_dir)
    from mimo.train.rank import join_world, leave_world, train_in_world

    join_world(recipe)
    code = train_in_world(recipe, layout, run_dir, start, job_start)
    leave_world()
    return code


def prepare_process(layout: Layout, run_dir: Path) -> None:
    """Set what the engine's import needs. Raises InputError for kernels that fail to import."""
    environment = rank_environment()
    assert environment is not None, "ranks run inside a launched job"
    set_variables(variables_of(layout, environment.rank))
    local_device(environment.local_rank)
    if has_gpu():
        set_variables(flight_recorder_variables(run_dir))
    this_machine()


# ------------------------------------------------------------- a rank of torchrun or srun


def join_job(request: Request, environment: RankEnv, start: float) -> int:
    """Train as a rank of torchrun or srun; rank 0 prints. Returns an exit code."""
    job, problem, timeouts = None, None, list[float]()
    try:
        job = request.check(environment)
        timeouts = job.phased.each(lambda recipe: recipe.bridge.timeout_seconds)
    except InputError as error:
        problem = error
    ranks = Rendezvous(environment, max(timeouts, default=_RENDEZVOUS_SECONDS))
    try:
        ranks.agree(problem)
        assert job is not None, "all ranks end where one has a problem"
        with ExitStack() as lock:
            runs, start = _begin(job, ranks, environment, start, lock)
            if not runs:
                ranks.leave()
                return 0
            keep_lock(job.phased.run_dir)
            return _train_here(runs, ranks, start)
    except Refused as refused:
        return refused.exit_code


def _begin(
    job: Job, ranks: Rendezvous, environment: RankEnv, start: float, lock: ExitStack
) -> tuple[list[Run], float]:
    """Index the data, choose a checkpoint and make the run folders; every rank calls it.

    Returns the runs to do, and on rank 0 when the job started: the time limit, which rank 0
    watches, covers all attempts together. Rank 0 enters the run's lock into ``lock``.
    """
    run_dir = job.phased.run_dir
    # Each machine counts its restarts; a machine that replaces another counts from zero.
    is_restart = any(map(int, ranks.all_gather(str(environment.restart))))
    _index_together(job, ranks, environment.world_size)

    def take_lock() -> list[Path]:
        lock.enter_context(run_lock(run_dir, _LOCK_SECONDS if is_restart or is_requeued() else 0.0))
        continues = is_restart and has_earlier_attempt(run_dir)
        return (job.after_failure() if continues else job).candidates()

    choice = _choose_together(ranks.from_rank_0(take_lock), ranks, environment)

    def begin() -> list[Run]:
        nonlocal start
        if is_restart and has_earlier_attempt(run_dir):
            start = time.monotonic() - (time.time() - start_time(run_dir))
            return job.restart(environment.max_restarts, choice=choice)
        if runs := job.begin(choice):
            note_start(run_dir, start)
        return runs

    return ranks.from_rank_0(begin), start


def _choose_together(candidates: Sequence[Path], ranks: Rendezvous, environment: RankEnv) -> Choice:
    """Choose the first intact checkpoint; each rank reads a share. Raises Refused on all ranks."""

    def deal(checkpoint: Path) -> list[tuple[list[str], list[Listed]]]:
        files, problems = files_to_compare(checkpoint)
        return [(problems, share) for share in split_by_bytes(files, environment.world_size)]

    def problems(checkpoint: Path) -> list[str]:
        known, files = ranks.scatter(partial(deal, checkpoint))
        if known:
            return known
        unreadable = None
        try:
            known = wrong_checksums(checkpoint, files, lambda _: ranks.report_progress())
        except Unreadable as error:
            unreadable = error
        ranks.agree(unreadable)
        return "\n".join(filter(None, ranks.all_gather("\n".join(known)))).splitlines()

    choice, refusal = Choice(), None
    try:
        choice = choose(candidates, problems)
    except InputError as error:  # the same on all ranks
        refusal = error
    ranks.agree(refusal)
    return choice


def _index_together(job: Job, ranks: Rendezvous, num_ranks: int) -> None:
    """Index missing shards, each rank a share, and check the data. Raises Refused on all ranks."""
    recipes = [phase.recipe for phase in job.phased.phases]

    def deal() -> list[list[tuple[int, list[IndexTask]]]]:
        files = dict[Path, int]()  # phases may have shards in common
        tasks = [
            [task for task in of_phase if files.setdefault(task.file, number) == number]
            for number, of_phase in enumerate(job.phased.each(tasks_of))
        ]
        per_task = [shares(of_phase, num_ranks) for of_phase in tasks]
        num = sum(map(len, tasks))
        if num:
            print(f"{num} shards are not indexed yet; the ranks do it, each its share", flush=True)
        return [[*enumerate(share[rank] for share in per_task)] for rank in range(num_ranks)]

    problems, are_failures = list[str](), list[bool]()
    for number, tasks in ranks.scatter(deal):
        if not tasks:
            continue
        try:
            recipe = recipes[number]
            chat, processors = open_tokenizer(recipe), item_processors(recipe)
            build_here(tasks, chat, processors, lambda *_: ranks.report_progress())
        except ValueError as error:
            problems.append(str(error))
            are_failures.append(file_system_failed(error))
        except Exception:  # unexpected, but the others must not wait in vain
            problems.append(traceback.format_exc())
            are_failures.append(True)
    kind = StartError if all(are_failures) else InputError
    ranks.agree(kind("\n".join(problems)) if problems else None)
    ranks.from_rank_0(lambda: job.phased.each(lambda recipe: check_data(recipe, build_nothing)))


def _train_here(runs: Sequence[Run], ranks: Rendezvous, start: float) -> int:
    """Do runs until one ends with a nonzero exit code; return it. Failures end the process."""
    run_dir = runs[0].recipe.run_dir

    def end(error: BaseException) -> NoReturn:
        ranks.report_failure(error, run_dir)
        # A normal exit of the interpreter could wait for a backend that waits for other ranks.
        os._exit(exit_code_of(error))

    end_with_failed_thread(end)
    code = 0
    try:
        prepare_process(runs[0].layout, run_dir)
        from mimo.train.rank import join_world, leave_world, train_in_world

        rank = join_world(*(run.recipe for run in runs), store=ranks.store).rank
        for run in runs:
            run_dir = run.recipe.run_dir
            if run.phase.name and rank == 0:
                print(run, flush=True)
            if code := train_in_world(run.recipe, run.layout, run_dir, run.start, start):
                break
        leave_world()
        return code
    except Exception as error:
        end(error)
