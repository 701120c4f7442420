"""The runs of an experiment: train them here in alternation, or as an array of cluster jobs.

A run is a folder, a resolved recipe beside it and two files with what its command printed. These
tell whether it is done, so an interrupted experiment continues.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.errors import EXIT_CONTINUE, InputError, RecipeError, StartError
from mimo.report.runs import Curve, read_curves
from mimo.report.status import one_line, read_view
from mimo.runtime.run_files import LAUNCH, METRICS
from mimo.runtime.signals import Signalled, signal_handlers
from mimo.slurm.script import Job, prepare
from mimo.slurm.submit import submit as submit_one
from mimo.slurm.submit import submit_array
from mimo.train.run_folder import moved_aside

_POLL_SECONDS = 0.5
_MAX_ERROR = 300  # characters of its first line


@dataclass(frozen=True)
class Run:
    """One run of a layout of the recipe at ``path``. folder: the experiment's. repeat: from 1."""

    folder: Path
    layout: str
    repeat: int
    path: Path = Path()
    layout_overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.layout}.{self.repeat}"

    @property
    def run_dir(self) -> Path:
        return self.folder / self.name

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe of the last start."""
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
        return (*self.layout_overrides, *place)

    def recipe(self) -> Recipe:
        return load_recipe(self.path, self.overrides)

    @property
    def was_submitted(self) -> bool:
        return (self.run_dir / LAUNCH / "jobs.jsonl").exists()

    def started_with(self, recipe: Recipe) -> bool:
        path = self.recipe_file
        return path.exists() and path.read_text(encoding="utf-8") == recipe.to_yaml()

    def curves(self) -> dict[str, Curve]:
        return read_curves(self.run_dir / METRICS)


@dataclass(frozen=True)
class Outcome:
    """The state of a run, and its metrics.

    error: the first line of what failed, or "". job: SLURM's line about a job that waits, or "".
    """

    run: Run
    curves: Mapping[str, Curve]
    error: str = ""
    job: str = ""

    @property
    def is_done(self) -> bool:
        return not self.error and not self.job


def num_steps(curves: Mapping[str, Curve]) -> int:
    """Return the number of training steps in a run's metrics."""
    return len(curves["loss"].steps) if "loss" in curves else 0


def check_layouts(runs: Sequence[Run], check: Callable[[Run], object]) -> None:
    """Check each layout that has runs left. check: raises RecipeError for one that cannot run.

    Raises RecipeError with the refusals of all layouts; a line names the layouts that it is about.
    """
    refused, to_do = dict[str, list[str]](), set[str]()
    for run in runs:
        if (name := run.layout) in to_do:
            continue
        try:
            recipe = run.recipe()
            if not run.started_with(recipe) or num_steps(run.curves()) != recipe.train.steps:
                to_do.add(name)
                check(run)
        except StartError:
            continue  # the file system may answer when the run starts
        except InputError as error:
            to_do.add(name)
            for problem in error.problems if isinstance(error, RecipeError) else [str(error)]:
                refused.setdefault(problem, []).append(name)
    if refused:
        raise RecipeError(*(f"{', '.join(names)}: {why}" for why, names in refused.items()))


def make_ready(run: Run) -> Outcome | None:
    """Return a run's outcome, or None once it is ready to start, an older run moved aside."""
    try:
        recipe = run.recipe()
    except InputError as error:
        return Outcome(run, {}, str(error).partition("\n")[0])
    if run.started_with(recipe):
        curves = run.curves()
        return Outcome(run, curves) if num_steps(curves) == recipe.train.steps else None
    if run.run_dir.exists():
        aside = moved_aside(run.run_dir)
        print(f"{run.name}: its recipe has changed; the run with the old one is now {aside}")
    run.recipe_file.parent.mkdir(parents=True, exist_ok=True)
    run.recipe_file.write_text(recipe.to_yaml(), encoding="utf-8")
    return None


