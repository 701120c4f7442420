"""Compare the bridge with Megatron's, and check what it promises.

Its parts: against Megatron's bridge, against replicated delivery and against our bare messages, on
several layouts; the time to plan; the balance of items over lanes.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.bridge_planning import (
    PLAN_RANKS,
    StepTime,
    time_step,
)
from benchmarks.bridge_workload import Case
from benchmarks.harness import Bound, Contest, Figures, Report, command
from mimo.errors import InputError
from mimo.runtime.processes import RanksFailed, run_processes, warm_up
from mimo.runtime.ranks import rank_variables

if TYPE_CHECKING:
    from benchmarks.bridge_sides import Passage

PRELOAD = ("mimo.engines.megatron.preload", "benchmarks.bridge_sides")

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

_JUDGED_TP = 4  # of the language model, with SP
_BYTES_OVER_BOUND = 1.01
_FEWER_BYTES = 3.9
_TIMES_FASTER = {"forward": 5.0, "forward + backward": 3.0}
_PLAN_MS = 50.0  # 1 % of a step of 5 seconds
_NOTES = (
    "Megatron's bridge hard-codes nccl for its groups, which was mapped to the backend of ours. It "
    "sums what it receives for its debug log, also when that is off; this is part of its time.",
    "Megatron's ranks were given complete gradients at no cost. With SP, a gather over the TP "
    "group would come first, so this flatters Megatron's backward.",
    "Our plans are made and staged before a run, as in training, where that happens in the "
    "background; a table below has the time of planning.",
    "Bytes are what the ranks at the end of the way receive from anyone, their own module's ranks "
    "included: forward until each holds its first layer's input.",
    "Bare messages are those of our bridge by isend and irecv alone, in memory that is there "
    "already: no plan, no autograd, no timeouts. No bridge that moves as much can be faster.",
    "A run lasts from a start common to all ranks until the last rank is done.",
)


def check_rows(rows: int) -> None:
    """Raise InputError if lanes cannot get equal rows in both sizes."""
    step = _SECOND_SIZE * max(case.lanes_once for case in CASES)
    if rows < 4 * step or rows % step:
        raise InputError(f"--rows: got {rows}, needs a multiple of {step} from {4 * step} on")


def bounds(passages: Sequence[Passage], plans: Sequence[StepTime]) -> list[Bound]:
    """Every promise, kept or not.

    All layouts into tp 4 with SP are judged: bytes in both sizes, speed in the larger one, where
    bytes matter more than the latency of single calls. The tables show all layouts.
    """
    found = [*_of_passages(passages)]
    for plan in plans:
        if plan.num_ranks == PLAN_RANKS[0] and not plan.packed:
            name = f"a step's plan for {plan.num_ranks} ranks, ms"
            found.append(Bound(name, plan.ms, _PLAN_MS, True))
    return found


def _of_passages(passages: Sequence[Passage]) -> Iterator[Bound]:
    judged = [one for one in passages if one.case.sp and one.case.language_tp == _JUDGED_TP]
    most_rows = max((one.rows for one in judged), default=0)
    for one in judged:
        if one.way == "forward":
            ours, theirs = sum(one.received["ours"]), sum(one.received["megatron"])
            over = ours / sum(one.bound)
            yield Bound(f"{one}: bytes / lower bound", over, _BYTES_OVER_BOUND, True)
            yield Bound(f"{one}: Megatron's bytes / ours", theirs / ours, _FEWER_BYTES, False)
        if one.rows == most_rows:
            ratio = Contest("", one.runs).ratio("megatron")
            yield Bound(f"{one}: times faster", ratio, _TIMES_FASTER[one.way], False)


def main(
    rows: Annotated[int, typer.Option(min=1, help="Rows of the larger size.")] = 8192,
    hidden: Annotated[int, typer.Option(min=1, help="Values of a row.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 15,
    rival: Annotated[
        Path | None,
        typer.Option(help="Megatron's bridge_communicator.py, if not the installed one."),
    ] = None,
    json_path: Figures = None,
    picture: Path = Path("runs/bench_bridge.png"),
) -> int:
    """Compare the bridge with Megatron's; exit code 1 if a bound is missed or a rank fails."""
    check_rows(rows)
    baseline = _describe_baseline(rival)
    print(baseline, flush=True)
    warm_up(PRELOAD)
    passages: list[Passage] = []
    try:
        for size in (rows, rows // _SECOND_SIZE):
            for case in CASES:
                print(f"{case}, {size} rows ...", flush=True)
                passages += _on_ranks(case, size, hidden, rounds, rival)
    except RanksFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    # After the ranks have ended, so that nothing else runs.
    plans = [time_step(ranks, packed) for ranks in PLAN_RANKS for packed in (False, True)]
    traffic = {str(one): one for one in passages}

    def received(contest: Contest, contestant: str) -> str:
        one = traffic[contest.name]
        return f"{sum(one.received[contestant]) / sum(one.bound):.3f}"

    report = Report(
        title=f"Bridges, rows of {hidden} fp32, {rounds} rounds",
        notes=(baseline, *_NOTES),
        contests=[Contest(name, one.runs) for name, one in traffic.items()],
        columns={
            "ms": lambda contest, contestant: f"{1e3 * contest.median(contestant):.1f}",
            "bytes / bound": received,
        },
        bounds=bounds(passages, plans),
        tables={
            "a core plans a step of 32 microbatches from the index: median ms": [
                asdict(plan) for plan in plans
            ],
        },
        others={
            "traffic": {
                name: {"received": one.received, "bound": one.bound}
                for name, one in traffic.items()
            }
        },
    )
    return report.conclude(picture, json_path)


def _describe_baseline(rival: Path | None) -> str:
    """Name the file of Megatron's bridge. Raises InputError if it has no such class."""
    if rival is None:
        return "Megatron's bridge: that of the installed megatron-core."
    try:
        source = rival.read_bytes()
        names = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"--rival: cannot read {rival} as Python: {error}") from error
    if rival.suffix != ".py" or "BridgeCommunicator" not in names:
        raise InputError(f"--rival: got {rival}, needs a .py file with class BridgeCommunicator")
    digest = hashlib.sha256(source).hexdigest()[:12]
    return f"Megatron's bridge: {rival} (sha256 {digest}) instead of the installed one."


def _on_ranks(case: Case, rows: int, hidden: int, rounds: int, rival: Path | None) -> list[Passage]:
    args, size = (case, rows, hidden, rounds, rival), case.layout.world_size
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
        variables = rank_variables(Path(directory))
        return run_processes("benchmarks.bridge_sides:in_world", args, size, variables)[0]


if __name__ == "__main__":
    command(main)()
