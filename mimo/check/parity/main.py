"""`mimo parity`: does a layout compute what transformers computes from the same checkpoint?

Or what another layout computes, by the other engine or the same.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console

from mimo.check.parity.compare import TOLERANCE, Line, Parity
from mimo.check.parity.runner import PRELOAD, ParityRunner
from mimo.check.verify.compare import IncomparableError
from mimo.check.verify.report import check_writable, log_console, print_rows, write_document
from mimo.errors import InputError
from mimo.runtime.processes import RanksFailed, RanksHung
from mimo.runtime.ranks import warm_up_on_cpu

Engine = Literal["megatron", "fsdp"]
TRANSFORMERS = "transformers"
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
    checkpoint: Path,
    overrides: Sequence[str],
    tolerance: float | None,
    json: Path | None,
    engine: Engine = "megatron",
    against: str = TRANSFORMERS,
) -> int:
    """Print a table of errors; 0 if both sides are equal, else 1.

    tolerance: None for the default in fp32. engine: of all our modules. against: "transformers", or
    an engine and overrides of another layout, separated by spaces.
    Raises InputError for bad input, before any rank starts.
    """
    check_writable(json)
    own = [*on_engine(engine), *overrides]
    other = None if against.strip() == TRANSFORMERS else other_side(against)
    with tempfile.TemporaryDirectory(prefix="mimo-parity-") as folder:
        runner = ParityRunner(checkpoint, Path(folder))
        sides = runner.prepare(own, other)
        warm_up_on_cpu(PRELOAD)
        try:
            found = runner.run(own, TOLERANCE if tolerance is None else tolerance, against=other)
        except (RanksFailed, RanksHung, IncomparableError) as error:
            print(error, file=sys.stderr)
            return 1
    ranks = " against ".join(f"{layout.world_size} ranks" for _, layout in sides)
    title = f"{checkpoint}, {ranks}: {engine} against {against.strip()} (fp32)"
    print_table(log_console(), found, title)
    if json is not None:
        write_json(json, found, checkpoint, own, against)
    print(verdict(found))
    return 0 if found.passed else 1


def on_engine(engine: str) -> list[str]:
    """Overrides that run all our modules by an engine."""
    return [f"{module}.engine={engine}" for module in ("language", "encoders.vision")]


def other_side(words: str) -> list[str]:
    """Overrides of another layout: an engine, and overrides. Raises InputError."""
    with suppress(ValueError):  # a quote that does not end
        engine, *overrides = shlex.split(words) or [""]
        if engine in get_args(Engine):
            return [*on_engine(engine), *overrides]
    raise InputError(
        f"--against {words!r}: give {TRANSFORMERS}, or an engine and perhaps its layout, such as "
        "'megatron language.grid.pp=2'"
    )


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


def write_json(
    path: Path, found: Parity, checkpoint: Path, overrides: Sequence[str], against: str
) -> None:
    """Write every error of every point and parameter."""
    document = {
        "checkpoint": str(checkpoint),
        "overrides": list(overrides),
        "against": against,
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
