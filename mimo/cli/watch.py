"""`mimo status`, `mimo top` and `mimo logs`: a run that goes on, or has ended, from its folder."""

from typing import Annotated

import typer

from mimo.cli.report import RunFolder
from mimo.config.bounds import MAX_RANKS


def status(run: RunFolder) -> int | None:
    """Show where a run stands: its job, step, rate, idle shares, checkpoint, last incident."""
    from mimo.report.status import status

    return status(run)


def top(
    run: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
) -> int | None:
    """The same, live, with a row for each module; ends with the run, or with q."""
    from mimo.report.status import top

    return top(run, once)


def logs(
    run: RunFolder,
    rank: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_RANKS - 1, help="Only this rank's; default: all, by time."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
    first_error: Annotated[
        bool, typer.Option("--first-error", help="Only the error that others followed from.")
    ] = False,
) -> int | None:
    """Print what ranks have written, or which of them failed first."""
    from mimo.report import logs

    if first_error and (follow or rank is not None):
        raise typer.BadParameter("--first-error is of all ranks, and what it shows has been")
    return logs.first_error(run) if first_error else logs.logs(run, rank, follow)
