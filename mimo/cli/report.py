"""`mimo report` and `mimo compare`: pages about runs."""

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


def report(
    run: RunFolder,
    page: Annotated[
        Path | None, typer.Option(help="Where the page goes; default: report.html in the folder.")
    ] = None,
) -> int | None:
    """Write one HTML page about a run that has ended, died or is still going."""
    from mimo.report.one_run import main

    return main(run, page)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Run folders.")],
    page: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("runs/compare.html"),
) -> int | None:
    """Compare runs: a table, how recipes and data differ, and a page of their curves."""
    from mimo.report.compare import main

    return main(runs, page)