def outcome_of(run: Run, code: int, steps: int) -> Outcome:
    """Return the outcome of a run that ended with an exit code. steps: the planned ones."""
    curves = run.curves()
    if code in (0, EXIT_CONTINUE):
        done = num_steps(curves)
        early = f"it ended with exit code {code} after {done} of {steps} steps"
        return Outcome(run, curves, early if done != steps else "")
    text = run.errors.read_text(encoding="utf-8", errors="replace") if run.errors.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    # Wrong input has one line per problem. A failed rank's traceback ends with the cause.
    causes = [line for line in lines if line.startswith("rank ")]
    line = (lines[:1] if code == 2 else causes[-1:] or lines[-1:]) or [f"exit code {code}"]
    return Outcome(run, curves, one_line(line[0], _MAX_ERROR))


class Interrupted(Exception):
    """The experiment was asked to stop; the same call continues it."""


def run_here(runs: Sequence[Run], steps: int) -> Iterator[Outcome]:
    """Train the runs that are not done, in order; yield the outcome of each. Raises Interrupted."""
    for number, run in enumerate(runs, start=1):
        title = f"run {number} of {len(runs)}, {run.name}"
        outcome = collect(run)
        if outcome is None:
            print(f"{title}: training, see {run.log}", flush=True)
            outcome = outcome_of(run, _train(run), steps)
        print(f"{title}: {outcome.error or outcome.job or 'done'}", flush=True)
        yield outcome


def _train(run: Run) -> int:
    """Run `mimo train`, pass signals on, and return its exit code. Raises Interrupted."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mimo.cli.main", "train", str(run.recipe_file), "--resume"]
    with run.log.open("w") as log, run.errors.open("w") as errors:
        # In a new session: Ctrl-C would reach it twice, and the second signal ends it at once.
        child = subprocess.Popen(
            command, stdout=log, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            with signal_handlers() as requests:
                while child.poll() is None and not requests:
                    time.sleep(_POLL_SECONDS)
                is_interrupted = bool(requests)
                if is_interrupted:
                    child.terminate()  # it finishes its step and saves
                child.wait()
        except Signalled:
            is_interrupted = True
            child.terminate()
            child.wait()
    if is_interrupted:
        raise Interrupted(f"{run.name} was interrupted; the same command goes on from there")
    return child.returncode


def submit(runs: Sequence[Run], cluster: Path | None) -> list[Outcome]:
    """Submit the runs that are neither done nor queued; return the outcomes of refused runs.

    cluster: a file of `cluster:` keys. Raises RecipeError before anything is submitted.
    """
    groups, refused = dict[tuple[str, ...], dict[Run, Job]](), list[Outcome]()
    waiting = {run: job for run in runs if (job := waits_for(run))}
    for run, job in waiting.items():
        print(f"{run.name}: not submitted again; {job}")
    free = [run for run in runs if run not in waiting]
    check_layouts(free, lambda run: prepare(run.path, run.overrides, cluster))
    for run in free:
        if (known := make_ready(run)) is not None:
            refused += [known] if known.error else []
            continue
        job = prepare(run.recipe_file, [], cluster)
        # SLURM has no arrays of heterogeneous jobs.
        alone = run.name if len(job.placement.components) > 1 else ""
        groups.setdefault((alone, *job.directives()), {})[run] = job
    for (alone, *_), jobs in groups.items():
        prepared = [*jobs.values()]
        try:
            numbers = [submit_one(prepared[0])] if alone else submit_array(prepared)
        except InputError as error:
            refused += [Outcome(run, {}, str(error).partition("\n")[0]) for run in jobs]
            continue
        for run, number in zip(jobs, numbers, strict=True):
            print(f"{run.name}: job {number}")
    return refused


def waits_for(run: Run) -> str:
    """Return SLURM's line about the job that still has to train a run; "" without one."""
    if not run.was_submitted:
        return ""
    view = read_view(run.run_dir)
    # Not by the lock of the run: its file survives a job that was killed.
    goes_on = view.may_be_queued or any(phase.alive for phase in view.runs)
    return next(iter(view.jobs[-1:]), "a job") if goes_on else ""


def collect(run: Run) -> Outcome | None:
    """Return the outcome of a run, submitted or not; None if it must be trained here."""
    if job := waits_for(run):
        return Outcome(run, {}, job=job)
    outcome = make_ready(run)
    if outcome is None and run.was_submitted:
        see = f"see `mimo status {run.run_dir}`"
        message = f"its job ended before the run did; {see}, and --submit it"
        return Outcome(run, run.curves(), message)
    return outcome
