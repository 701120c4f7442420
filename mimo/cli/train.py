"""`mimo prepare`, `mimo train`, and `mimo quickstart`, which does both and evaluates."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.cli._shared import (
    ClusterOption,
    NumRanksOption,
    OverridesArgument,
    RecipeArgument,
)


def prepare(recipe: RecipeArgument, overrides: OverridesArgument = None) -> int | None:
    """Write the example data and the index that a recipe needs."""
    from mimo.model.prepare import main as run

    return run(recipe, overrides or [])


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
    resume_from: Annotated[Path | None, typer.Option(help="Continue from this checkpoint.")] = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="How often all ranks start again when one of them fails."),
    ] = 0,
    cluster: ClusterOption = None,
) -> int | None:
    """Train a recipe on this machine, or as one rank of a torchrun or srun job."""
    from mimo.train.main import main as run

    return run(
        recipe,
        overrides or [],
        num_ranks,
        resume=resume,
        resume_from=resume_from,
        max_restarts=max_restarts,
        site=cluster,
    )


def quickstart(overrides: OverridesArgument = None) -> int | None:
    """Prepare, train and evaluate the small example that runs without a GPU."""
    from mimo.generate.quickstart import main as run

    return run(overrides or [])
