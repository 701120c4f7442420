"""`mimo verify`: a layout against one rank."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mimo.commands._shared import (
    NumRanksOption,
    OverridesArgument,
    RecipeArgument,
    readable_errors,
)


class LayoutsChoice(StrEnum):
    """Which layouts `verify` runs."""

    RECIPE = "recipe"
    SWEEP = "sweep"


class PrecisionChoice(StrEnum):
    """What `verify` computes in."""

    FP32 = "fp32"
    FP64 = "fp64"


@readable_errors
def verify(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    max_ranks: Annotated[
        int,
        typer.Option(
            "--max-ranks", min=1, max=1024, help="Shrink larger layouts to this many ranks."
        ),
    ] = 8,
    full: Annotated[
        bool, typer.Option("--full", help="Keep the layout as it is; only the model is tiny.")
    ] = False,
    layouts: Annotated[
        LayoutsChoice, typer.Option("--layouts", help="The recipe's own, or the built-in matrix.")
    ] = LayoutsChoice.RECIPE,
    precision: Annotated[
        PrecisionChoice, typer.Option("--precision", help="fp64 compares to 1e-10, fp32 to 1e-5.")
    ] = PrecisionChoice.FP32,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write every error to this file.")
    ] = None,
) -> int | None:
    """Compare a recipe's layout with one rank: loss, every gradient, weights after two steps.

    Runs a scaled-down copy of the model on real ranks of the CPU. Exit code 1 and the first
    parameter that differs when they are not equal.
    """
    from mimo.verify.main import main as run

    sweep = layouts is LayoutsChoice.SWEEP
    return run(recipe, overrides or [], num_ranks, max_ranks, full, sweep, precision.value, json)
