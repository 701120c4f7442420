"""How every benchmark compares and reports.

Contestants take turns, ratios are taken within a round; the report is tables, one picture, all
figures as JSON, and the bounds that must hold.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import wraps
from importlib.metadata import version
from multiprocessing.connection import Connection
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


_IDLE_SECONDS = 0.02  # a process that uses the processor less than a tenth of this time is idle
_END_SECONDS = 10.0  # that a process gets to end by itself


@dataclass(frozen=True)
class Run:
    """The cost of one run over all processes of its contestant, and what it returned."""

    seconds: float
    processor_seconds: float = 0.0
    result: Any = None


def take_turns(
    contestants: Mapping[str, Callable[[], Run]], rounds: int, tell: bool = False
) -> dict[str, list[Run]]:
    """Let everyone run once a round, each round beginning with another; tell: print each turn."""
    names = [*contestants]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(contestants[name]())
            if tell:
                seconds = runs[name][-1].seconds
                print(f"[{number + 1}/{rounds}] {name}: {seconds:.1f} s", flush=True)
    return runs


@dataclass(frozen=True)
class _Failure:
    traceback: str


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
        """The median of a figure."""
        return statistics.median(getattr(run, figure) for run in self.runs[contestant])


def timed(function: Callable[[], Any], until_idle: bool = False) -> Run:
    """Call it in this process. until_idle: what it goes on to do in the background counts too."""
    started, used = time.perf_counter(), _processor_seconds()
    result = function()
    ended = _idle_since() if until_idle else time.perf_counter()
    return Run(ended - started, _processor_seconds() - used, result=result)


class Worker:
    """Call a function in a forked process that keeps its state between calls.

    make: called in the process; returns the function.
    """

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, self._pipe, other_end))
        self._process.start()
        other_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(_END_SECONDS)
        self._process.kill()
        self._process.join()

    def __call__(self, *args: Any) -> Any:
        """Raise RuntimeError with the traceback, or the exit code, of a process that fails."""
        with suppress(OSError):  # the process has ended; its last message is still in the pipe
            self._pipe.send(args)
        try:
            result = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_END_SECONDS)
            ended = f"it ended with exit code {self._process.exitcode}"
            raise RuntimeError(f"a process of the benchmark failed: {ended}") from None
        if isinstance(result, _Failure):
            raise RuntimeError(f"a process of the benchmark failed:\n{result.traceback}")
        return result


def in_subprocess(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of its own."""
    with Worker(lambda: function) as process:
        return process()


def _serve(make: Callable[[], Callable[..., Any]], starters: Connection, pipe: Connection) -> None:
    starters.close()
    # Threads that have computed in the starter are not in its fork, which would wait for them.
    torch.set_num_threads(1)
    with suppress(OSError):  # the starter is gone
        try:
            answer = make()
            while (args := pipe.recv()) is not None:
                pipe.send(answer(*args))
        except Exception:  # the starter raises it, where people look
            pipe.send(_Failure(traceback.format_exc()))


def _idle_since() -> float:
    """Wait until no thread of this process computes."""
    while True:
        now, used = time.perf_counter(), time.process_time()
        time.sleep(_IDLE_SECONDS)
        if time.process_time() - used < _IDLE_SECONDS / 10:
            return now


def _tree(pid: int | None = None) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _processor_seconds() -> float:
    """Of this process and all below it."""
    total = 0.0
    for process in _tree():
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # of users and system, of ended children too
    return total


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
