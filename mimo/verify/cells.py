"""Which layouts are run for a recipe."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from mimo.errors import InputError, RecipeError
from mimo.layout.grids import GridSpec, Layout
from mimo.model.recipe_checks import check_recipe
from mimo.recipe.schema import Recipe
from mimo.verify.scale import scale_recipe
from mimo.verify.shrink import cover, lane_ratio, parallel_axes
from mimo.verify.sweep import SWEEP, sweep_recipe


@dataclass(frozen=True)
class Cell:
    """One layout to compare with one rank."""

    name: str
    recipe: Recipe
    layout: Layout


@dataclass(frozen=True)
class Cells:
    """All layouts of one command. notes: how they were chosen, for the report."""

    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


def recipe_cells(recipe: Recipe, num_ranks: int | None, max_ranks: int, full: bool) -> Cells:
    """The recipe's layout, shrunk to ``max_ranks``, or in full size.

    Raises InputError for a recipe that cannot run or cannot be shrunk far enough.
    """
    layout = check_recipe(recipe, num_ranks)
    if full:
        return Cells((Cell("the recipe's layout", recipe, layout),), (describe(layout),))
    try:
        covered = cover(layout, max_ranks)
    except ValueError as error:
        raise InputError(f"--max-ranks {max_ranks}: {error}; give more ranks") from error
    notes = [f"the recipe: {describe(layout)}"]
    if len(covered.parts) == 1 and len(covered.parts[0].axes) == len(parallel_axes(layout)):
        small = covered.parts[0].layout
        if small == layout:
            return Cells((Cell("the recipe's layout", recipe, layout),), tuple(notes))
        notes.append(f"run here:   {describe(small)}")
        return Cells((Cell("the recipe's layout, shrunk", recipe, small),), tuple(notes))
    notes.append(f"does not fit into {max_ranks} ranks with all its axes; run here are")
    notes += [f"  {part.name}: {describe(part.layout)}" for part in covered.parts]
    notes += [
        f"  in none of them together: {'.'.join(one)} and {'.'.join(other)}"
        for one, other in covered.uncovered
    ]
    return Cells(tuple(Cell(p.name, recipe, p.layout) for p in covered.parts), tuple(notes))


def sweep_cells(recipe: Recipe, max_ranks: int, precision: str) -> Cells:
    """The built-in matrix. Raises InputError for a recipe that cannot be used."""
    check_recipe(recipe, None)
    built = [Cell(cell.name, *sweep_recipe(recipe, cell)) for cell in SWEEP]
    larger = [cell for cell in built if cell.layout.world_size > max_ranks]
    # Megatron's distributed optimizer has no fp64; without it such a cell would show nothing.
    no_fp64 = [c for c in built if precision == "fp64" and c.recipe.train.distributed_optimizer]
    fitting = [cell for cell in built if cell not in larger and cell not in no_fp64]
    if not fitting:
        raise InputError(f"--max-ranks {max_ranks}: every layout of the sweep needs more ranks")
    refusals = {cell.name: _refusal(cell, precision) for cell in fitting}
    cells = [cell for cell in fitting if refusals[cell.name] is None]
    if not cells:
        raise RecipeError(*{reason for reason in refusals.values() if reason is not None})
    notes = [f"{len(cells)} layouts of the built-in matrix"]
    refused = {
        reason: [cell for cell in fitting if refusals[cell.name] == reason]
        for reason in refusals.values()
        if reason is not None
    }
    for left_out, reason in (
        (larger, f"they need more than {max_ranks} ranks"),
        (no_fp64, "the engine's distributed optimizer has no fp64"),
        *((cells_of_reason, reason) for reason, cells_of_reason in refused.items()),
    ):
        if left_out:
            names = ", ".join(cell.name for cell in left_out)
            notes.append(f"left out, as {reason}: {names}")
    unused = list(recipe.encoders)[2:]
    if unused:
        notes.append(f"the matrix has room for two encoders; not run: {', '.join(unused)}")
    return Cells(tuple(cells), tuple(notes))


def _refusal(cell: Cell, precision: str) -> str | None:
    """Why a family of the recipe cannot work on a layout of the matrix; None if all can."""
    try:
        scale_recipe(cell.recipe, cell.layout, Path(tempfile.gettempdir()), precision)
    except RecipeError as error:
        return "; ".join(error.problems)
    return None


def describe(layout: Layout) -> str:
    """On one line, all grids of a layout and the kinds of its lane ratios."""
    parts = []
    for name, grid in layout.encoders.items():
        placement = " colocated" if name in layout.colocated else ""
        ratio = lane_ratio(grid.dp, layout.language.dp)
        parts.append(f"{name}{placement} {_axes(grid)} ({ratio} lanes)")
    parts.append(f"language {_axes(layout.language)}")
    return f"{' → '.join(parts)} = {layout.world_size} ranks"


def _axes(grid: GridSpec) -> str:
    words = [f"tp{grid.tp}"] * (grid.tp > 1) + ["sp"] * grid.sp
    for axis in ("cp", "pp", "vpp", "dp"):
        words += [f"{axis}{getattr(grid, axis)}"] * (getattr(grid, axis) > 1)
    return " ".join(words) or "1 rank"
