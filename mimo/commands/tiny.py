"""`mimo tiny`: a small checkpoint of random weights."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mimo.commands._shared import (
    readable_errors,
)


class DtypeChoice(StrEnum):
    """How `tiny` stores weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@readable_errors
def tiny(
    family: Annotated[
        str,
        typer.Argument(
            help="qwen2_5_vl, qwen3_vl or gemma3; of text alone: qwen2, qwen3, gemma3_text."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1)] = 0,
    dtype: Annotated[DtypeChoice, typer.Option("--dtype")] = DtypeChoice.FLOAT32,
    shard_size: Annotated[
        str | None,
        typer.Option("--shard-size", help="Largest file of weights, such as 1MB; default: one."),
    ] = None,
    tie: Annotated[
        bool | None,
        typer.Option("--tie/--no-tie", help="Tie the output layer; default: as the family does."),
    ] = None,
) -> int | None:
    """Write a small checkpoint with random weights in Hugging Face format."""
    from mimo.hf.tiny import TinyCheckpoint
    from mimo.hf.tiny import main as run

    return run(TinyCheckpoint(family, seed, dtype.value, shard_size, tie), out)
