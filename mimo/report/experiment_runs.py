"""The runs of an experiment: train them here in alternation, or as an array of cluster jobs.

A run is a folder, a resolved recipe beside it and two files with what its command printed. These
tell whether it is done, so an interrupted experiment continues.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.errors import EXIT_CONTINUE, InputError, RecipeError, StartError
from mimo.report.experiment_file import Layout, Record
from mimo.report.status import look, plain
from mimo.runtime.run_files import LAUNCH, METRICS, json_lines
from mimo.runtime.signals import Signalled, signal_handlers
from mimo.slurm.script import Job, prepare
from mimo.slurm.submit import submit as submit_one
from mimo.slurm.submit import submit_array
from mimo.train.run_folder import moved_aside

_POLL_SECONDS = 0.5
_LAST_BYTES = 1 << 16  # of metrics; far more than a line has
_MAX_ERROR = 300  # characters of its first line


@dataclass(frozen=True)
class Run:
    """One run of a layout. folder: the experiment's. repeat: its number, from 1."""

    folder: Path
    layout: Layout
    repeat: int

    @property
    def name(self) -> str:
        """The name of the run and of its folder."""
        return f"{self.layout.name}.{self.repeat}"

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self.folder / self.name

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe of its last start."""
        return self.folder / "recipes" / f"{self.name}.yaml"

    @property
    def log(self) -> Path:
        """The stdout of its command."""
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def errors(self) -> Path:
        """The stderr of its command."""
        return self.log.with_suffix(".err")

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides of the layout, and the name and folder of the run."""
        place = (f"name={self.name}", f"train.run_dir={json.dumps(str(self.folder))}")
        return (*self.layout.overrides, *place)

    def recipe(self, path: Path) -> Recipe:
        """Return the run's recipe from the recipe at ``path``. Raises RecipeError."""
        return load_recipe(path, self.overrides)

    def is_done(self, path: Path) -> bool:
        """Check if the run ended with the recipe as it is now. Raises RecipeError."""
        recipe = self.recipe(path)
        if not self.recipe_file.exists():
            return False
        same = self.recipe_file.read_text(encoding="utf-8") == recipe.to_yaml()
        return same and len(self.records()) == recipe.train.steps

    def records(self) -> list[Record]:
        """Return the training steps in its metrics; the last record of a repeated step counts."""
        lines = json_lines(self.run_dir / METRICS)
        records = {line["step"]: line for line in lines if "loss" in line}
        return [records[step] for step in sorted(records)]


@dataclass(frozen=True)
class Outcome:
    """The state of a run.

    error: the first line of what failed, or "". job: SLURM's line about the job that still has to
    train it, or "".
    """

    run: Run
    records: list[Record]
    error: str = ""
    job: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the records are complete."""
        return not self.error and not self.job


def check_layouts(runs: Sequence[Run], path: Path, check: Callable[[Run], object]) -> None:
    """Check each layout that has runs left, before the first run starts.

    path: of the recipe. check: raises RecipeError for a layout that cannot run.
    Raises RecipeError with the refusals of all layouts; a line names the layouts that it is about.
    """
    refused, to_do = dict[str, list[str]](), dict[str, Run]()
    for run in runs:
        if run.layout.name in to_do:
            continue
        try:
            if not run.is_done(path):
                to_do[run.layout.name] = run
                check(run)
        except StartError:
            continue  # the file system may answer when the run starts
        except InputError as error:
            to_do[run.layout.name] = run
            for problem in error.problems if isinstance(error, RecipeError) else [str(error)]:
                refused.setdefault(problem, []).append(run.layout.name)
    if refused:
        lines = [f"{', '.join(names)}: {problem}" for problem, names in refused.items()]
        raise RecipeError(*lines)


def make_ready(run: Run, path: Path) -> Outcome | None:
    """Return the outcome of a run that needs no start; None if it must be started.

    Then its recipe is in place, and a run with an older recipe has been moved aside.
    """
    try:
        recipe = run.recipe(path)
    except InputError as error:
        return Outcome(run, [], str(error).partition("\n")[0])
    text, before = recipe.to_yaml(), None
    if run.recipe_file.exists():
        before = run.recipe_file.read_text(encoding="utf-8")
    if before != text:
        if run.run_dir.exists():
            aside = moved_aside(run.run_dir)
            print(f"{run.name}: its recipe has changed; the run with the old one is now {aside}")
        run.recipe_file.parent.mkdir(parents=True, exist_ok=True)
        run.recipe_file.write_text(text, encoding="utf-8")
        return None
    records = run.records()
    return Outcome(run, records) if len(records) == recipe.train.steps else None


def outcome_of(run: Run, code: int, steps: int) -> Outcome:
    """Return the outcome of a run that ended with an exit code. steps: the planned ones."""
    records = run.records()
    if code in (0, EXIT_CONTINUE):
        early = f"it ended with exit code {code} after {len(records)} of {steps} steps"
        return Outcome(run, records, early if len(records) != steps else "")
    told = run.errors.read_text(encoding="utf-8", errors="replace") if run.errors.exists() else ""
    lines = [line for line in told.splitlines() if line.strip()]
    # Wrong input has one line per problem. A failed rank's traceback ends with the cause.
    causes = [line for line in lines if line.startswith("rank ")]
    line = (lines[:1] if code == 2 else causes[-1:] or lines[-1:]) or [f"exit code {code}"]
    return Outcome(run, records, plain(line[0], _MAX_ERROR))


class Interrupted(Exception):
    """The experiment was asked to stop; the same call continues it."""


def run_here(
    runs: Sequence[Run], steps: int, known: Callable[[Run], Outcome | None]
) -> Iterator[Outcome]:
    """Train what is not done yet, one run after the other; yield the outcome of each.

    steps: of each run. known: returns the outcome of a run that needs no start, else None.
    Raises Interrupted when a run was asked to stop.
    """
    console = Console(soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("")
        for number, run in enumerate(runs, start=1):
            title = f"run {number} of {len(runs)}, {run.name}"
            outcome = known(run)
            if outcome is None:
                bar.reset(task, description=title, total=steps)
                began = time.monotonic()
                outcome = outcome_of(run, _train(run, bar, task), steps)
                took = f"{time.monotonic() - began:.0f} s"
            else:
                took = "before"
            told = outcome.error or outcome.job or f"done ({took})"
            console.print(f"{title}: {told}", markup=False, highlight=False)
            yield outcome


def _train(run: Run, bar: Progress, task: TaskID) -> int:
    """Run `mimo train`, which continues from its checkpoint if it has one; return the exit code.

    Signals to this process are passed on. Raises Interrupted.
    """
    run.log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mimo.cli.main", "train", str(run.recipe_file), "--resume"]
    with run.log.open("w") as log, run.errors.open("w") as errors:
        # In a new session: Ctrl-C would reach it twice, and the second signal ends it at once.
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with signal_handlers() as asked:
                while child.poll() is None and not asked:
                    time.sleep(_POLL_SECONDS)
                    bar.update(task, completed=_steps(run.run_dir / METRICS))
                if asked:
                    child.terminate()  # it finishes its step and saves
                child.wait()
                is_asked = bool(asked)
        except Signalled:
            child.terminate()
            child.wait()
            is_asked = True
    if is_asked:
        raise Interrupted(f"{run.name} was interrupted; the same command goes on from there")
    return child.returncode


def _steps(metrics: Path) -> int:
    """Return the steps done, read from the end of the file."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _LAST_BYTES))
        found = re.findall(rb'"step": (\d+), "loss"', file.read())
    return int(found[-1]) + 1 if found else 0


