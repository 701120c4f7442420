"""`mimo train`."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.commands._shared import (
    NumRanksOption,
    OverridesArgument,
    RecipeArgument,
    readable_errors,
)


@readable_errors
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the run's latest checkpoint; without any, start anew."
        ),
    ] = False,
    resume_from: Annotated[
        Path | None, typer.Option("--resume-from", help="Continue from this checkpoint.")
    ] = None,
) -> int | None:
    """Train a recipe on this machine, or as one rank of a torchrun or srun job."""
    from mimo.train.main import main as run

    return run(recipe, overrides or [], num_ranks, resume=resume, resume_from=resume_from)
