"""How every benchmark compares and reports.

Contestants take turns, ratios are taken within a round; the report is tables, one picture, all
figures as JSON, and the bounds that must hold.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import wraps
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Self

import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table

from mimo.device import backend
from mimo.errors import InputError

Figures = Annotated[Path | None, typer.Option("--json", help="Write all figures there.")]
_IDLE_SECONDS = 0.02  # a process that uses the processor less than a tenth of this time is idle
Quick = Annotated[bool, typer.Option("--quick", help="One round of a tiny case; speed not judged.")]


def command(main: Callable[..., int]) -> typer.Typer:
    """Return a command line: options are `main`'s parameters, the exit code is its result."""
    app = typer.Typer(add_completion=False)

    @app.command(help=main.__doc__)
    @wraps(main)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = main(*args, **kwargs)
        except InputError as error:
            print(error, file=sys.stderr)
            code = 2
        raise typer.Exit(code)

    return app


@dataclass(frozen=True)
class Run:
    """The cost of one run over all processes of its contestant, and what it returned."""

    seconds: float
    processor_seconds: float = 0.0
    result: Any = None


def take_turns(
    contestants: Mapping[str, Callable[[], Run]], rounds: int, verbose: bool = False
) -> dict[str, list[Run]]:
    """Let every contestant run once a round, each round beginning with another."""
    names = [*contestants]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(contestants[name]())
            if verbose:
                seconds = runs[name][-1].seconds
                print(f"[{number + 1}/{rounds}] {name}: {seconds:.1f} s", flush=True)
    return runs


@dataclass(frozen=True)
class Contest:
    """Runs of contestants that did the same work, round by round; the first contestant is ours."""

    name: str
    runs: Mapping[str, Sequence[Run]]

    @property
    def ours(self) -> str:
        """The name of our contestant."""
        return next(iter(self.runs))

    def ratios(self, rival: str, figure: str = "seconds") -> list[float]:
        """How many times as much as ours a rival took in each round."""
        pairs = zip(self.runs[rival], self.runs[self.ours], strict=True)
        return [getattr(theirs, figure) / getattr(ours, figure) for theirs, ours in pairs]

    def ratio(self, rival: str, figure: str = "seconds") -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios(rival, figure))

    def median(self, contestant: str, figure: str = "seconds") -> float:
        """The median of a figure of `Run`, or of its result."""
        runs = [vars(run) | (run.result or {}) for run in self.runs[contestant]]
        return statistics.median(run[figure] for run in runs)


def timed(function: Callable[[], Any], until_idle: bool = False) -> Run:
    """Call it in this process, whose children's processor time counts too.

    until_idle: what its threads go on to do in the background counts, too.
    """
    started, used = time.perf_counter(), _processor_seconds()
    result = function()
    ended, is_busy = time.perf_counter(), until_idle
    while is_busy:
        ended, before = time.perf_counter(), time.process_time()
        time.sleep(_IDLE_SECONDS)
        is_busy = time.process_time() - before > _IDLE_SECONDS / 10
    return Run(ended - started, _processor_seconds() - used, result)


class Worker:
    """Call a function in a forked process that keeps its state between calls.

    make: called in the process; returns the function. A call raises what the function raises, and
    BrokenProcessPool when the process dies.
    """

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("fork"), _start, (make,))
        self._pool.submit(int)  # fork now, before the caller has other threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def __call__(self, *args: Any) -> Any:
        """Return what the function returns."""
        return self._pool.submit(_answer, *args).result()


def in_subprocess(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of its own."""
    with Worker(lambda: function) as process:
        return process()


_make: Callable[[], Callable[..., Any]]
_function: Callable[..., Any] | None = None


def _start(make: Callable[[], Callable[..., Any]]) -> None:
    global _make
    _make = make
    # Threads that have computed in the starter are not in its fork, which would wait for them.
    torch.set_num_threads(1)


def _answer(*args: Any) -> Any:
    global _function
    if _function is None:
        _function = _make()
    return _function(*args)


def _processor_seconds() -> float:
    """Return the processor time of this process and its children, ended ones included."""
    total = 0.0
    for process in (root := psutil.Process(), *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


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
    """The result of a benchmark.

    notes: what a reader must know to judge it. contests: with ratios in the table and the picture.
    columns: of the contests' table: name -> a contestant's cell. figure: of `Run`, whose ratios are
    drawn. tables: further ones, by title: records with equal names. others: further figures for the
    JSON file, by name. software: packages whose versions are shown.
    """

    title: str
    notes: Sequence[str]
    contests: Sequence[Contest]
    columns: Mapping[str, Callable[[Contest, str], str]]
    bounds: Sequence[Bound]
    figure: str = "seconds"
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    software: Sequence[str] = ("torch", "megatron-core")

    def conclude(self, picture: Path, json_path: Path | None, judge_speed: bool = True) -> int:
        """Print, draw and write everything; return 1 when a bound is missed.

        judge_speed: false where only what is bounded from above must hold.
        """
        console = Console() if sys.stdout.isatty() else Console(width=140)
        machine = {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            **{package: version(package) for package in self.software},
            "backend": backend(),
        }
        console.print(*(f"{name} {value}" for name, value in machine.items()), sep=", ")
        console.print(self._contests())
        for title, records in self.tables.items():
            rows = [
                [f"{v:.4g}" if isinstance(v, float) else str(v) for v in record.values()]
                for record in records
            ]
            console.print(_table(title, list(records[0]), rows))
        for note in self.notes:
            console.print(f"- {note}", highlight=False, soft_wrap=True)
        bounds = [
            (
                bound.name,
                f"{bound.value:.4g}",
                f"{'≤' if bound.at_most else '≥'} {bound.limit:g}",
                "holds" if bound.holds else "[bold red]missed[/]",
            )
            for bound in self.bounds
        ]
        console.print(_table("what must hold", ("bound", "measured", "limit", ""), bounds))
        self._draw(picture)
        print(f"picture: {picture}")
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            runs = {
                contest.name: {name: [*map(asdict, runs)] for name, runs in contest.runs.items()}
                for contest in self.contests
            }
            content = {
                "machine": machine,
                "notes": self.notes,
                "runs": runs,
                "bounds": [{**asdict(bound), "holds": bound.holds} for bound in self.bounds],
                "tables": self.tables,
                **self.others,
            }
            json_path.write_text(json.dumps(content, indent=1) + "\n")
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
        size = (11, 1.5 + 0.25 * len(bars))
        figure, axis = pyplot.subplots(figsize=size, layout="constrained")
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
        path.parent.mkdir(parents=True, exist_ok=True)
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
