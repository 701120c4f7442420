"""`mimo experiment FILE`: run what is not done yet, compare, and write what was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mimo.errors import EXIT_CONTINUE
from mimo.experiment.page import problems_table, results_table, verdict, write_page
from mimo.experiment.results import results_of, write_csv
from mimo.experiment.runs import Interrupted, Outcome, Run, run_here
from mimo.experiment.schema import Experiment, read_experiment
from mimo.hf.recipes import load_recipe
from mimo.recipe.schema import Recipe
from mimo.report.page import show
from mimo.step.prepare import prepare
from mimo.train.run_lock import run_lock


def main(path: Path, overrides: Sequence[str]) -> int:
    """Returns 0 if all layouts ran and follow the reference, EXIT_CONTINUE if told to end, else 1.

    Raises InputError for a wrong file, or a recipe that no layout can use.
    """
    experiment = read_experiment(path, overrides)
    recipe = load_recipe(experiment.recipe, experiment.shared)
    folder = Path(recipe.train.run_dir) / experiment.name
    runs = [Run(folder, *one) for one in experiment.rounds]
    with run_lock(folder):
        if recipe.data.prepare is not None:
            prepare(recipe)
        outcomes = list[Outcome]()
        try:
            for outcome in run_here(runs, experiment.recipe, recipe.train.steps):
                outcomes.append(outcome)
        except Interrupted as interrupted:
            print(interrupted, file=sys.stderr)
            return EXIT_CONTINUE
        return _tell(experiment, recipe, outcomes, folder)


def _tell(experiment: Experiment, recipe: Recipe, outcomes: Sequence[Outcome], folder: Path) -> int:
    precision = recipe.train.precision
    results = results_of(experiment, outcomes, precision)
    show(results_table(results, experiment.reference), problems_table(results))
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "results.csv", results)
    write_page(experiment, results, folder, precision, recipe.train.steps)
    print(verdict(results, experiment.reference))
    return int(any(one.state != "follows" for one in results))
