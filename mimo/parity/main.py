"""`mimo parity`: does a layout compute what transformers computes from the same checkpoint?"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mimo.launch.processes import RanksFailed, RanksHung
from mimo.launch.ranks import warm_up_on_cpu
from mimo.parity.compare import TOLERANCE, Line, Parity
from mimo.parity.runner import PRELOAD, ParityRunner
from mimo.verify.compare import IncomparableError
from mimo.verify.report import check_writable, log_console, print_rows, write_document

_MEANING = {
    "difference": "max|Δ|",
    "relative": "max|Δ| / max|reference|",
    "unequal": "entries that differ",
}
_STEP = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "gradients": "gradients",
    "weights": "weights as imported",
}


def main(
    checkpoint: Path, overrides: Sequence[str], tolerance: float | None, json: Path | None
) -> int:
    """Print a table of errors; 0 if both sides are equal, else 1.

    tolerance: None for the default in fp32. Raises InputError for bad input, before any rank
    starts.
    """
    check_writable(json)
    with tempfile.TemporaryDirectory(prefix="mimo-parity-") as folder:
        runner = ParityRunner(checkpoint, Path(folder))
        _, layout = runner.prepare(overrides)
        warm_up_on_cpu(PRELOAD)
        try:
            found = runner.run(overrides, TOLERANCE if tolerance is None else tolerance)
        except (RanksFailed, RanksHung, IncomparableError) as error:
            print(error, file=sys.stderr)
            return 1
    title = f"{checkpoint}, transformers against {layout.world_size} ranks (fp32)"
    print_table(log_console(), found, title)
    if json is not None:
        write_json(json, found, checkpoint, overrides)
    print(verdict(found))
    return 0 if found.passed else 1


def print_table(console: Console, found: Parity, title: str) -> None:
    """Print a row per point in forward order, then loss, gradients and imported weights."""
    rows = [
        (line.point, _number(line), _MEANING[line.measure], line.where, line.passed)
        for line in found.lines
    ]
    for what, name in _STEP.items():
        error = found.step.worst(what)
        passed = error <= found.tolerance
        rows.append((name, f"{error:.1e}", _MEANING["relative"], "", passed))
    columns = ("compared", "error", "which is", "furthest off", "result")
    lines = [(*row, "equal" if passed else "DIFFERS") for *row, passed in rows]
    print_rows(console, title, columns, lines, left=columns[2:])


def verdict(found: Parity) -> str:
    """One sentence: equal, or where the two first diverge."""
    if found.passed:
        which = "every gradient"
        if found.compared < found.total:
            which = f"the gradients of the {found.compared} smallest of {found.total} parameters"
        return f"equal: every point, the loss and {which} within {found.tolerance:g}"
    lines = []
    if first := found.first:
        lines.append(
            f"first diverging module: {first.point} on {first.where} ({_MEANING[first.measure]} "
            f"{_number(first)}, tolerance {found.tolerance:g})"
        )
    if found.step.first is not None:
        lines.append(f"first difference of the step: {found.step.first}")
    return "\n".join(lines)


def _number(line: Line) -> str:
    return f"{line.error:g}" if line.measure == "unequal" else f"{line.error:.1e}"


def write_json(path: Path, found: Parity, checkpoint: Path, overrides: Sequence[str]) -> None:
    """Write every error of every point and parameter."""
    document = {
        "checkpoint": str(checkpoint),
        "overrides": list(overrides),
        "tolerance": found.tolerance,
        "passed": found.passed,
        "compared_parameters": found.compared,
        "parameters": found.total,
        "first_diverging": found.first,
        "points": found.lines,
        "step": found.step.scalars,
        "gradients": found.step.gradients,
        "weights": found.step.weights,
        "first_difference_of_step": found.step.first,
    }
    write_document(path, document)
