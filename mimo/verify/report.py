"""What `mimo verify` prints, and what it writes for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mimo.verify.verifier import CellResult

_FAILURE_LINES = 12  # of a rank's traceback


def print_progress(console: Console, result: CellResult, done: int, total: int) -> None:
    """One line, as soon as a layout is finished."""
    verdict = "equal" if result.passed else "DIFFERS" if result.comparison else "FAILED"
    line = f"[{done}/{total}] {verdict:7} {result.cell.name} ({result.seconds:.1f} s)"
    console.print(Text(line), soft_wrap=True)


def print_table(console: Console, results: Sequence[CellResult], tolerance: float) -> None:
    """Errors of every layout; below it, the first difference of those that differ."""
    table = Table(title=f"errors against one rank (tolerance {tolerance:g})")
    table.add_column("layout", overflow="fold")
    for column in ("ranks", "loss", "norm", "gradients", "weights", "result"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        found = result.comparison
        errors = (
            [_number(found.worst(what)) for what in ("loss", "grad_norm", "gradients", "weights")]
            if found
            else ["-"] * 4
        )
        verdict = "equal" if result.passed else "DIFFERS" if found else "FAILED"
        cells = [result.cell.name, str(result.cell.layout.world_size), *errors, verdict]
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    for result in results:
        found = result.comparison
        if found and found.first:
            text = f"{result.cell.name}\n  first:   {found.first}\n  largest: {found.largest}"
            console.print(Text(text), soft_wrap=True)
        elif result.failure:
            lines = result.failure.strip().splitlines()[-_FAILURE_LINES:]
            text = "\n  ".join([result.cell.name, *lines])
            console.print(Text(text), soft_wrap=True)


def _number(error: float) -> str:
    return "0" if error == 0 else f"{error:.1e}"


def write_json(
    path: Path,
    results: Sequence[CellResult],
    recipe: Path,
    precision: str,
    tolerance: float,
    notes: Sequence[str],
) -> None:
    """Everything: every error of every tensor of every layout."""
    document = {
        "recipe": str(recipe),
        "precision": precision,
        "tolerance": tolerance,
        "passed": all(result.passed for result in results),
        "notes": list(notes),
        "layouts": [_as_json(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _as_json(result: CellResult) -> dict[str, Any]:
    layout, found = result.cell.layout, result.comparison
    return {
        "name": result.cell.name,
        "ranks": layout.world_size,
        "grids": {name: asdict(grid) for name, grid in layout.grids.items()},
        "colocated": sorted(layout.colocated),
        "passed": result.passed,
        "seconds": round(result.seconds, 3),
        "failure": result.failure,
        "first_difference": asdict(found.first) if found and found.first else None,
        "largest_difference": asdict(found.largest) if found and found.largest else None,
        "steps": found.scalars if found else [],
        "gradients": found.gradients if found else {},
        "weights": found.weights if found else {},
    }


def _finite(value: Any) -> Any:
    """JSON has no number for infinity or not-a-number: they become text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
