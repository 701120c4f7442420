"""`mimo convert` and `mimo tiny`: checkpoints in Hugging Face format."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mimo.checkpoint.hf.tiny_configs import FAMILIES
from mimo.cli._shared import EmaOption, RunArgument


def convert_from_hf(
    folder: Annotated[Path, typer.Argument(help="A checkpoint in Hugging Face format.")],
    out: Annotated[Path, typer.Argument(help="Where the checkpoint folder goes.")],
) -> None:
    """Turn a Hugging Face checkpoint into one of ours, tensor by tensor.

    To train from it no conversion is needed: name the folder as init_from in a recipe.
    """
    from mimo.checkpoint.hf.initial import convert_from_hf as run

    run(folder, out)


def convert_to_hf(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="Where the folder goes.")],
    shard_size: Annotated[str, typer.Option(help="Largest file, such as 500MB or 5GB.")] = "5GB",
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Write the adapters of a run with lora alone, for peft."),
    ] = False,
    ema: EmaOption = False,
) -> None:
    """Write a trained model in Hugging Face format, from whatever layout it was trained in.

    Adapters are merged into what they adapt, or with --adapter written without it.
    """
    if adapter:
        from mimo.checkpoint.hf.adapter import convert_adapter

        convert_adapter(run, out, ema)
        return
    from mimo.checkpoint.hf.export import convert_to_hf as write
    from mimo.checkpoint.hf.export import parse_size

    write(run, out, parse_size(shard_size), ema)


def tiny(
    family: Annotated[
        str,
        typer.Argument(help=f"One of {', '.join(FAMILIES)}."),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    shard_size: Annotated[
        str | None, typer.Option(help="Largest file of weights, such as 1MB; default: one.")
    ] = None,
    tie: Annotated[
        bool | None, typer.Option(help="Tie the output layer; default: as the family does.")
    ] = None,
) -> int | None:
    """Write a small checkpoint with random weights in Hugging Face format."""
    from mimo.checkpoint.hf.tiny import TinyCheckpoint
    from mimo.checkpoint.hf.tiny import main as run

    return run(TinyCheckpoint(family, seed, dtype, shard_size, tie), out)