def submit(runs: Sequence[Run], path: Path, cluster: Path | None) -> list[Outcome]:
    """Submit the runs that are neither done nor queued; return the outcomes of refused runs.

    path: of the recipe. cluster: a file of `cluster:` keys. Raises RecipeError for layouts that
    cannot run, before anything is submitted.
    """
    groups, refused = dict[tuple[str, ...], dict[Run, Job]](), list[Outcome]()
    waiting = {run: job for run in runs if (job := waits_for(run))}
    for run, job in waiting.items():
        print(f"{run.name}: not submitted again; {job}")
    free = [run for run in runs if run not in waiting]
    check_layouts(free, path, lambda run: prepare(path, run.overrides, cluster))
    for run in free:
        if (known := make_ready(run, path)) is not None:
            refused += [known] if known.error else []
            continue
        try:
            job = prepare(run.recipe_file, [], cluster)
            # SLURM may refuse some nodes, and has no arrays of heterogeneous jobs.
            alone = run.name if len(job.placement.components) > 1 else ""
            kind = (alone, *job.directives())
        except InputError as error:
            refused.append(Outcome(run, [], str(error).splitlines()[0]))
            continue
        groups.setdefault(kind, {})[run] = job
    for (alone, *_), jobs in groups.items():
        own = [*jobs.values()]
        try:
            numbers = [submit_one(own[0])] if alone else submit_array(own)
        except InputError as error:
            refused += [Outcome(run, [], str(error).splitlines()[0]) for run in jobs]
            continue
        for run, number in zip(jobs, numbers, strict=True):
            print(f"{run.name}: job {number}")
    return refused


def waits_for(run: Run) -> str:
    """Return SLURM's line about the job that still has to train a run; "" without one."""
    if not was_submitted(run):
        return ""
    view = look(run.run_dir)
    # Not by the lock of the run: its file survives a job that was killed.
    goes_on = view.may_be_queued or any(one.alive for one in view.runs)
    return next(iter(view.jobs[-1:]), "a job") if goes_on else ""


def was_submitted(run: Run) -> bool:
    """Whether a job of the run was submitted."""
    return (run.run_dir / LAUNCH / "jobs.jsonl").exists()


def collect(run: Run, path: Path) -> Outcome | None:
    """Return the outcome of a run, submitted or not; None if it must be trained here."""
    if job := waits_for(run):
        return Outcome(run, [], job=job)
    outcome = make_ready(run, path)
    if outcome is None and was_submitted(run):
        see = f"see `mimo status {run.run_dir}`"
        message = f"its job ended before the run did; {see}, and --submit it"
        return Outcome(run, run.records(), message)
    return outcome
