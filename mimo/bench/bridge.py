"""`mimo bench bridge`: measures what the bridge gains, and whether it keeps its promises.

Its parts: against Megatron's bridge, sharded against replicated delivery, ours against its bare
messages, the time to plan, and the balance of items over lanes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mimo.bench.bridge_balance import BALANCE_ITEMS, measure_balance
from mimo.bench.bridge_bounds import JUDGED_TP, bounds
from mimo.bench.bridge_picture import draw
from mimo.bench.bridge_planning import PLAN_RANKS, time_step
from mimo.bench.bridge_report import Report, notes
from mimo.bench.bridge_result import Contest, Rival, Traffic
from mimo.bench.bridge_tables import print_tables
from mimo.bench.bridge_workload import Case
from mimo.bench.outcome import RanksFailed, conclude, machine, open_console
from mimo.errors import InputError
from mimo.launch.ranks import launch, warm_up

PRELOAD = ("mimo.engines.megatron.preload", "mimo.bench.bridge_contest")

# Layouts that both bridges support: no CP, and lane counts that divide. The first is the headline.
CASES = (
    Case(encoder_tp=1, encoder_lanes=1, language_tp=4, language_lanes=1),
    Case(encoder_tp=1, encoder_lanes=2, language_tp=4, language_lanes=1),
    Case(encoder_tp=2, encoder_lanes=2, language_tp=4, language_lanes=1),
    Case(encoder_tp=1, encoder_lanes=1, language_tp=2, language_lanes=1),
    Case(encoder_tp=1, encoder_lanes=1, language_tp=2, language_lanes=2),
    Case(encoder_tp=1, encoder_lanes=1, language_tp=4, language_lanes=1, sp=False),
)
_SECOND_SIZE = 4  # how many times fewer rows the second size has


def check_rows(rows: int, cases: Sequence[Case] = CASES) -> None:
    """Raise InputError if lanes cannot get equal rows in both sizes."""
    step = _SECOND_SIZE * max(case.lanes_once for case in cases)
    if rows < 4 * step or rows % step:
        raise InputError(f"--rows: got {rows}, needs a multiple of {step} from {4 * step} on")


def contest(case: Case, rows: int, hidden: int, repeats: int, rival: Rival) -> Contest:
    """Start the ranks of one layout and return what they measured. Raises RanksFailed."""
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
        found = Path(directory) / "contest.json"
        code = launch(
            "mimo.bench.bridge_contest:in_world",
            (found, case, rows, hidden, repeats, rival),
            case.layout.world_size,
            PRELOAD,
        )
        if code != 0:
            raise RanksFailed(code)
        values = json.loads(found.read_text())
    for key in ("rows_received", "gradients_received"):
        values[key] = Traffic(**values[key])
    return Contest(**values)


def measure(
    rows: int, hidden: int, repeats: int, cases: Sequence[Case], console: Console
) -> Report:
    """Run all parts one after the other, showing progress."""
    warm_up(PRELOAD)  # the engine loads while the parts without ranks run; those are repeated
    sizes = (rows, rows // _SECOND_SIZE)
    judged = [case for case in cases if case.sp and case.language_tp == JUDGED_TP]
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        steps = progress.add_task("", total=len(sizes) * (len(cases) + len(judged) + 1) + 6)

        def step[T](what: str, part: Callable[[], T]) -> T:
            progress.update(steps, description=what)
            if not console.is_terminal:
                print(f"{what} ...", file=sys.stderr, flush=True)
            found = part()
            progress.advance(steps)
            return found

        def against(rival: Rival, case: Case, size: int) -> Contest:
            what = f"{case}, {size} rows, against {rival}"
            return step(what, lambda: contest(case, size, hidden, repeats, rival))

        megatron = [against("megatron", case, size) for size in sizes for case in cases]
        replicated = [against("replicated", cases[0], size) for size in sizes]
        messages = [against("messages", case, size) for size in sizes for case in judged]
        # After the ranks have ended, so that nothing else runs.
        plans = [
            step(f"plan for {n} ranks", lambda n=n, packed=packed: time_step(n, packed))
            for n in PLAN_RANKS
            for packed in (False, True)
        ]
        balance = [
            step(f"balance of {n} items", lambda n=n: measure_balance(n)) for n in BALANCE_ITEMS
        ]
    return Report(
        machine=machine(),
        notes=notes(),
        repeats=repeats,
        against_megatron=megatron,
        against_replicated=replicated,
        against_messages=messages,
        plan=plans,
        balance=balance,
        bounds=bounds(megatron, plans, balance),
    )


def main(
    rows: int,
    hidden: int,
    repeats: int,
    json_path: Path | None,
    picture: Path,
    cases: Sequence[Case] = CASES,
) -> int:
    """Measure, print, draw and judge; returns 1 when a bound is missed."""
    check_rows(rows, cases)
    console = open_console()
    try:
        report = measure(rows, hidden, repeats, cases, console)
    except RanksFailed as failed:
        return failed.exit_code
    print_tables(report, console)
    return conclude(report.bounds, partial(draw, report), picture, report.to_json(), json_path)
