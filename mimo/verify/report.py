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

from mimo.verify.compare import Comparison
from mimo.verify.scale import TOLERANCE
from mimo.verify.verifier import CellResult

_FAILURE_LINES = 12  # of a rank's traceback


def print_progress(console: Console, result: CellResult, done: int, total: int) -> None:
    """One line, as soon as a layout is finished."""
    line = f"[{done}/{total}] {result.verdict:7} {result.cell.name} ({result.seconds:.1f} s)"
    console.print(Text(line), soft_wrap=True)


def print_table(console: Console, results: Sequence[CellResult], tolerance: float) -> None:
    """Errors of every layout; below, what fp64 decided, and the first difference where any is."""
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
        cells = [result.cell.name, str(result.cell.layout.world_size), *errors, result.verdict]
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    for result in results:
        lines = _doubts(result, tolerance)
        for found in result.deciding:
            if found.first:
                lines += [f"first:   {found.first}", f"largest: {found.largest}"]
        if result.failure:
            lines += result.failure.strip().splitlines()[-_FAILURE_LINES:]
        if lines:
            console.print(Text("\n  ".join([result.cell.name, *lines])), soft_wrap=True)


def _doubts(result: CellResult, tolerance: float) -> list[str]:
    """How a layout was judged if fp32 left it open."""
    if result.comparison is None or result.repeated is None:
        return []
    exact = TOLERANCE["fp64"]
    lines = [
        f"fp32: error {_number(result.comparison.error)} (tolerance {tolerance:g})",
        f"fp64: error {_number(result.repeated.error)} (tolerance {exact:g})",
    ]
    if result.plain is not None:
        lines[-1] += ", with the plain optimizer: the engine's distributed one has no fp64"
        lines.append(
            f"fp32: distributed against plain optimizer, both on this layout: error "
            f"{_number(result.plain.error)} (tolerance {tolerance:g})"
        )
    return lines


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
    """Write every error of every tensor of every layout."""
    document = {
        "recipe": str(recipe),
        "precision": precision,
        "tolerance": tolerance,
        "passed": all(result.passed for result in results),
        "notes": list(notes),
        "layouts": [_as_json(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_document(path, document)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file, with infinity and NaN as text."""
    text = json.dumps(finite(document), indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _as_json(result: CellResult) -> dict[str, Any]:
    layout, found = result.cell.layout, result.comparison
    differing = next((one for one in result.deciding if one.first is not None), None)
    return {
        "name": result.cell.name,
        "ranks": layout.world_size,
        "grids": {name: asdict(grid) for name, grid in layout.grids.items()},
        "colocated": sorted(layout.colocated),
        "passed": result.passed,
        "verdict": result.verdict,
        "seconds": round(result.seconds, 3),
        "failure": result.failure,
        "first_difference": asdict(differing.first) if differing and differing.first else None,
        "largest_difference": asdict(differing.largest)
        if differing and differing.largest
        else None,
        **_errors(found),
        "repeated_in_fp64": _errors(result.repeated) if result.repeated else None,
        "against_plain_optimizer": _errors(result.plain) if result.plain else None,
    }


def _errors(found: Comparison | None) -> dict[str, Any]:
    """Every error of every tensor and every metric of the steps."""
    return {
        "steps": found.scalars if found else [],
        "gradients": found.gradients if found else {},
        "weights": found.weights if found else {},
    }


def finite(value: Any) -> Any:
    """Turn infinity and NaN, which JSON does not have, into text."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
