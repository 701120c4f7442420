"""How every benchmark compares and reports.

Contestants take turns, ratios are taken within a round; the report is tables, all figures as JSON,
and the bounds that must hold.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

from mimo.cli.options import readable_errors
from mimo.device import backend
from mimo.report.tables import Table, check_writable, show, write_json
from mimo.runtime.run_files import versions

Figures = Annotated[Path | None, typer.Option("--json", help="Write all figures there.")]
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
    contestants: Mapping[Name, Callable[[], Run]], rounds: int, prints: bool = True
) -> dict[Name, list[Run]]:
    """Let every contestant run once a round, each round beginning with another."""
    names = [*contestants]
    runs = {name: list[Run]() for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(contestants[name]())
            if prints:
                print(f"[{number + 1}/{rounds}] {name}: {runs[name][-1].seconds:.1f} s", flush=True)
    return runs


@dataclass(frozen=True)
class Contest:
    """Runs of contestants that did the same work, round by round; the first contestant is ours."""

    name: str
    runs: Mapping[str, Sequence[Run]]

    @property
    def ours(self) -> str:
        return next(iter(self.runs))

    def ratios(self, rival: str, figure: str = "seconds") -> list[float]:
        """How many times as much as ours a rival took in each round."""
        pairs = zip(self.figures(rival, figure), self.figures(self.ours, figure), strict=True)
        return [theirs / ours for theirs, ours in pairs]

    def ratio(self, rival: str, figure: str = "seconds") -> float:
        return statistics.median(self.ratios(rival, figure))

    def median(self, contestant: str, figure: str = "seconds") -> float:
        return statistics.median(self.figures(contestant, figure))

    def figures(self, contestant: str, figure: str) -> list[float]:
        """A figure of each `Run`, or of its result."""
        return [(vars(run) | (run.result or {}))[figure] for run in self.runs[contestant]]


def timed(function: Callable[[], Any]) -> Run:
    """Time a call in this process; the processor time of its children counts too."""
    started, used = time.perf_counter(), _processor_seconds()
    result = function()
    return Run(time.perf_counter() - started, _processor_seconds() - used, result)


def _processor_seconds() -> float:
    """Return the processor time of this process and its children, ended ones included."""
    total = 0.0
    for process in (root := psutil.Process(), *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


@contextmanager
def workers(*makes: Callable[[], Callable[..., Any]]) -> Iterator[Callable[..., Any]]:
    """Fork a process for each of ``makes``; yield a function that calls all processes at once.

    makes: each is called in its process and returns the function that calls of the process run;
    the function keeps its state between calls. A call returns the result of the first process. It
    raises what a function raises, and BrokenProcessPool if a process dies or a make fails.
    """
    with ExitStack() as stack:
        pools = [ProcessPoolExecutor(1, get_context("fork"), _start, (make,)) for make in makes]
        for pool in pools:
            stack.enter_context(pool).submit(int)  # fork now, before the caller has other threads

        def call(*args: Any) -> Any:
            futures = [pool.submit(_answer, *args) for pool in pools]
            first, *_ = [future.result() for future in futures]
            return first

        yield call


_function: Callable[..., Any]


def _start(make: Callable[[], Callable[..., Any]]) -> None:
    global _function
    # Threads that have computed in the starter are not in its fork, which would wait for them.
    torch.set_num_threads(1)
    _function = make()


def _answer(*args: Any) -> Any:
    return _function(*args)


@dataclass(frozen=True)
class Bound:
    """One promise: `value` at most, or at least, `limit`."""

    name: str
    value: float
    limit: float
    at_most: bool

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def conclude(
    title: str,
    contests: Sequence[Contest],
    columns: Mapping[str, Callable[[Contest, str], float]],
    bounds: Sequence[Bound],
    json_path: Path | None,
    judge_speed: bool = True,
) -> int:
    """Print and write everything; return 1 when a bound is missed.

    columns: of the contests' table: name -> a contestant's figure, left empty where a contest has
    none. judge_speed: false to judge only bounds that are upper limits.
    """
    machine = {"cores": len(os.sched_getaffinity(0)), "backend": backend(), **versions()}
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    show(_contests(title, contests, columns))
    for bound in bounds:
        comparison = f"{bound.value:.4g} {'≤' if bound.at_most else '≥'} {bound.limit:g}"
        print(f"{'holds ' if bound.holds else 'missed'}  {bound.name}: {comparison}")
    if json_path is not None:
        content: dict[str, Any] = {"machine": machine, "title": title}
        content["runs"] = {contest.name: contest.runs for contest in contests}
        content["bounds"] = [{**asdict(bound), "holds": bound.holds} for bound in bounds]
        check_writable(json_path)
        write_json(json_path, content)
    judged = [bound for bound in bounds if bound.at_most or judge_speed]
    missed = sum(not bound.holds for bound in judged)
    print(f"bounds_kept={len(judged) - missed} bounds_missed={missed}")
    return int(missed > 0)


def _contests(
    title: str, contests: Sequence[Contest], columns: Mapping[str, Callable[[Contest, str], float]]
) -> Table:
    """All contests; ratios are to ours: median, least and most."""
    ratios = {"time / ours": "seconds"}
    rivalries = [contest for contest in contests if len(contest.runs) > 1]
    if all(run.processor_seconds for contest in rivalries for run in contest.runs[contest.ours]):
        ratios["CPU / ours"] = "processor_seconds"
    rows = []
    for contest in contests:
        for name in contest.runs:
            cells = [contest.name if name == contest.ours else "", name]
            for cell in columns.values():
                try:
                    cells.append(f"{cell(contest, name):.4g}")
                except KeyError:
                    cells.append("")
            for figure in ratios.values() if name != contest.ours else ():
                all_ratios = contest.ratios(name, figure)
                spread = f"({min(all_ratios):.2f} to {max(all_ratios):.2f})"
                cells.append(f"{contest.ratio(name, figure):.2f} × {spread}")
            cells += [""] * (1 + len(columns) + 1 + len(ratios) - len(cells))
            rows.append(cells)
    return Table(("", "contestant", *columns, *ratios), rows, title=title)
