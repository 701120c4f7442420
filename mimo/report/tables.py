"""Tables on the console, numbers as text, and the files of reports."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as ConsoleTable
from rich.text import Text

from mimo.errors import InputError

_LOG_WIDTH = 160  # characters; a log file has no width of its own


@dataclass(frozen=True)
class Table:
    """words: all cells are flush left; else only the first, and numbers are flush right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False
    title: str = ""


def show(*tables: Table) -> None:
    """Print the tables that have rows."""
    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    for table in tables:
        if not table.rows:
            continue
        shown = ConsoleTable(title=table.title or None)
        for place, column in enumerate(table.columns):
            is_left = table.words or place == 0
            shown.add_column(column, justify="left" if is_left else "right", overflow="fold")
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)


def number(value: float | None) -> str:
    """Format a number; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"


def percent(value: float | None) -> str:
    """Format a share; a dash for None."""
    return "–" if value is None else f"{100 * value:.1f} %"


def scientific(value: float) -> str:
    """Format an error with two digits; 0 exactly where nothing differs."""
    return "0" if value == 0 else f"{value:.1e}"


def write(page: Path, text: str) -> None:
    """Write a file and print its name. Raises InputError."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{page} cannot be written ({error.strerror}); name another") from error
    print(f"written: {page}")


def check_writable(path: Path | None) -> None:
    """Raise InputError for a file of --json that cannot be written: before the runs, not after."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise InputError(f"--json {path}: {error.strerror}; give the path of a file") from error


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write plain data and dataclasses, with infinity and NaN as text."""
    plain = json.dumps(document, default=asdict)
    document = json.loads(plain, parse_constant=lambda constant: str(float(constant)))
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
