"""`mimo verify`, `parity`, `replay` and `experiment`: check that training is right."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from mimo.cli.options import ClusterOption, JsonOption, OverridesArgument, RecipeArgument


def verify(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    max_ranks: Annotated[
        int, Option(min=1, max=1024, help="Shrink larger layouts to this many ranks.")
    ] = 8,
    full: Annotated[bool, Option("--full", help="Keep the layout; shrink only the model.")] = False,
    layouts: Annotated[
        Literal["recipe", "sweep"], Option(help="The recipe's, or a built-in matrix.")
    ] = "recipe",
    precision: Annotated[
        Literal["fp32", "fp64"], Option(help="fp64 compares to 1e-10, fp32 to 1e-5.")
    ] = "fp32",
    json: JsonOption = None,
) -> int | None:
    """Compare a recipe's layout with one rank: loss, every gradient, weights after two steps.

    Runs a scaled-down copy of the model on CPU ranks. If they differ: exit code 1 and the name of
    the first parameter that does.
    """
    from mimo.check.verify import main as run

    sweep = layouts == "sweep"
    return run(recipe, overrides or [], max_ranks, full, sweep, precision, json)


def parity(
    checkpoint: Annotated[Path, Argument(help="A folder in Hugging Face format.")],
    overrides: OverridesArgument = None,
    engine: Annotated[
        Literal["megatron", "fsdp"], Option(help="Engine of all our modules.")
    ] = "megatron",
    tolerance: Annotated[float, Option(min=0.0, max=1.0, help="Largest error.")] = 1e-5,
    json: JsonOption = None,
) -> int | None:
    """Compare transformers with one of our layouts: inputs, every module, every gradient.

    Overrides such as language.grid.tp=2 set the layout. Runs on the CPU. If they differ: exit code
    1 and the name of the first module that does.
    """
    from mimo.check.parity import main as run

    return run(checkpoint, overrides or [], tolerance, json, engine)


def replay(
    run: Annotated[Path, Argument(help="A run folder, or that of one phase.")],
    step: Annotated[int, Option(min=0, help="Number of the step in metrics.jsonl.")],
) -> int | None:
    """Repeat one step of a run on one rank, on the same batch, with statistics of every layer.

    Uses the nearest checkpoint before it. Marks activations and gradients that are not finite.
    """
    from mimo.check.replay import main

    return main(run, step)


def experiment(
    file: Annotated[Path, Argument(metavar="FILE", help="An experiment, as YAML.")],
    overrides: OverridesArgument = None,
    submit: Annotated[
        bool, Option("--submit", help="Submit the runs to SLURM as an array.")
    ] = False,
    cluster: ClusterOption = None,
    simulate: Annotated[
        bool, Option("--simulate", help="Forecast each layout, with rates of the first two.")
    ] = False,
) -> int | None:
    """Train a recipe in several layouts, compare their losses, and write an HTML page."""
    from mimo.report.experiment import main

    return main(file, overrides or [], submitting=submit, cluster=cluster, simulates=simulate)
