"""`mimo data`: what can be done with a recipe's samples before a job."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.commands._shared import NumRanksOption, OverridesArgument, RecipeArgument, readable_errors


@readable_errors
def index(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, max=2**12, help="Processes; default: the cores."),
    ] = None,
) -> int | None:
    """Index the shards of all splits that are not indexed yet; started again, it goes on.

    Only new and changed shards are read. Other recipes' indexes of the same shards stay.
    """
    from mimo.step.prepare import index_main as run

    return run(recipe, overrides or [], workers)


@readable_errors
def data_doctor(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    page: Annotated[Path, typer.Option("--page", help="Where the HTML page goes.")] = Path(
        "runs/data_doctor.html"
    ),
    json: Annotated[
        Path | None, typer.Option("--json", help="Write every figure to this file.")
    ] = None,
) -> int | None:
    """Look at the data before a job: one page of figures, bad samples and samples to look at."""
    from mimo.step.doctor_page import main as run

    return run(recipe, overrides or [], num_ranks, page, json)
