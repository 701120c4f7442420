"""`mimo data`, `checkpoint`, `convert` and `tiny`: samples and checkpoints on disk."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mimo.cli.options import (
    EmaOption,
    JsonOption,
    NumRanksOption,
    OverridesArgument,
    RecipeArgument,
    RunArgument,
)
from mimo.errors import InputError


def data_index(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    workers: Annotated[int | None, Option(min=1, help="Processes; default: the cores.")] = None,
) -> int | None:
    """Index the shards of all splits that are not indexed yet. Continues where it stopped.

    Reads only new and changed shards; keeps other recipes' indexes of the same shards.
    """
    from mimo.model.indexing import main as run

    return run(recipe, overrides or [], workers)


def data_doctor(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    page: Annotated[Path, Option(help="The HTML page to write.")] = Path("runs/data_doctor.html"),
    json: JsonOption = None,
) -> int | None:
    """Write an HTML page about a recipe's data: figures, bad samples and example samples."""
    from mimo.report.doctor import main as run

    return run(recipe, overrides or [], num_ranks, page, json)


def data_pack(
    source: Annotated[
        str, Argument(metavar="SRC", help="A .json, .jsonl or .parquet file, a folder, or a glob.")
    ],
    out: Annotated[Path, Argument(metavar="OUT", help="The folder to write shards into.")],
    media_root: Annotated[
        Path | None, Option(help="Folder of the images and other files; default: SRC's.")
    ] = None,
    shard_size: Annotated[
        str, Option(help="Size of a shard, such as 2000 samples or 512MiB.")
    ] = "512MiB",
    max_bad_fraction: Annotated[
        float, Option(min=0, max=1, help="Largest share of bad rows.")
    ] = 0.01,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace what an earlier call wrote to OUT.")
    ] = False,
) -> int | None:
    """Convert JSON, JSON Lines or Parquet, and the files that rows name, into shards."""
    from data.pack import pack, parse_shard_size
    from mimo.runtime.progress import progress_of

    try:
        with progress_of("packing") as progress:
            size = parse_shard_size(shard_size)
            packed = pack(source, out, media_root, max_bad_fraction, overwrite, progress, **size)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    print(f"packed {packed.samples} samples with {packed.files} files, shards: {packed.shards}")
    if packed.bad:
        print(f"left out {packed.bad} rows, the first {packed.first_bad}")
    return 0


def checkpoint_inspect(path: RunArgument) -> None:
    """Show the step, modules, sizes, dtypes, optimizers and layout of the newest checkpoint."""
    from rich.console import Console

    from mimo.checkpoint.assets import overview
    from mimo.checkpoint.folder import find_checkpoint

    Console().print(overview(find_checkpoint(path)))


def checkpoint_verify(path: RunArgument) -> int:
    """Compare checkpoints with their checksums. Exit code 1 if one is damaged."""
    from mimo.checkpoint.folder import all_checkpoints
    from mimo.checkpoint.resume import problems_of
    from mimo.runtime.progress import progress_of

    damaged = 0
    for checkpoint in all_checkpoints(path):
        with progress_of(checkpoint.name) as progress:
            problems = problems_of(checkpoint, progress)
        damaged += bool(problems)
        for line in problems or ["intact"]:
            print(f"{checkpoint}: {line}")
    return 1 if damaged else 0


def checkpoint_prune(
    run: Annotated[Path, Argument(help="A run folder; prunes all of its phases.")],
    keep: Annotated[int, Option(min=1, help="How many checkpoints to keep.")] = 2,
    keep_every: Annotated[
        int | None,
        Option(min=1, help="Also keep every checkpoint whose step is a multiple of this."),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only list them.")] = False,
) -> None:
    """Remove old checkpoints of a run that is not running. Keeps the latest in any case."""
    from mimo.checkpoint.folder import all_checkpoints, discard, named_by_latest, to_remove
    from mimo.config.phases import PHASE_FOLDER
    from mimo.runtime.run_lock import run_lock

    folder = run.resolve()
    parents = dict.fromkeys(checkpoint.parent for checkpoint in all_checkpoints(folder))
    if folder in parents or folder.parent in parents:
        raise InputError(f"{run}: not a run folder; give the folder that contains checkpoints/")
    if PHASE_FOLDER.fullmatch(folder.name):
        folder = folder.parent  # jobs lock the whole run
    with run_lock(folder):
        for parent in parents:
            for path in to_remove(parent, keep, keep_every):
                if not named_by_latest(path):
                    if not dry_run:
                        discard(path)
                    print(f"{'would remove' if dry_run else 'removed'} {path}", flush=True)


def convert_from_hf(
    folder: Annotated[Path, Argument(help="A checkpoint in Hugging Face format.")],
    out: Annotated[Path, Argument(help="The checkpoint folder to write.")],
) -> None:
    """Convert a Hugging Face checkpoint into one of ours, tensor by tensor.

    Training needs no conversion: set init_from in a recipe to the folder.
    """
    from mimo.checkpoint.hf.initial import convert_from_hf as run

    run(folder, out)


def convert_to_hf(
    run: RunArgument,
    out: Annotated[Path, Argument(help="The folder to write.")],
    adapter: Annotated[
        bool, Option("--adapter", help="Write only the LoRA adapters, for peft.")
    ] = False,
    ema: EmaOption = False,
) -> None:
    """Export a trained model in Hugging Face format, from any layout.

    Merges adapters into the weights, unless --adapter is given.
    """
    if adapter:
        from mimo.checkpoint.hf.adapter import convert_adapter

        convert_adapter(run, out, ema)
        return
    from mimo.checkpoint.hf.export import convert_to_hf as write

    write(run, out, average=ema)


def tiny(
    family: Annotated[
        str,
        Argument(
            help="One of qwen2_5_vl, qwen3_vl, qwen3_5, qwen3_5_moe, qwen3_vl_moe, gemma3, qwen2, "
            "qwen3, qwen3_moe, llama, gemma3_text. Or qwen_image, a folder of diffusers with a "
            "generator. Or the model_type of any image-text-to-text class of transformers, such as "
            "internvl."
        ),
    ],
    out: Annotated[Path, Argument(help="The folder to write.")],
    seed: Annotated[int, Option(min=0, max=2**32 - 1)] = 0,
) -> None:
    """Write a small checkpoint with random weights in Hugging Face format."""
    from transformers.utils import logging

    from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny

    logging.disable_progress_bar()  # of one file
    num_weights = write_tiny(TinyCheckpoint(family, seed), out)
    print(f"{out}: {family} with {num_weights:,} random weights")
