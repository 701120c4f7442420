"""`mimo data`: what can be done with a recipe's samples before a job."""

from typing import Annotated

import typer

from mimo.commands._shared import OverridesArgument, RecipeArgument, readable_errors


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
