"""What commands share: how a recipe is named, and how errors are told."""

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from mimo.bounds import MAX_RANKS
from mimo.errors import InputError

RecipeArgument = Annotated[Path, typer.Argument(help="A recipe, for example recipes/x.yaml.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Keys to override, for example train.steps=20 language.grid.tp=2."),
]
NumRanksOption = Annotated[
    int | None,
    typer.Option(
        "--num-ranks", min=1, max=MAX_RANKS, help="Ranks of the job; default: what the grids need."
    ),
]


def number(value: float | None) -> float | None:
    """NaN is neither below a minimum nor above a maximum."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


def readable_errors[**P](command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn an InputError into a message on stderr, and a command's result into the exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except InputError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        raise typer.Exit(code or 0)

    return run
