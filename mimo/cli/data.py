"""`mimo data`: data sets before a job."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.cli._shared import (
    JsonOption,
    NumRanksOption,
    OverridesArgument,
    RecipeArgument,
    number,
)
from mimo.errors import InputError
from mimo.runtime.progress import progress_of


def data_index(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=2**12, help="Processes; default: the cores.")
    ] = None,
) -> int | None:
    """Index the shards of all splits that are not indexed yet; started again, it goes on.

    Only new and changed shards are read. Other recipes' indexes of the same shards stay.
    """
    from mimo.model.prepare import index_main as run

    return run(recipe, overrides or [], workers)


def data_doctor(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    page: Annotated[Path, typer.Option(help="Where the HTML page goes.")] = Path(
        "runs/data_doctor.html"
    ),
    json: JsonOption = None,
) -> int | None:
    """Look at the data before a job: one page of figures, bad samples and samples to look at."""
    from mimo.report.doctor import main as run

    return run(recipe, overrides or [], num_ranks, page, json)


def data_pack(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A .json, .jsonl or .parquet file, a folder, or a glob."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write shards into.")],
    media_root: Annotated[
        Path | None, typer.Option(help="The folder of the files; default: that of SRC.")
    ] = None,
    shard_size: Annotated[
        str, typer.Option(help="Of a shard: 2000 samples, or 512MiB.")
    ] = "512MiB",
    max_bad_fraction: Annotated[
        float, typer.Option(min=0, max=1, callback=number, help="Rows that may be left out.")
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
