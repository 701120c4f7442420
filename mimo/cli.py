"""The command line. Commands import what they need when they run, so that `--help` is instant.

Exit code 2 and a message for bad input, before any process group exists; 1 for a run that failed.
"""

import functools
import math
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mimo.bounds import MAX_RANKS
from mimo.errors import InputError

if TYPE_CHECKING:
    from mimo.layout.grids import Layout

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train multimodal models in which every module has its own parallelism.",
)

bench = typer.Typer(no_args_is_help=True, help="Measure what the parts promise.")
app.add_typer(bench, name="bench")

convert = typer.Typer(no_args_is_help=True, help="Checkpoints in Hugging Face format.")
app.add_typer(convert, name="convert")

RecipeArgument = Annotated[Path, typer.Argument(help="A recipe, for example recipes/x.yaml.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Keys to override, for example train.steps=20 language.grid.tp=2."),
]
NumRanksOption = Annotated[
    int | None,
    typer.Option(
        "--num-ranks", min=1, max=MAX_RANKS, help="Ranks of the job; default: what the grids need."
    ),
]


class LayoutsChoice(StrEnum):
    """Which layouts `verify` runs."""

    RECIPE = "recipe"
    SWEEP = "sweep"


class DtypeChoice(StrEnum):
    """How `tiny` stores weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class PrecisionChoice(StrEnum):
    """What `verify` computes in."""

    FP32 = "fp32"
    FP64 = "fp64"


def main() -> None:
    """Entry point for `python -m mimo.cli`."""
    app()


def _number(value: float | None) -> float | None:
    """NaN is neither below a minimum nor above a maximum."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


def _readable_errors[**P](command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn an InputError into a message on stderr, and a command's result into the exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except InputError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        raise typer.Exit(code or 0)

    return run


@app.command()
@_readable_errors
def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
) -> None:
    """Validate a recipe and print which rank does what."""
    from mimo.hf.recipes import load_phases
    from mimo.layout.grids import num_microbatches
    from mimo.model.memory import in_words, module_memory
    from mimo.model.recipe_checks import check_recipe

    phased = load_phases(recipe, overrides or [])
    layouts = phased.each(lambda recipe: check_recipe(recipe, num_ranks))
    for phase, layout in zip(phased.phases, layouts, strict=True):
        needs = module_memory(phase.recipe, layout)
        memory = {name: in_words(need.bytes_per_rank) for name, need in needs.items()}
        print_layout(layout, num_microbatches(phase.recipe, layout), memory, phase.title)


def print_layout(
    layout: "Layout", microbatches: int, memory: dict[str, str], phase: str = ""
) -> None:
    """Print a table with one row per module: its ranks, its grid, its lanes and its memory.

    memory: what each rank needs for weights, gradients and optimizer state, by module.
    """
    from rich.console import Console
    from rich.table import Table

    sizes = f"{layout.world_size} ranks · {microbatches} microbatches per step"
    table = Table(title=f"{phase}: {sizes}" if phase else sizes)
    for column in ("module", "ranks", "grid", "lanes", "per rank"):
        table.add_column(column)
    for name, grid in layout.grids.items():
        last = f"-{grid.ranks[-1]}" if grid.size > 1 else ""
        sequence = " · sp" if grid.sp else ""
        virtual = f" · vpp {grid.vpp}" if grid.vpp > 1 else ""
        axes = f"tp {grid.tp}{sequence} · cp {grid.cp} · pp {grid.pp}{virtual} · dp {grid.dp}"
        table.add_row(name, f"{grid.ranks[0]}{last}", axes, str(grid.dp), memory[name])
    Console().print(table)
    print("per rank: weights, gradients and optimizer state; activations come on top")


@app.command()
@_readable_errors
def prepare(recipe: RecipeArgument, overrides: OverridesArgument = None) -> int | None:
    """Write the example data and the index that a recipe needs."""
    from mimo.commands.prepare import main as run

    return run(recipe, overrides or [])


@app.command()
@_readable_errors
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the run's latest checkpoint; without any, start anew."
        ),
    ] = False,
    resume_from: Annotated[
        Path | None, typer.Option("--resume-from", help="Continue from this checkpoint.")
    ] = None,
) -> int | None:
    """Train a recipe on this machine, or as one rank of a torchrun or srun job."""
    from mimo.train.main import main as run

    return run(recipe, overrides or [], num_ranks, resume=resume, resume_from=resume_from)


