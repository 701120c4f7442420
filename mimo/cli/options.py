"""Options and arguments that commands share, and how their errors reach the terminal."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from mimo.errors import InputError

RecipeArgument = Annotated[Path, Argument(help="A recipe, for example recipes/x.yaml.")]
RunArgument = Annotated[Path, Argument(help="A run folder or a checkpoint folder.")]
RunFolder = Annotated[Path, Argument(metavar="RUN", help="A run folder.")]
OverridesArgument = Annotated[
    list[str] | None,
    Argument(help="Keys to override, for example train.steps=20 language.grid.tp=2."),
]
NumRanksOption = Annotated[
    int | None, Option(min=1, help="Ranks of the job; default: what the grids need.")
]
ClusterOption = Annotated[
    Path | None, Option(help="A file with keys of `cluster:`, merged over the recipe's.")
]
StepsOption = Annotated[int, Option(min=1, help="Steps from noise to an image.")]
GuidanceOption = Annotated[
    float, Option(min=0, help="Scale of classifier-free guidance of images; 1 is none.")
]
EmaOption = Annotated[
    bool, Option("--ema", help="Use the moving average of the weights (train.ema_decay).")
]
JsonOption = Annotated[Path | None, Option(help="Write every figure to this file.")]


def readable_errors(command: Callable[..., int | None]) -> Callable[..., None]:
    """Turn an InputError into a message on stderr, and a command's result into the exit code."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            code = command(**options)
        except InputError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        raise typer.Exit(code or 0)

    return run
