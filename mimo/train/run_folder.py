"""The folder of a run: checks that it can be made, and makes it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mimo.checkpoint.folder import resumable
from mimo.checkpoint.resume import FromScratch, Run
from mimo.config.phases import PhasedRecipe
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from mimo.train.run_files import CRASH, HANG, LAUNCH, RANKS


def check_run_dir(phased: PhasedRecipe) -> None:
    """Raise RecipeError unless the run's folder can be made; one process calls it."""
    parent = phased.run_dir.parent
    try:
        made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=parent, prefix=".mimo-"):
            pass
        for folder in made:  # what is wrong beside it may yet keep the run from beginning
            folder.rmdir()
    except OSError as error:
        message = f"no folder can be made in {parent} ({error.strerror}); name another"
        recipe = phased.phases[0].recipe
        raise RecipeError(recipe.problem(("train", "run_dir"), message)) from error


def make_run_dir(recipe: Recipe, resumes: bool) -> Path:
    """Make the run folder, with the resolved recipe in it; an older run of that name moves aside.

    The folder `launch` of a job that was started from there stays where it is.

    resumes: leave an existing folder where it is. Returns the folder.
    """
    run_dir = recipe.run_dir
    if not resumes:
        _step_aside(run_dir, recipe.path)
    run_dir.mkdir(parents=True, exist_ok=True)
    # A rank that failed in an earlier start has left word of it, which must not be taken for news.
    shutil.rmtree(run_dir / RANKS, ignore_errors=True)
    (run_dir / CRASH).unlink(missing_ok=True)
    if (hang := run_dir / HANG).exists():
        moved_aside(hang)
    (run_dir / "recipe.yaml").write_text(recipe.to_yaml())
    return run_dir


def make_run_dirs(phased: PhasedRecipe, runs: Sequence[Run], resumes: bool) -> None:
    """Make the folders of all runs that a job has to do.

    resumes: whether the job was begun before. Then only the folders of runs that start over, or
    from a checkpoint of elsewhere, move aside, with their checkpoints; a run that ended before its
    first checkpoint starts again in its folder.
    """
    if phased.has_phases:
        if not resumes:
            _step_aside(phased.run_dir, phased.source.path)
        phased.run_dir.mkdir(parents=True, exist_ok=True)
        (phased.run_dir / "recipe.yaml").write_text(phased.to_yaml())
    for run in runs:
        has_nothing = resumes and not resumable(run.recipe.run_dir)
        make_run_dir(run.recipe, resumes=run.resumes or has_nothing)
    if resumes and isinstance(runs[0].start, FromScratch):
        print(f"no checkpoint in {phased.run_dir} yet: starting anew")
    elif resumes and not phased.has_phases:
        print(f"the run {runs[0].begins}")
    print(f"run folder: {phased.run_dir}", flush=True)


def say_saves(runs: Sequence[Run]) -> None:
    """Print how often each run saves a checkpoint."""
    for run in runs:
        phase, train = f"{run.phase.title}: " if run.phase.name else "", run.recipe.train
        every = train.save_interval or train.steps
        often = f"every {every} steps" if every < train.steps else "after the last step only"
        print(f"{phase}saves a checkpoint {often}", flush=True)


def _step_aside(run_dir: Path, recipe: Path | None) -> None:
    """Move an older run away, but not what the present job has put there before it begins."""
    if not run_dir.exists() or os.listdir(run_dir) == [LAUNCH]:
        return
    aside = moved_aside(run_dir)
    print(f"the previous run moved to {aside}")
    launch = (run_dir / LAUNCH).resolve()
    if recipe is not None and recipe.resolve().is_relative_to(launch):
        run_dir.mkdir()
        (aside / LAUNCH).rename(launch)


def moved_aside(folder: Path) -> Path:
    """Rename a folder to the first free name with a number; returns that."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)
