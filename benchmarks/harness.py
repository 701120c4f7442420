"""How every benchmark compares and reports.

Contestants take turns, ratios are taken within a round; the report is tables, all figures as JSON,
and the bounds that must hold.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Self

import psutil
import torch
import typer

from mimo.cli.options import readable_errors
from mimo.device import backend
from mimo.report.tables import Table, check_writable, show, write_json
from mimo.runtime.run_files import versions

Figures = Annotated[Path | None, typer.Option("--json", help="Write all figures there.")]
_IDLE_SECONDS = 0.02  # a process that uses the processor less than a tenth of this time is idle
Quick = Annotated[bool, typer.Option("--quick", help="One round of a tiny case; speed not judged.")]


def command(main: Callable[..., int]) -> typer.Typer:
    """Return a command line: options are `main`'s parameters, the exit code is its result."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(readable_errors(main))
    return app


@dataclass(frozen=True)
class Run:
    """The cost of one run over all processes of its contestant, and what it returned."""

    seconds: float
    processor_seconds: float = 0.0
    result: Any = None


def take_turns[Name](
    contestants: Mapping[Name, Callable[[], Run]], rounds: int, verbose: bool = False
) -> dict[Name, list[Run]]:
    """Let every contestant run once a round, each round beginning with another."""
    names = [*contestants]
    runs = {name: list[Run]() for name in names}
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
        pairs = zip(self.figures(rival, figure), self.figures(self.ours, figure), strict=True)
        return [theirs / ours for theirs, ours in pairs]

    def ratio(self, rival: str, figure: str = "seconds") -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios(rival, figure))

    def median(self, contestant: str, figure: str = "seconds") -> float:
        """The median of the rounds' figures."""
        return statistics.median(self.figures(contestant, figure))

    def figures(self, contestant: str, figure: str) -> list[float]:
        """A figure of each `Run`, or of its result."""
        runs = self.runs[contestant]
        return [(vars(run) | (run.result or {}))[figure] for run in runs]


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


def conclude[Kind: Contest](
    title: str,
    contests: Sequence[Kind],
    columns: Mapping[str, Callable[[Kind, str], str]],
    bounds: Sequence[Bound],
    json_path: Path | None,
    *,
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    notes: Sequence[str] = (),
    judge_speed: bool = True,
) -> int:
    """Print and write everything; return 1 when a bound is missed.

    columns: of the contests' table: name -> a contestant's cell. tables: further ones by title, as
    records with equal names. judge_speed: false to judge only bounds that are upper limits.
    """
    machine = {"cores": str(len(os.sched_getaffinity(0))), "backend": backend()}
    machine |= versions()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    show(_contests(title, contests, columns))
    for heading, records in (tables or {}).items():
        rows = [[_cell(value) for value in record.values()] for record in records]
        show(Table([*records[0]], rows, title=heading))
    for note in notes:
        print(f"- {note}")
    results = [
        (
            bound.name,
            _cell(float(bound.value)),
            f"{'≤' if bound.at_most else '≥'} {bound.limit:g}",
            "holds" if bound.holds else "missed",
        )
        for bound in bounds
    ]
    show(Table(("bound", "measured", "limit", ""), results, title="what must hold"))
    if json_path is not None:
        content = {"machine": machine, "notes": notes, "tables": tables}
        content["runs"] = {contest.name: contest.runs for contest in contests}
        content["bounds"] = [{**asdict(bound), "holds": bound.holds} for bound in bounds]
        check_writable(json_path)
        write_json(json_path, content)
    judged = [bound for bound in bounds if bound.at_most or judge_speed]
    missed = sum(not bound.holds for bound in judged)
    print(f"bounds_kept={len(judged) - missed} bounds_missed={missed}")
    return int(missed > 0)


def _contests[Kind: Contest](
    title: str, contests: Sequence[Kind], columns: Mapping[str, Callable[[Kind, str], str]]
) -> Table:
    """All contests; ratios are to ours: median, least and most."""
    ratios = {"time / ours": "seconds"}
    if all(run.processor_seconds for contest in contests for run in contest.runs[contest.ours]):
        ratios["CPU / ours"] = "processor_seconds"
    rows = []
    for contest in contests:
        for name in contest.runs:
            cells = [contest.name if name == contest.ours else "", name]
            cells += [cell(contest, name) for cell in columns.values()]
            for figure in ratios.values():
                all_ratios = contest.ratios(name, figure)
                spread = f"({min(all_ratios):.2f} to {max(all_ratios):.2f})"
                text = f"{contest.ratio(name, figure):.2f} × {spread}"
                cells.append("" if name == contest.ours else text)
            rows.append(cells)
    return Table(("", "contestant", *columns, *ratios), rows, title=title)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
