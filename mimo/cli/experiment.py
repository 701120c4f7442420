"""`mimo experiment`: one recipe in several layouts."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.cli._shared import OverridesArgument


def experiment(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An experiment, as YAML.")],
    overrides: OverridesArgument = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Submit the runs to SLURM, as an array of jobs.")
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option(help="With --submit: a file with keys of `cluster:`, laid over the recipe's."),
    ] = None,
) -> int | None:
    """Run a recipe in several layouts, check that all learn the same, and write a page about it."""
    from mimo.report.experiment.main import main

    return main(file, overrides or [], submitting=submit, cluster=cluster)
