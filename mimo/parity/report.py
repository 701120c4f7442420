"""What `mimo parity` prints, and what it writes for machines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mimo.parity.compare import Line, Parity
from mimo.verify.report import write_document

_STEP = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "gradients": "gradients",
    "weights": "weights as imported",
}


def print_table(console: Console, found: Parity, title: str) -> None:
    """Print a row per point in forward order, then loss, gradients and imported weights."""
    table = Table(title=title)
    table.add_column("compared", overflow="fold")
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("which is")
    table.add_column("furthest off")
    table.add_column("result", no_wrap=True)
    for line in found.lines:
        verdict = "equal" if line.passed else "DIFFERS"
        cells = (line.point, _number(line), _meaning(line), line.where, verdict)
        table.add_row(*(Text(cell) for cell in cells))
    for what, name in _STEP.items():
        error = found.step.worst(what)
        verdict = "equal" if error <= found.tolerance else "DIFFERS"
        meaning = "max|Δ| / max|reference|"
        table.add_row(*(Text(cell) for cell in (name, f"{error:.1e}", meaning, "", verdict)))
    console.print(table)


def verdict(found: Parity) -> str:
    """One sentence: equal, or where the two first diverge."""
    if found.passed:
        which = "every gradient"
        if found.compared < found.total:
            which = f"the gradients of the {found.compared} smallest of {found.total} parameters"
        return f"equal: every point, the loss and {which} within {found.tolerance:g}"
    lines = []
    if found.first is not None:
        first = found.first
        lines.append(
            f"first diverging module: {first.point} on {first.where} ({_meaning(first)} "
            f"{_number(first)}, tolerance {found.tolerance:g})"
        )
    if found.step.first is not None:
        lines.append(f"first difference of the step: {found.step.first}")
    return "\n".join(lines)


def _meaning(line: Line) -> str:
    return {
        "difference": "max|Δ|",
        "relative": "max|Δ| / max|reference|",
        "unequal": "entries that differ",
    }[line.measure]


def _number(line: Line) -> str:
    return f"{line.error:g}" if line.measure == "unequal" else f"{line.error:.1e}"


def write_json(path: Path, found: Parity, checkpoint: Path, overrides: list[str]) -> None:
    """Write every error of every point and parameter."""
    document: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "overrides": overrides,
        "tolerance": found.tolerance,
        "passed": found.passed,
        "compared_parameters": found.compared,
        "parameters": found.total,
        "first_diverging": found.first and asdict(found.first),
        "points": [asdict(line) for line in found.lines],
        "step": found.step.scalars,
        "gradients": found.step.gradients,
        "weights": found.step.weights,
        "first_difference_of_step": found.step.first and asdict(found.step.first),
    }
    write_document(path, document)
