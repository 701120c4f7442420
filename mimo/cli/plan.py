"""`mimo plan`: forecast steps and search layouts."""

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
    from mimo.plan.rates import parse_gpu, rates_of_gpu
    from mimo.plan.search import searched_keys
    from mimo.report import plan as report

    if gpus is None and (fix or write is not None):
        raise InputError("--fix and --write belong to a search; give --gpus as well")
    device = parse_gpu(gpu)
    phase, *others = load_phases(recipe, overrides or []).phases
    if others:
        print(f"planning the first phase, {phase.title}")
    dataset = report.dataset_of_index(phase.recipe, recipe)
    rates = rates_of_gpu(device, nodes_of)
    rates = report.fitted_rates(phase.recipe, rates, calibrate or [], from_experiment)
    print(f"rates: {rates.source}")
    if gpus is None:
        result = report.print_forecast(phase.recipe, dataset, rates)
    else:
        known = searched_keys(phase.recipe)
        fixed = report.parse_fixes(recipe, overrides or [], fix or [], known)
        best = report.print_search(phase.recipe, dataset, rates, device, gpus, fixed, write)
        result = best.forecast
    if timeline is not None:
        report.write_timeline(result.median_step.timeline, timeline)
