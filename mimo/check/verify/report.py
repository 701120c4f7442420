"""What `mimo verify` prints, and what it writes for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mimo.check.verify.compare import Comparison
from mimo.check.verify.scale import TOLERANCE
from mimo.check.verify.verifier import CellResult
from mimo.errors import InputError

_FAILURE_LINES = 12  # of a rank's traceback
_LOG_WIDTH = 110  # characters
_ERRORS = {"loss": "loss", "norm": "grad_norm", "gradients": "gradients", "weights": "weights"}


def log_console() -> Console:
    """Standard output; a log file, which has no width, gets a fixed one."""
    return Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)


def print_rows(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str] = (),
) -> None:
    """Print a table; its first column may fold, the others stand right, or those of ``left``."""
    table = Table(title=title)
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def print_progress(console: Console, result: CellResult, done: int, total: int) -> None:
    """One line, as soon as a layout is finished."""
    line = f"[{done}/{total}] {result.verdict:7} {result.cell.name} ({result.seconds:.1f} s)"
    console.print(Text(line), soft_wrap=True)


def print_table(console: Console, results: Sequence[CellResult], tolerance: float) -> None:
    """Errors of every layout; below, what fp64 decided, and the first difference where any is."""
    rows = []
    for result in results:
        found = result.comparison
        errors = [_number(found.worst(what)) if found else "-" for what in _ERRORS.values()]
        size = str(result.cell.layout.world_size)
        rows.append((result.cell.name, size, *errors, result.verdict))
    title = f"errors against one rank (tolerance {tolerance:g})"
    print_rows(console, title, ("layout", "ranks", *_ERRORS, "result"), rows)
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
    lines = [
        f"fp32: error {_number(result.comparison.error)} (tolerance {tolerance:g})",
        f"fp64: error {_number(result.repeated.error)} (tolerance {TOLERANCE['fp64']:g})",
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


def check_writable(path: Path | None) -> None:
    """Raise InputError for a file that cannot be written: now, not after the last layout."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise InputError(f"--json {path}: {error.strerror}; give the path of a file") from error


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
        "notes": notes,
        "layouts": [_as_json(result) for result in results],
    }
    write_document(path, document)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file of plain data and dataclasses, with infinity and NaN as text."""
    plain = json.dumps(document, default=asdict)
    document = json.loads(plain, parse_constant=lambda constant: str(float(constant)))
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _as_json(result: CellResult) -> dict[str, Any]:
    layout = result.cell.layout
    differing = next((one for one in result.deciding if one.first is not None), Comparison())
    return {
        "name": result.cell.name,
        "ranks": layout.world_size,
        "grids": layout.grids,
        "colocated": sorted(layout.colocated),
        "passed": result.passed,
        "verdict": result.verdict,
        "seconds": round(result.seconds, 3),
        "failure": result.failure,
        "first_difference": differing.first,
        "largest_difference": differing.largest,
        **_errors(result.comparison or Comparison()),
        "repeated_in_fp64": _errors(result.repeated) if result.repeated else None,
        "against_plain_optimizer": _errors(result.plain) if result.plain else None,
    }


def _errors(found: Comparison) -> dict[str, Any]:
    return {"steps": found.scalars, "gradients": found.gradients, "weights": found.weights}
