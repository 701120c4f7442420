"""How every benchmark tells what it found: tables, one picture, all figures, and its bounds."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mimo.bench.contest import Contest
from mimo.device import backend

_WIDTH = 140  # of tables in a file
_SOFTWARE = ("torch", "megatron-core")


@dataclass(frozen=True)
class Bound:
    """One promise: `value` at most, or at least, `limit`."""

    name: str
    value: float
    limit: float
    at_most: bool

    @property
    def holds(self) -> bool:
        """Whether it was kept."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        """For example `plan for 1024 ranks, ms: 3.1, at most 5`."""
        way = "at most" if self.at_most else "at least"
        return f"{self.name}: {self.value:.4g}, {way} {self.limit:g}"


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    notes: what a reader must know to judge it. contests: with ratios in the table and the picture.
    columns: of the contests' table: name -> a contestant's cell. figure: of `Run`, whose ratios are
    drawn. tables: further ones, by title: records with equal names; of a list, median and largest
    are shown. others: further figures for the JSON file, by name.
    """

    title: str
    notes: Sequence[str]
    contests: Sequence[Contest]
    columns: Mapping[str, Callable[[Contest, str], str]]
    bounds: Sequence[Bound]
    figure: str = "seconds"
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    software: Sequence[str] = _SOFTWARE

    def conclude(self, picture: Path, json_path: Path | None, judge_speed: bool = True) -> int:
        """Print, draw and write everything; returns 1 when a bound is missed.

        judge_speed: false where only what is bounded from above must hold.
        """
        console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
        machine = _machine(self.software)
        console.print(*(f"{name} {value}" for name, value in machine.items()), sep=", ")
        bounds = [
            (
                bound.name,
                f"{bound.value:.4g}",
                f"{'≤' if bound.at_most else '≥'} {bound.limit:g}",
                "holds" if bound.holds else "[bold red]missed[/]",
            )
            for bound in self.bounds
        ]
        console.print(self._contests())
        for title, records in self.tables.items():
            rows = [[_cell(value) for value in record.values()] for record in records]
            console.print(_table(title, list(records[0]), rows))
        for note in self.notes:
            console.print(f"- {note}", highlight=False, soft_wrap=True)
        console.print(_table("what must hold", ("bound", "measured", "limit", ""), bounds))
        picture.parent.mkdir(parents=True, exist_ok=True)
        self._draw(picture)
        print(f"picture: {picture}")
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            found = {
                "machine": machine,
                "notes": self.notes,
                "runs": {
                    contest.name: {name: [*map(asdict, own)] for name, own in contest.runs.items()}
                    for contest in self.contests
                },
                "bounds": [{**asdict(bound), "holds": bound.holds} for bound in self.bounds],
                "tables": self.tables,
                **self.others,
            }
            json_path.write_text(json.dumps(found, indent=1) + "\n")
            print(f"figures: {json_path}")
        judged = [bound for bound in self.bounds if bound.at_most or judge_speed]
        missed = [bound for bound in judged if not bound.holds]
        for bound in missed:
            print(f"missed: {bound}")
        print(f"bounds_kept={len(judged) - len(missed)} bounds_missed={len(missed)}")
        return 1 if missed else 0

    def _contests(self) -> Table:
        """All contests; ratios are to ours: median, least and most."""
        ratios = {"time / ours": "seconds"}
        if all(run.processor_seconds for one in self.contests for run in one.runs[one.ours]):
            ratios["CPU / ours"] = "processor_seconds"
        rows = []
        for contest in self.contests:
            for name in contest.runs:
                cells = [contest.name if name == contest.ours else "", name]
                cells += [cell(contest, name) for cell in self.columns.values()]
                for figure in ratios.values() if name != contest.ours else ():
                    all_ratios = contest.ratios(name, figure)
                    spread = f"({min(all_ratios):.2f} to {max(all_ratios):.2f})"
                    cells.append(f"{contest.ratio(name, figure):.2f} × {spread}")
                rows.append(cells)
        return _table(self.title, ("", "contestant", *self.columns, *ratios), rows)

    def _draw(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        bars = [
            (f"{contest.name}: {rival}", contest.ratios(rival, self.figure))
            for contest in reversed(self.contests)
            for rival in reversed([*contest.runs])
            if rival != contest.ours
        ]
        height = 1.5 + 0.25 * len(bars)
        figure, axis = pyplot.subplots(figsize=(11, height), layout="constrained")
        for place, (_, ratios) in enumerate(bars):
            axis.barh(place, statistics.median(ratios), color="#d4722b")
            axis.hlines(place, min(ratios), max(ratios), color="#222222", linewidth=1)
            text = f" {statistics.median(ratios):.2f} ×"
            axis.text(max(ratios), place, text, va="center", fontsize=8)
        axis.axvline(1, color="#1f6feb")
        axis.margins(x=0.1, y=0.01)
        axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
        axis.set_xlabel(f"{self.figure.replace('_', ' ')}, times ours")
        axis.set_title(self.title)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table; its first column is words, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"{statistics.median(value):.3f} ({max(value):.3f})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _machine(software: Sequence[str]) -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: version(package) for package in software},
        "backend": backend(),
    }
