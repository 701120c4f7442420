"""`mimo experiment FILE`: run what is not done yet, compare, and write what was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mimo.checkpoint.hf.recipes import load_phases, load_recipe
from mimo.config.schema import Recipe
from mimo.errors import EXIT_CONTINUE
from mimo.model.recipe_checks import check_data, check_recipe, check_room
from mimo.report.experiment.jobs import collect, submit, was_submitted
from mimo.report.experiment.page import problems_table, results_table, verdict, write_page
from mimo.report.experiment.results import results_of, write_csv
from mimo.report.experiment.runs import Interrupted, Outcome, Run, check_layouts, run_here
from mimo.report.experiment.schema import Experiment, read_experiment
from mimo.report.page import show
from mimo.runtime.run_lock import run_lock


def main(
    path: Path,
    overrides: Sequence[str],
    *,
    submitting: bool = False,
    cluster: Path | None = None,
) -> int:
    """Returns 0 if all layouts ran and follow the reference, or were submitted; else 1.

    EXIT_CONTINUE where the same call has more to do later: it was told to end, or jobs are not
    done. submitting: as jobs, instead of running here. cluster: a file of their `cluster:` keys.
    Raises InputError for a wrong file, and for layouts that cannot run, before the first run.
    """
    experiment = read_experiment(path, overrides)
    recipe = load_recipe(experiment.recipe, experiment.shared)
    folder = Path(recipe.train.run_dir) / experiment.name
    runs = [Run(folder, *one) for one in experiment.rounds]
    with run_lock(folder):
        if submitting:
            for one in (refused := submit(runs, experiment.recipe, cluster)):
                print(f"{one.run.name}: {one.error}", file=sys.stderr)
            print("the same command without --submit collects the results")
            return int(bool(refused))
        here = [run for run in runs if not was_submitted(run)]
        check_layouts(here, experiment.recipe, partial(_check_here, experiment.recipe))
        known = partial(collect, path=experiment.recipe)
        try:
            outcomes = [*run_here(runs, recipe.train.steps, known)]
        except Interrupted as interrupted:
            print(interrupted, file=sys.stderr)
            return EXIT_CONTINUE
        return _tell(experiment, recipe, outcomes, folder)


def _check_here(path: Path, run: Run) -> None:
    """Check a run as `mimo train` does, but for its folder. path: of the recipe.

    Raises RecipeError with all problems.
    """
    phased = load_phases(path, run.overrides)
    layouts = phased.each(lambda recipe: check_recipe(recipe, None))
    check_room(phased, layouts, None)
    phased.each(check_data)


def _tell(experiment: Experiment, recipe: Recipe, outcomes: Sequence[Outcome], folder: Path) -> int:
    precision = recipe.train.precision
    results = results_of(experiment, outcomes, precision)
    show(results_table(results, experiment.reference), problems_table(results))
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "results.csv", results)
    write_page(experiment, results, folder, precision, recipe.train.steps)
    print(verdict(results, experiment.reference))
    states = {one.state for one in results}
    if states & {"failed", "differs"}:
        return 1
    return EXIT_CONTINUE if "not done yet" in states else int(states != {"follows"})
