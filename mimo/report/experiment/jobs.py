"""Runs of an experiment as an array of cluster jobs, whose results a later call collects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mimo.errors import InputError
from mimo.report.experiment.runs import Outcome, Run, check_layouts, make_ready
from mimo.report.status import look
from mimo.slurm.script import Job, prepare
from mimo.slurm.submit import submit as submit_one
from mimo.slurm.submit import submit_array
from mimo.train.run_files import LAUNCH


def submit(runs: Sequence[Run], path: Path, cluster: Path | None) -> list[Outcome]:
    """Submit what is not done and cannot be in the queue; returns the outcomes of what is refused.

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
    """What is said of the job that still has to do a run; empty if there is none."""
    if not was_submitted(run):
        return ""
    view = look(run.run_dir)
    # Not whoever has the lock: of a job that was killed on its node, the file still tells.
    goes_on = view.may_be_queued or any(one.alive for one in view.runs)
    return next(iter(view.jobs[-1:]), "a job") if goes_on else ""


def was_submitted(run: Run) -> bool:
    """Whether its folder is that of a job."""
    return (run.run_dir / LAUNCH / "jobs.jsonl").exists()


def collect(run: Run, path: Path) -> Outcome | None:
    """What is known of a run, submitted or not; None if it is to be run here."""
    if job := waits_for(run):
        return Outcome(run, [], job=job)
    outcome = make_ready(run, path)
    if outcome is None and was_submitted(run):
        see = f"see `mimo status {run.run_dir}`"
        message = f"its job ended before the run did; {see}, and --submit it"
        return Outcome(run, run.records(), message)
    return outcome
