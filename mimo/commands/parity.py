"""`mimo parity`: a checkpoint in transformers against ours."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.commands._shared import (
    OverridesArgument,
    number,
    readable_errors,
)


@readable_errors
def parity(
    checkpoint: Annotated[Path, typer.Argument(help="A folder in Hugging Face format.")],
    overrides: OverridesArgument = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0.0,
            max=1.0,
            callback=number,
            help="Largest error; default: 1e-5, for fp32.",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write every error to this file.")
    ] = None,
) -> int | None:
    """Compare a checkpoint in transformers with a layout of ours: inputs, every module, gradients.

    Runs both on this machine's CPU. Exit code 1 and the first module that diverges when they are
    not equal. Layouts are overrides, such as language.grid.tp=2.
    """
    from mimo.parity.main import main as run

    return run(checkpoint, overrides or [], tolerance, json)
