"""A page of one file that needs no network: what is on it, and how it is written."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.table import Table as ConsoleTable
from rich.text import Text

from mimo.errors import InputError
from mimo.report.pictures import Picture

_LOG_WIDTH = 160  # characters; a log file has no width of its own


@dataclass(frozen=True)
class Table:
    """words: whether all cells stand left; else the first alone, and numbers right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False


@dataclass(frozen=True)
class Section:
    """text: long, and folded away."""

    title: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    text: str = ""

    @property
    def says_something(self) -> bool:
        """Whether there is more than a title."""
        return bool(self.pictures or self.text or self.note or any(t.rows for t in self.tables))


@dataclass(frozen=True)
class Part:
    """Of a page: figures at a glance by name, and sections. Without a title it is the only one.

    facts: by name, what the rest is about.
    """

    title: str
    tiles: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[Section] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def render(title: str, parts: Sequence[Part]) -> str:
    """The page as HTML; whatever is given is escaped, and no script but the page's own runs."""
    environment = Environment(
        loader=PackageLoader("mimo.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    script = (files("mimo.report") / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment.get_template("page.html")
    return template.render(title=title, parts=parts, script=Markup(script), digest=digest)


def write(page: Path, text: str) -> None:
    """Write a page. Raises InputError."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{page} cannot be written ({error.strerror}); name another") from error
    print(f"written: {page}")


def show(*tables: Table) -> None:
    """Print those that have rows."""
    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    for one in tables:
        if one.rows:
            shown = ConsoleTable(*one.columns)
            for row in one.rows:
                shown.add_row(*map(Text, row))
            console.print(shown)


def number(value: float | None, unit: str = "") -> str:
    """A figure for people; a dash for none."""
    if value is None:
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"
    return f"{text} {unit}".strip()


def percent(value: float | None) -> str:
    """A share for people; a dash for none."""
    return "–" if value is None else f"{100 * value:.1f} %"
