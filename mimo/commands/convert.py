"""`mimo convert`: from and to Hugging Face format."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.commands._shared import (
    readable_errors,
)


@readable_errors
def convert_from_hf(
    folder: Annotated[Path, typer.Argument(help="A checkpoint in Hugging Face format.")],
    out: Annotated[Path, typer.Argument(help="Where the checkpoint folder goes.")],
) -> None:
    """Turn a Hugging Face checkpoint into one of ours, tensor by tensor.

    To train from it no conversion is needed: name the folder as init_from in a recipe.
    """
    from mimo.convert.from_hf import convert as run

    run(folder, out)


@readable_errors
def convert_to_hf(
    run: Annotated[Path, typer.Argument(help="A run folder or a checkpoint folder.")],
    out: Annotated[Path, typer.Argument(help="Where the folder goes.")],
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="Largest file, such as 500MB or 5GB.")
    ] = "5GB",
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Write the adapters of a run with lora alone, for peft."),
    ] = False,
) -> None:
    """Write a trained model in Hugging Face format, from whatever layout it was trained in.

    Adapters are merged into what they adapt, or with --adapter written without it.
    """
    if adapter:
        from mimo.convert.adapter import convert as write_adapter

        write_adapter(run, out)
        return
    from mimo.convert.to_hf import convert as write
    from mimo.convert.to_hf import parse_size

    write(run, out, parse_size(shard_size))
