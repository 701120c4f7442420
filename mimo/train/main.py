"""`mimo train`: checks everything that can be checked, makes the run folder, starts the ranks."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from data.index.build import IndexTask, build_here
from mimo.checkpoint.folder import final_checkpoint, latest_checkpoint, named_by_latest, return_to
from mimo.checkpoint.hf.recipes import load_phases
from mimo.checkpoint.manifest import Unreadable, naming
from mimo.checkpoint.resume import (
    Choice,
    Listed,
    Run,
    candidates,
    choose,
    listed_files,
    runs_to_do,
    split_by_bytes,
    wrong_checksums,
    wrong_sizes,
)
from mimo.config.phases import PhasedRecipe
from mimo.device import choose_before_fork
from mimo.errors import EXIT_CONTINUE, InputError, StartError, file_system_failed
from mimo.model.dataset import item_processors, open_tokenizer
from mimo.model.indexing import build_nothing, shares, tasks_of
from mimo.model.recipe_checks import check_data, check_recipe, check_room
from mimo.parallel.grids import Layout
from mimo.runtime.processes import RankError, end_with_failed_thread, exit_code_of, warm_up
from mimo.runtime.ranks import RankEnv, end_at_once, launch, rank_environment
from mimo.runtime.run_lock import keep_lock, run_lock
from mimo.runtime.signals import end_by_signals
from mimo.train.continuation import check_start, is_at_end, tell_choice
from mimo.train.loggers import check_loggers
from mimo.train.restarts import (
    begun_at,
    check_again,
    failure_of,
    follows_another,
    has_begun,
    say_begun,
    say_ended,
    say_killed,
    say_restart,
)
from mimo.train.run_folder import check_run_dir, make_run_dirs, say_saves

if TYPE_CHECKING:
    from mimo.runtime.meeting import Meeting

# Imported once by the forkserver, so that ranks start in a tenth of a second.
PRELOAD = ("mimo.engines.megatron.preload", "mimo.train.rank", "transformers")
# How far apart in time ranks may arrive when no readable recipe says so.
_MEETING_SECONDS = 600.0
# After a host of the failed attempt is gone, a file server keeps its locks for a while.
_LOCK_SECONDS = 120.0


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
    """`mimo train`: run the recipe on this machine, or be one rank of a torchrun or srun job.

    site: a file whose keys lie over the recipe's `cluster:`.
    """
    began = time.monotonic()
    request = Request(path, overrides, num_ranks, resume, resume_from, site)
    environment = rank_environment()
    if environment is not None:
        if max_restarts:
            raise InputError(
                "--max-restarts is for ranks that `mimo train` starts itself: give it to torchrun; "
                "under srun, let the batch script start the job again with --resume"
            )
        end_by_signals()
        return end_at_once(_be_a_rank(request, environment, began))
    job = request.check(None)
    with run_lock(job.phased.run_dir):
        return train_here(job, max_restarts, began)


@dataclass(frozen=True)
class Request:
    """What the user asks of `mimo train`."""

    path: Path
    overrides: Sequence[str] = ()
    num_ranks: int | None = None
    resume: bool = False
    resume_from: Path | None = None
    site: Path | None = None

    def check(self, environment: RankEnv | None) -> Job:
        """Check everything that needs no ranks. Raises RecipeError with all problems.

        environment: that of this rank if torchrun or srun started it. Then the data is checked when
        the ranks have met, so that only one of them looks at the shards.
        """
        ranks = environment.world_size if environment else self.num_ranks
        sections = None if self.site is None else {"cluster": self.site}
        phased = load_phases(self.path, self.overrides, sections)
        layouts = phased.each(lambda recipe: check_recipe(recipe, ranks))
        num_ranks = max(layout.world_size for layout in layouts)
        if environment is None and (note := choose_before_fork(num_ranks)) is not None:
            print(note)
        check_room(phased, layouts, environment)
        phased.each(check_loggers)
        if environment is None or environment.rank == 0:
            check_run_dir(phased)
        if environment is None:
            warm_up(PRELOAD)  # ranks and indexing processes need the same
            phased.each(check_data)
        return Job(phased, layouts, self.resume, self.resume_from)


@dataclass(frozen=True)
class Job:
    """A checked recipe, the layout of each of its phases, and whether it resumes a run."""

    phased: PhasedRecipe
    layouts: Sequence[Layout]
    resume: bool = False
    resume_from: Path | None = None

    def candidates(self) -> list[Path]:
        """The checkpoints from which it may go on, the best first. Raises InputError."""
        return candidates(self.phased, self.resume, self.resume_from)

    def begin(self, choice: Choice | None = None) -> list[Run]:
        """Make the folders of the runs to do; called by the one process that holds the run's lock.

        choice: among `candidates`; None to make it here. Returns these runs, none where all steps
        are done. Raises RecipeError as `check_start` does, before anything is written.
        """
        if choice is None:
            choice = choose(self.candidates())
        runs = runs_to_do(self.phased, self.layouts, choice.checkpoint)
        first = runs[0]  # later runs follow from it
        changes = check_start(first)
        if is_at_end(first):
            return []
        with naming(self.phased.run_dir):
            if self.resume_from is None and choice.checkpoint is not None:
                if not choice.damaged and not named_by_latest(choice.checkpoint):
                    print(f"`latest` names no checkpoint; using {choice.checkpoint}, the newest")
                return_to(choice.checkpoint, choice.damaged)
            elif choice.checkpoint is not None and first.resumes:
                return_to(choice.checkpoint.resolve(), ())  # `latest` of another run stays as it is
            make_run_dirs(self.phased, runs, self.resume or self.resume_from is not None)
        tell_choice(choice, first.recipe.run_dir)
        for line in changes:
            print(line, flush=True)
        say_saves(runs)
        return runs

    def again(self) -> Job:
        """The same after its ranks have failed: from the last checkpoint, if there is any."""
        has_any = bool(candidates(self.phased, True, None))
        return replace(self, resume=True, resume_from=None if has_any else self.resume_from)

    def begin_again(
        self, most: int, cause: str = "", rank: int | None = None, choice: Choice | None = None
    ) -> list[Run]:
        """As `begin`, after the ranks that began have failed.

        most: restarts of the job. cause, rank: if known. choice: among the candidates of `again`.
        Raises NotRestarted where that would not help.
        """
        again = self.again()
        choice = choice or choose(again.candidates())
        run_dir = runs_to_do(self.phased, self.layouts, choice.checkpoint)[0].recipe.run_dir
        failure = failure_of(run_dir, cause, rank)
        began = begun_at(self.phased.run_dir)
        check_again(run_dir, failure, began)
        say_restart(run_dir, failure, most, began)
        return again.begin(choice)


def train_here(job: Job, max_restarts: int = 0, began: float | None = None) -> int:
    """Train on ranks of this machine; returns an exit code.

    began: when the job did, on the monotonic clock; None for now.
    """
    began = time.monotonic() if began is None else began
    runs, failures, restarts = job.begin(), list[RankError](), 0
    if runs:
        say_begun(job.phased.run_dir, began)
    while True:
        code = _launch(job, runs, began, failures)
        if code != 1 or not failures or restarts == max_restarts:
            return code
        restarts += 1
        cause = failures.pop()
        runs = job.begin_again(max_restarts, str(cause).splitlines()[0], cause.rank)


def _launch(job: Job, runs: Sequence[Run], began: float, failures: list[RankError]) -> int:
    """Do runs until one ends with another exit code than 0, which is returned."""
    for run in runs:
        if job.phased.has_phases:
            print(run, flush=True)
        run_dir = run.recipe.run_dir

        def failed(error: RankError, run_dir: Path = run_dir) -> None:
            say_killed(run_dir, error)
            failures.append(error)

        args = (run.recipe, run.layout, run_dir, run.start, job.phased.run_dir, began)
        target = "mimo.train.entry:run_rank"
        code = launch(target, args, run.layout.world_size, PRELOAD, run_dir, failed)
        if code > 128:
            say_ended(run_dir, signal.Signals(code - 128).name)
        last = final_checkpoint(run_dir, run.recipe.train.steps)
        if code == EXIT_CONTINUE and run is runs[-1] and latest_checkpoint(run_dir) == last:
            return 0  # it was asked to end when it had nothing left to do
        if code != 0:
            return code
    return 0


def _be_a_rank(request: Request, environment: RankEnv, began: float) -> int:
    """Train as a rank that torchrun or srun started; returns an exit code.

    All ranks check the recipe; rank 0 makes the run folders and speaks for all.
    """
    from mimo.train.startup import STARTING, began_at

    STARTING.begin(began_at())
    job, problem = None, None
    try:
        job = request.check(environment)
    except InputError as error:
        problem = error
    from mimo.runtime.meeting import Meeting, Refused

    STARTING.ends("start and imports")
    recipes = [phase.recipe for phase in job.phased.phases] if job else []
    timeouts = [recipe.bridge.timeout_seconds for recipe in recipes]
    meeting = Meeting(environment, max(timeouts, default=_MEETING_SECONDS))
    with ExitStack() as stack:

        def lock() -> list[Path]:
            assert job is not None, "a rank without a job has a problem"
            run_dir = job.phased.run_dir
            begun = has_begun(run_dir, restart)
            patience = _LOCK_SECONDS if begun or follows_another() else 0.0
            stack.enter_context(run_lock(run_dir, patience))
            return (job.again() if begun else job).candidates()

        def begin() -> list[Run]:
            nonlocal began
            assert job is not None, "a rank without a job has a problem"
            run_dir = job.phased.run_dir
            if has_begun(run_dir, restart):
                # train.max_minutes, which rank 0 counts, are those of all attempts together.
                began = time.monotonic() - (time.time() - begun_at(run_dir))
                return job.begin_again(environment.max_restarts, choice=choice)
            if runs := job.begin(choice):
                say_begun(run_dir, began)
            return runs

        try:
            meeting.agree(problem)
            STARTING.ends("meeting")
            assert job is not None, "all ranks end where one has a problem"
            # Each machine counts for itself; one that replaces another begins anew.
            restart = max(map(int, meeting.collect(str(environment.restart))))
            _index_together(job, meeting, environment.world_size)
            choice = _choose_together(meeting.from_rank_0(lock), meeting, environment)
            runs = meeting.from_rank_0(begin)
        except Refused as refused:
            return refused.exit_code
        if not runs:
            meeting.leave()
            return 0
        keep_lock(job.phased.run_dir)
        STARTING.ends("checks")
        return _train_in_place(runs, meeting, began)


def _choose_together(candidates: Sequence[Path], meeting: Meeting, environment: RankEnv) -> Choice:
    """The first good one of checkpoints, each rank having read its share of the files.

    Raises Refused on all ranks if there is none but bad ones.
    """

    def deal(checkpoint: Path) -> list[tuple[list[str], list[Listed]]]:
        problems = wrong_sizes(checkpoint)
        files = [] if problems else listed_files(checkpoint) or []
        return [(problems, own) for own in split_by_bytes(files, environment.world_size)]

    def problems(checkpoint: Path) -> list[str]:
        known, own = meeting.deal(partial(deal, checkpoint))
        if not known:
            unreadable = None
            try:
                known = wrong_checksums(checkpoint, own, lambda _: meeting.get_on())
            except Unreadable as error:
                unreadable = error
            meeting.agree(unreadable)
            found = meeting.collect("\n".join(known))
            known = [line for lines in found for line in lines.splitlines()]
        return known

    choice, refusal = Choice(), None
    try:
        choice = choose(candidates, problems)
    except InputError as error:  # the same on all ranks
        refusal = error
    meeting.agree(refusal)
    return choice


def _index_together(job: Job, meeting: Meeting, num_ranks: int) -> None:
    """Index what is not indexed yet, each rank its share; then check the data.

    Raises Refused on all ranks if that cannot be done, or the data does not fit the recipe.
    """
    recipes = [phase.recipe for phase in job.phased.phases]

    def deal() -> list[list[tuple[int, list[IndexTask]]]]:
        files = dict[Path, int]()  # phases may have shards in common
        tasks = [
            [task for task in own if files.setdefault(task.file, number) == number]
            for number, own in enumerate(job.phased.each(tasks_of))
        ]
        per_task = [shares(own, num_ranks) for own in tasks]
        num = sum(map(len, tasks))
        if num:
            print(f"{num} shards are not indexed yet; the ranks do it, each its share", flush=True)
        return [[*enumerate(own[rank] for own in per_task)] for rank in range(num_ranks)]

    problems, failures = list[str](), list[bool]()
    for number, tasks in meeting.deal(deal):
        if not tasks:
            continue
        try:
            recipe = recipes[number]
            chat, processors = open_tokenizer(recipe), item_processors(recipe)
            build_here(tasks, chat, processors, lambda *_: meeting.get_on())
        except ValueError as error:
            problems.append(str(error))
            failures.append(file_system_failed(error))
        except Exception:  # unexpected, but the others must not wait in vain
            problems.append(traceback.format_exc())
            failures.append(True)
    kind = StartError if all(failures) else InputError
    meeting.agree(kind("\n".join(problems)) if problems else None)
    meeting.from_rank_0(lambda: job.phased.each(lambda recipe: check_data(recipe, build_nothing)))


def _train_in_place(runs: Sequence[Run], meeting: Meeting, began: float) -> int:
    """Do runs on the same ranks until one ends with another exit code than 0, which is returned.

    Does not return if one of them fails.
    """
    from mimo.train.entry import prepare_process
    from mimo.train.local_logs import take_logs

    run_dir = runs[0].recipe.run_dir

    def end(error: BaseException) -> NoReturn:
        take_logs()
        meeting.last_words(error, run_dir)
        # A normal exit of the interpreter could wait for a backend that waits for other ranks.
        os._exit(exit_code_of(error))

    end_with_failed_thread(end)
    code = 0
    try:
        prepare_process(runs[0].layout)
        from mimo.train.rank import join_world, leave_world, train_in_world

        rank = join_world(*(run.recipe for run in runs), store=meeting.store).rank
        for run in runs:
            run_dir = run.recipe.run_dir
            if run.phase.name and rank == 0:
                print(run, flush=True)
            if code := train_in_world(run.recipe, run.layout, run_dir, run.start, began):
                break
        leave_world()
        return code
    except Exception as error:
        end(error)
