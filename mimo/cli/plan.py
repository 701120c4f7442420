"""`mimo plan`: forecast steps and search layouts."""

from pathlib import Path
from typing import Annotated

from typer import Option

from mimo.cli.options import OverridesArgument, RecipeArgument


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
) -> int | None:
    """Forecast a recipe's steps or, with --gpus, search its best layouts. Needs no GPU.

    The data must be indexed (mimo data index). Train the best layout with:
    mimo train RECIPE $(cat FILE), where FILE is that of --write
    """
    from mimo.report.plan import main

    return main(
        recipe,
        overrides or [],
        gpus,
        gpu,
        nodes_of,
        fix or (),
        calibrate or (),
        from_experiment,
        timeline,
        write,
    )
