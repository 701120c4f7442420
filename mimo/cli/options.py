"""Options and arguments that commands share, and how their errors reach the terminal."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mimo.errors import InputError

RecipeArgument = Annotated[Path, typer.Argument(help="A recipe, for example recipes/x.yaml.")]
RunArgument = Annotated[Path, typer.Argument(help="A run folder or a checkpoint folder.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Keys to override, for example train.steps=20 language.grid.tp=2."),
]
NumRanksOption = Annotated[
    int | None, typer.Option(min=1, help="Ranks of the job; default: what the grids need.")
]
ClusterOption = Annotated[
    Path | None, typer.Option(help="A file with keys of `cluster:`, merged over the recipe's.")
]
StepsOption = Annotated[int, typer.Option(min=1, help="Steps from noise to an image.")]
GuidanceOption = Annotated[
    float, typer.Option(min=0, help="Scale of classifier-free guidance of images; 1 is none.")
]
EmaOption = Annotated[
    bool, typer.Option("--ema", help="Use the moving average of the weights (train.ema_decay).")
]
JsonOption = Annotated[Path | None, typer.Option(help="Write every figure to this file.")]

_REMOVED = {
    "bench": "use python -m benchmarks.bridge, .train, .data or .checkpoint in a clone",
    "fit": "override the grid with fewer lanes, for example language.grid.dp=6",
    "prepare": "use python -m examples.digits in a clone",
    "quickstart": "use make train in a clone",
    "top": "use mimo status",
    "--against": "compare each engine or layout with transformers",
    "--checkpoint": "a replay starts from the nearest checkpoint before the step",
    "--elastic": "after a loss of nodes, override language.grid.dp with fewer lanes",
    "--dtype": "tiny checkpoints are fp32",
    "--num-ranks": "verify takes the number of ranks from the recipe's layout",
    "--shard-size": "convert to-hf writes files of up to 5 GB",
    "--tie": "tiny checkpoints tie embedding and head as their family does",
}
"""Commands and options of earlier versions, and what to use instead."""


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


class Group(TyperGroup):
    """A group of commands that names the replacement of a command that was removed."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _REMOVED:
            raise typer.BadParameter(f"mimo {cmd_name} was removed; {_REMOVED[cmd_name]}")
        return super().get_command(ctx, cmd_name)


class Command(TyperCommand):
    """A command that names the replacement of an option that was removed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's NoSuchOption, of which typer carries its own copy
            option = getattr(error, "option_name", None)
            if option not in _REMOVED:
                raise
            raise typer.BadParameter(f"{option} was removed; {_REMOVED[option]}") from None
