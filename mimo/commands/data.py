"""`mimo data`: data sets before a job."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.commands._shared import (
    NumRanksOption,
    OverridesArgument,
    RecipeArgument,
    number,
    readable_errors,
)
from mimo.errors import InputError
from mimo.progress import progress_of


@readable_errors
def index(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, max=2**12, help="Processes; default: the cores."),
    ] = None,
) -> int | None:
    """Index the shards of all splits that are not indexed yet; started again, it goes on.

    Only new and changed shards are read. Other recipes' indexes of the same shards stay.
    """
    from mimo.step.prepare import index_main as run

    return run(recipe, overrides or [], workers)


@readable_errors
def data_doctor(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    page: Annotated[Path, typer.Option("--page", help="Where the HTML page goes.")] = Path(
        "runs/data_doctor.html"
    ),
    json: Annotated[
        Path | None, typer.Option("--json", help="Write every figure to this file.")
    ] = None,
) -> int | None:
    """Look at the data before a job: one page of figures, bad samples and samples to look at."""
    from mimo.step.doctor_page import main as run

    return run(recipe, overrides or [], num_ranks, page, json)


@readable_errors
def data_pack(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A .json, .jsonl or .parquet file, a folder, or a glob."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write shards into.")],
    media_root: Annotated[
        Path | None,
        typer.Option("--media-root", help="The folder of the files; default: that of SRC."),
    ] = None,
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="Of a shard: 2000 samples, or 512MiB.")
    ] = "512MiB",
    max_bad_fraction: Annotated[
        float,
        typer.Option(
            "--max-bad-fraction", min=0, max=1, callback=number, help="Rows that may be left out."
        ),
    ] = 0.01,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what a former call wrote to OUT.")
    ] = False,
) -> int | None:
    """Pack JSON, JSON Lines or Parquet, and the files of the rows, into shards."""
    from data.pack.shards import ShardSize, pack

    try:
        with progress_of("packing") as progress:
            size = ShardSize.parse(shard_size)
            packed = pack(source, out, media_root, size, max_bad_fraction, overwrite, progress)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    print(f"packed {packed.samples} samples with {packed.files} files, shards: {packed.shards}")
    if packed.bad:
        print(f"left out {packed.bad} rows, the first {packed.first_bad}")
    return 0
