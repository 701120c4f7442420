"""`mimo checkpoint`: look at checkpoints, check them, remove old ones."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.cli._shared import RunArgument
from mimo.errors import InputError
from mimo.runtime.progress import progress_of


def checkpoint_inspect(path: RunArgument) -> None:
    """Show the step, modules, sizes, dtypes, optimizers and layout of the newest checkpoint."""
    from rich.console import Console

    from mimo.checkpoint.assets import overview
    from mimo.checkpoint.folder import find_checkpoint

    Console().print(overview(find_checkpoint(path)))


def checkpoint_verify(path: RunArgument) -> int:
    """Compare a checkpoint, or all of a run, with its checksums; exit code 1 if one is damaged."""
    from mimo.checkpoint.folder import all_checkpoints
    from mimo.checkpoint.resume import listed_files, problems_of

    damaged = 0
    for checkpoint in all_checkpoints(path):
        with progress_of(checkpoint.name) as progress:
            problems = problems_of(checkpoint, progress)
        damaged += bool(problems)
        for problem in problems:
            print(f"{checkpoint}: {problem}")
        if not problems:
            sums = "intact" if listed_files(checkpoint) is not None else "readable, no checksums"
            print(f"{checkpoint}: {sums}")
    return 1 if damaged else 0


def checkpoint_prune(
    run: Annotated[Path, typer.Argument(help="A run folder; all of its phases are pruned.")],
    keep: Annotated[int, typer.Option(min=1, max=10**6, help="Checkpoints that stay.")] = 2,
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="Those whose step is a multiple stay, too."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove old checkpoints of a run that is not running; the latest always stays."""
    from mimo.checkpoint.folder import all_checkpoints, discard, named_by_latest, to_remove
    from mimo.config.phases import PHASE_FOLDER
    from mimo.runtime.run_lock import run_lock

    own = run.resolve()
    folders = dict.fromkeys(checkpoint.parent for checkpoint in all_checkpoints(own))
    if own in folders or own.parent in folders:
        raise InputError(f"{run}: is not a run folder; give the one that has checkpoints/ in it")
    if PHASE_FOLDER.fullmatch(own.name):
        own = own.parent  # jobs lock the whole run
    with run_lock(own):
        for folder in folders:
            for path in to_remove(folder, keep, keep_every):
                if not named_by_latest(path):
                    if not dry_run:
                        discard(path)
                    print(f"{'would remove' if dry_run else 'removed'} {path}", flush=True)
