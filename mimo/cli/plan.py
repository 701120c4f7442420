"""`mimo plan`: forecast steps and search layouts."""

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from mimo.cli.options import OverridesArgument, RecipeArgument
from mimo.errors import InputError


def plan(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    gpus: Annotated[int | None, Option(min=1, help="Search the layouts on this many GPUs.")] = None,
    gpu: Annotated[
        str, Option(help="h100, h200, b200, a100-40, a100-80, or GiB of memory.")
    ] = "h100",
    nodes_of: Annotated[int, Option(min=1, help="GPUs per node.")] = 8,
    fix: Annotated[
        list[str] | None,
        Option(help="A value that the search keeps, such as language.grid.tp=8; repeatable."),
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        Option(
            metavar="RUN|here",
            help="A run folder to fit the rates to, or `here` for a short run on this machine; "
            "repeatable.",
        ),
    ] = None,
    from_experiment: Annotated[
        Path | None, Option("--from", help="An experiment folder to fit the rates to.")
    ] = None,
    timeline: Annotated[
        Path | None, Option(help="A folder for timeline.png, and trace.json for Perfetto.")
    ] = None,
    write: Annotated[
        Path | None, Option(help="A file for the overrides of the best layout.")
    ] = None,
) -> None:
    """Forecast a recipe's steps or, with --gpus, search its best layouts. Needs no GPU.

    The data must be indexed (mimo data index). Train the best layout with:
    mimo train RECIPE $(cat FILE), where FILE is that of --write
    """
    from mimo.checkpoint.hf.recipes import load_phases
    from mimo.model.recipe_checks import check_recipe
    from mimo.plan.forecast import dataset_of_index, forecast
    from mimo.plan.rates import parse_gpu, rates_of_gpu
    from mimo.plan.search import search
    from mimo.report import plan as report
    from mimo.report import tables

    if gpus is None and (fix or write is not None):
        raise InputError("--fix and --write belong to a search; give --gpus as well")
    device = parse_gpu(gpu)
    phase, *others = load_phases(recipe, overrides or []).phases
    if others:
        print(f"planning the first phase, {phase.title}")
    dataset, assumed = dataset_of_index(phase.recipe, recipe), rates_of_gpu(device, nodes_of)
    rates = report.fitted_rates(phase.recipe, assumed, calibrate or [], from_experiment)
    print(f"rates: {rates.source}")
    if gpus is None:
        result = forecast(phase.recipe, check_recipe(phase.recipe, None), dataset, rates)
        tables.show(report.forecast_table(result), report.roles_table(result))
    else:
        fixed = report.parse_fixes(recipe, overrides or [], fix or [])
        searched = search(phase.recipe, dataset, rates, device, gpus, fixed)
        counts = ", ".join(f"{count:,} {name}" for name, count in searched.counts.items())
        print(f"layouts on {gpus} GPUs: {counts}")
        tables.show(report.choices_table(searched.choices, device.memory))
        best, result = searched.choices[0].overrides, searched.choices[0].forecast
        lines = [f"{key}={json.dumps(value)}" for key, value in best.items()]
        print(f"overrides of the first: {' '.join(lines)}")
        if write is not None:
            tables.write(write, "".join(f"{line}\n" for line in lines))
    if timeline is not None:
        report.write_timeline(result.median_step.timeline, timeline)
