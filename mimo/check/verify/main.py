"""`mimo verify`: does a recipe's layout take the same steps as one rank?"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mimo.check.verify.cells import Cell, Cells, recipe_cells, sweep_cells
from mimo.check.verify.report import (
    check_writable,
    log_console,
    print_progress,
    print_table,
    write_json,
)
from mimo.check.verify.scale import changes, scale_recipe
from mimo.check.verify.verifier import PRELOAD, CellResult, Verifier
from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.phases import Phase
from mimo.device import machine_memory
from mimo.errors import InputError
from mimo.model.memory import check_processes
from mimo.runtime.ranks import warm_up_on_cpu


def main(
    path: Path,
    overrides: Sequence[str],
    num_ranks: int | None,
    max_ranks: int,
    full: bool,
    sweep: bool,
    precision: str,
    json: Path | None,
) -> int:
    """Print a table of errors; 0 if every layout of every phase equals one rank, else 1.

    sweep: run the built-in matrix instead of the recipe's layout. full: do not shrink that layout.
    Raises InputError for bad input, before any rank starts.
    """
    phased = load_phases(path, overrides)
    check_writable(json)
    if sweep and (full or num_ranks is not None):
        raise InputError("--layouts sweep has its own layouts; remove --full and --num-ranks")
    if sweep:
        # The matrix sets layouts and freezing itself, so one phase stands for all.
        phases = phased.phases[-1:]
        chosen = [sweep_cells(phases[0].recipe, max_ranks, precision)]
    else:
        phases = phased.phases
        chosen = phased.each(lambda recipe: recipe_cells(recipe, num_ranks, max_ranks, full))
    cells, notes = _of_phases(phases, chosen, precision)
    for cell in cells:
        check_processes(cell.recipe, cell.layout.world_size, machine_memory())
    results: list[CellResult] = []
    with tempfile.TemporaryDirectory(prefix="mimo-verify-") as folder:
        for cell in cells:  # report what a family refuses before anything runs
            scale_recipe(cell.recipe, cell.layout, Path(folder), precision)
        warm_up_on_cpu(PRELOAD)
        console = log_console()
        for note in notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        verifier = Verifier(Path(folder), precision)
        for cell in cells:
            results.append(verifier.run(cell))
            print_progress(console, results[-1], len(results), len(cells))
            sys.stdout.flush()
    print_table(console, results, verifier.tolerance)
    if json is not None:
        write_json(json, results, path, precision, verifier.tolerance, notes)
    differing = sum(not result.passed for result in results)
    print(f"{len(results) - differing} of {len(results)} layouts take the steps of one rank")
    return 1 if differing else 0


def _of_phases(
    phases: Sequence[Phase], chosen: Sequence[Cells], precision: str
) -> tuple[list[Cell], list[str]]:
    """The layouts and notes of all phases; with several phases, both say which one."""
    cells: list[Cell] = []
    notes: list[str] = []
    for phase, own in zip(phases, chosen, strict=True):
        prefix = f"{phase.name}: " if phase.name else ""
        cells += [cell._replace(name=f"{prefix}{cell.name}") for cell in own.cells]
        notes += [phase.title] if phase.title else []
        notes += own.notes
        notes += [f"changed: {change}" for change in changes(phase.recipe, precision)]
    return cells, notes
