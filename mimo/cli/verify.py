"""`mimo verify` and `mimo parity`: a layout against one rank, transformers or another engine."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mimo.cli._shared import (
    JsonOption,
    NumRanksOption,
    OverridesArgument,
    RecipeArgument,
    number,
)


def verify(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    max_ranks: Annotated[
        int, typer.Option(min=1, max=1024, help="Shrink larger layouts to this many ranks.")
    ] = 8,
    full: Annotated[
        bool, typer.Option("--full", help="Keep the layout as it is; only the model is tiny.")
    ] = False,
    layouts: Annotated[
        Literal["recipe", "sweep"], typer.Option(help="The recipe's own, or the built-in matrix.")
    ] = "recipe",
    precision: Annotated[
        Literal["fp32", "fp64"], typer.Option(help="fp64 compares to 1e-10, fp32 to 1e-5.")
    ] = "fp32",
    json: JsonOption = None,
) -> int | None:
    """Compare a recipe's layout with one rank: loss, every gradient, weights after two steps.

    Runs a scaled-down copy of the model on real ranks of the CPU. Exit code 1 and the first
    parameter that differs when they are not equal.
    """
    from mimo.check.verify.main import main as run

    sweep = layouts == "sweep"
    return run(recipe, overrides or [], num_ranks, max_ranks, full, sweep, precision, json)


def parity(
    checkpoint: Annotated[Path, typer.Argument(help="A folder in Hugging Face format.")],
    overrides: OverridesArgument = None,
    engine: Annotated[
        Literal["megatron", "fsdp"], typer.Option(help="What runs all our modules.")
    ] = "megatron",
    against: Annotated[
        str,
        typer.Option(
            help="transformers, or an engine and perhaps its layout, such as "
            "'megatron language.grid.pp=2'."
        ),
    ] = "transformers",
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, callback=number, help="Largest error; default: 1e-5, for fp32."
        ),
    ] = None,
    json: JsonOption = None,
) -> int | None:
    """Compare a checkpoint in transformers with a layout of ours: inputs, every module, gradients.

    Or our two engines, or any two layouts (--against). Runs both on this machine's CPU. Exit code 1
    and the first module that diverges when they are not equal. Layouts are overrides, such as
    language.grid.tp=2.
    """
    from mimo.check.parity.main import main as run

    return run(checkpoint, overrides or [], tolerance, json, engine, against)
