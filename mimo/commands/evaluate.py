"""`mimo evaluate`: the score of a held-out split."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.commands._shared import (
    readable_errors,
)


@readable_errors
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder or a checkpoint folder.")],
    split: Annotated[str, typer.Option("--split", help="validation or test.")] = "test",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            min=1,
            max=2**20,
            help="Most tokens of an answer; default: those of the longest expected one.",
        ),
    ] = None,
) -> int | None:
    """Answer the held-out samples of a run's recipe and compare with the expected answers.

    Like `mimo generate`, it computes the whole sequence anew for each new token.
    """
    from mimo.generate.evaluate import main as compare

    return compare(run, split, max_new_tokens)
