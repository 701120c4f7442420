"""What commands share: how a recipe is named, and how errors are told."""

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mimo.config.bounds import MAX_RANKS
from mimo.errors import InputError

RecipeArgument = Annotated[Path, typer.Argument(help="A recipe, for example recipes/x.yaml.")]
RunArgument = Annotated[Path, typer.Argument(help="A run folder or a checkpoint folder.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Keys to override, for example train.steps=20 language.grid.tp=2."),
]
NumRanksOption = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_RANKS, help="Ranks of the job; default: what the grids need."),
]
ClusterOption = Annotated[
    Path | None, typer.Option(help="A file with keys of `cluster:`, laid over the recipe's.")
]
EmaOption = Annotated[
    bool, typer.Option("--ema", help="The moving average of the weights (train.ema_decay).")
]
JsonOption = Annotated[Path | None, typer.Option(help="Write every figure to this file.")]


def number(value: float | None) -> float | None:
    """NaN is neither below a minimum nor above a maximum."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


def readable_errors(command: Callable[..., int | None]) -> Callable[..., None]:
    """Turn an InputError into a message on stderr, and a command's result into the exit code."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        try:
            code = command(**given)
        except InputError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        raise typer.Exit(code or 0)

    return run