@app.command()
@_readable_errors
def verify(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    max_ranks: Annotated[
        int,
        typer.Option(
            "--max-ranks", min=1, max=1024, help="Shrink larger layouts to so many ranks."
        ),
    ] = 8,
    full: Annotated[
        bool, typer.Option("--full", help="Keep the layout as it is; only the model is tiny.")
    ] = False,
    layouts: Annotated[
        LayoutsChoice, typer.Option("--layouts", help="The recipe's own, or the built-in matrix.")
    ] = LayoutsChoice.RECIPE,
    precision: Annotated[
        PrecisionChoice, typer.Option("--precision", help="fp64 compares to 1e-10, fp32 to 1e-5.")
    ] = PrecisionChoice.FP32,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write every error to this file.")
    ] = None,
) -> int | None:
    """Compare a recipe's layout with one rank: loss, every gradient, weights after two steps.

    Runs a scaled-down copy of the model on real ranks of the CPU. Exit code 1 and the first
    parameter that differs when they are not equal.
    """
    from mimo.verify.main import main as run

    sweep = layouts is LayoutsChoice.SWEEP
    return run(recipe, overrides or [], num_ranks, max_ranks, full, sweep, precision.value, json)


@app.command()
@_readable_errors
def generate(
    run: Annotated[Path, typer.Argument(help="A run folder or a checkpoint folder.")],
    prompt: Annotated[str, typer.Option("--prompt", help="The question.")],
    image: Annotated[
        list[Path] | None, typer.Option("--image", help="An image; may be given several times.")
    ] = None,
    frame: Annotated[
        list[Path] | None,
        typer.Option("--frame", help="A frame of a video, in order; all of one size."),
    ] = None,
    fps: Annotated[
        float,
        typer.Option(
            "--fps",
            min=0.001,
            max=1e6,
            callback=_number,
            help="Frames of the video per second.",
        ),
    ] = 2.0,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, max=2**20, help="Length of the answer.")
    ] = 64,
) -> int | None:
    """Answer a question about images or a video with a trained checkpoint, in one process."""
    from mimo.generate.answer import main as answer

    return answer(run, image or [], prompt, max_new_tokens, frame or [], fps)


@app.command()
@_readable_errors
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder or a checkpoint folder.")],
    split: Annotated[str, typer.Option("--split", help="validation or test.")] = "test",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", min=1, help="Tokens of an answer; default: of the longest expected."
        ),
    ] = None,
) -> int | None:
    """Answer the held-out samples of a run's recipe and compare with the expected answers."""
    from mimo.generate.evaluate import main as compare

    return compare(run, split, max_new_tokens)


@app.command()
@_readable_errors
def parity(
    checkpoint: Annotated[Path, typer.Argument(help="A folder in Hugging Face format.")],
    overrides: OverridesArgument = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0.0,
            max=1.0,
            callback=_number,
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


@app.command()
@_readable_errors
def tiny(
    family: Annotated[str, typer.Argument(help="qwen2_5_vl, qwen3_vl or gemma3.")],
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


@app.command()
@_readable_errors
def quickstart(overrides: OverridesArgument = None) -> int | None:
    """Prepare, train and evaluate the small example that runs without a GPU."""
    from mimo.commands.quickstart import main as run

    return run(overrides or [])


@convert.command("from-hf")
@_readable_errors
def convert_from_hf(
    folder: Annotated[Path, typer.Argument(help="A checkpoint in Hugging Face format.")],
    out: Annotated[Path, typer.Argument(help="Where the checkpoint folder goes.")],
) -> None:
    """Turn a Hugging Face checkpoint into one of ours, tensor by tensor.

    To train from it no conversion is needed: name the folder as init_from in a recipe.
    """
    from mimo.convert.from_hf import convert as run

    run(folder, out)


@convert.command("to-hf")
@_readable_errors
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


@bench.command("bridge")
@_readable_errors
def bench_bridge(
    rows: Annotated[
        int, typer.Option("--rows", min=1, max=2**24, help="Rows of the larger size.")
    ] = 8192,
    hidden: Annotated[
        int, typer.Option("--hidden", min=1, max=2**20, help="Values of a row.")
    ] = 1024,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=10_000, help="Alternating pairs of runs.")
    ] = 15,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write every figure to this file.")
    ] = None,
    picture: Annotated[Path, typer.Option("--picture", help="Where the PNG goes.")] = Path(
        "runs/bench_bridge.png"
    ),
) -> int | None:
    """Compare the bridge with Megatron's; exit code 1 and a line for each bound that is missed."""
    from mimo.bench.bridge import main as run

    return run(rows, hidden, repeats, json, picture)


if __name__ == "__main__":
    main()
