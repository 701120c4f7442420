"""How comparisons are printed and written: one table printer and one JSON writer."""

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

from mimo.errors import InputError

_LOG_WIDTH = 120  # characters


def open_console() -> Console:
    """Return a console on standard output; a log file, which has no width, gets a fixed one."""
    return Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)


def print_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str] = (),
) -> None:
    """Print a table; its first column may fold. left: other columns that are left-aligned."""
    table = Table(title=title)
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def format_error(error: float) -> str:
    """Return an error with two digits; 0 exactly where nothing differs."""
    return "0" if error == 0 else f"{error:.1e}"


def check_writable(path: Path | None) -> None:
    """Raise InputError for a file that cannot be written: before the runs, not after them."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise InputError(f"--json {path}: {error.strerror}; give the path of a file") from error


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write plain data and dataclasses, with infinity and NaN as text."""
    plain = json.dumps(document, default=asdict)
    document = json.loads(plain, parse_constant=lambda constant: str(float(constant)))
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
