"""Compare the bridge with Megatron's, and check what it promises.

The comparison is with Megatron's bridge and with our bare messages, on several layouts; the time to
plan is measured, too.

Letters: N rows of the global microbatch, n rows of one rank, H hidden, T packed tokens of one
language lane.
"""

from __future__ import annotations

import hashlib
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.bridge_planning import PLAN_RANKS, StepTime, time_step
from benchmarks.harness import Bound, Contest, Figures, command, conclude
from bridge import BridgePlan, ItemRuns, LaneSegments, ReplicatedSource, sharded_destination
from mimo.errors import InputError
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.runtime.processes import RanksFailed, run_processes, warm_up
from mimo.runtime.ranks import rank_variables

Way = Literal["forward", "forward + backward"]
ENCODER = "vision"
PRELOAD = ("mimo.engines.megatron.preload", "benchmarks.bridge_sides")
_ROWS_PER_ITEM = 128


@dataclass(frozen=True)
class Case:
    """One layout of the comparison: first the encoder's ranks, then the language model's."""

    encoder_tp: int
    encoder_lanes: int
    language_tp: int
    language_lanes: int
    sp: bool = True

    @property
    def layout(self) -> Layout:
        """Both grids, disjoint."""
        encoder = GridSpec(ENCODER, tp=self.encoder_tp, dp=self.encoder_lanes)
        tp, dp, first = self.language_tp, self.language_lanes, encoder.size
        language = GridSpec(LANGUAGE, tp=tp, sp=self.sp, dp=dp, rank_offset=first)
        return Layout(language, {ENCODER: encoder}, encoder.size + language.size)

    @property
    def lanes_once(self) -> int:
        """The number of equal shares of the rows that make up whole lanes on both sides."""
        return math.lcm(self.encoder_lanes, self.language_lanes)

    def __str__(self) -> str:
        """For example `2×tp1 → 1×tp4 sp`: lanes × tensor parallelism on both sides."""
        language = f"{self.language_lanes}×tp{self.language_tp}{' sp' if self.sp else ''}"
        return f"{self.encoder_lanes}×tp{self.encoder_tp} → {language}"


# Layouts that both bridges support: no CP, and lane counts that divide. The first is the headline.
CASES = (
    Case(encoder_tp=1, encoder_lanes=1, language_tp=4, language_lanes=1),
    Case(encoder_tp=1, encoder_lanes=2, language_tp=4, language_lanes=1),
    Case(encoder_tp=2, encoder_lanes=2, language_tp=4, language_lanes=1),
    Case(encoder_tp=1, encoder_lanes=1, language_tp=2, language_lanes=1),
    Case(encoder_tp=1, encoder_lanes=1, language_tp=2, language_lanes=2),
    Case(encoder_tp=1, encoder_lanes=1, language_tp=4, language_lanes=1, sp=False),
)
ROWS, HIDDEN = (8192, 2048), 1024
_JUDGED_TP = 4  # of the language model, with SP
_BYTES_OVER_BOUND = 1.01
_FEWER_BYTES = 3.9
_TIMES_FASTER = {"forward": 5.0, "forward + backward": 3.0}
_PLAN_MS = 50.0  # 1 % of a step of 5 seconds
_NOTES = (
    "Megatron's bridge sums what it receives for its debug log, even when that is off. Its nccl "
    "groups were mapped to the backend of ours. It gets complete gradients at no cost.",
    "Bytes are what the ranks at the end of the way receive from anyone. A run lasts from a start "
    "common to all ranks until the last rank is done.",
)


@dataclass(frozen=True)
class Workload:
    """Items of about 128 rows with text between them, equal rows on every lane of a side.

    Rows are equal and in the order of the lanes, because Megatron's bridge supports nothing else on
    all of these layouts. rows: N, a multiple of the case's `lanes_once`. A row's content follows
    from its number, so that every rank can check what arrives.
    """

    case: Case
    rows: int
    hidden: int

    @cached_property
    def runs(self) -> ItemRuns:
        """The items, one per sample; the same on all ranks."""
        draw, case = np.random.default_rng(0), self.case
        share = self.rows // case.lanes_once
        count = max(1, round(share / _ROWS_PER_ITEM))
        cuts = [
            np.sort(draw.choice(np.arange(1, share), count - 1, replace=False))
            for _ in range(case.lanes_once)
        ]
        rows = np.concatenate([np.diff(cut, prepend=0, append=share) for cut in cuts])
        number = np.repeat(np.arange(case.lanes_once), count)
        lane = number * case.language_lanes // case.lanes_once
        text = draw.integers(1, 32, rows.size)  # before each item
        position = np.cumsum(text + rows) - rows
        return ItemRuns(
            sample=np.arange(rows.size),
            source_lane=number * case.encoder_lanes // case.lanes_once,
            destination_lane=lane,
            position=position - (position - text)[np.searchsorted(lane, lane)],
            rows=rows,
            num_samples=rows.size,
        )

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Return the number of tokens of each language lane, which ends with some text."""
        runs, tp = self.runs, self.case.language_tp
        ends = np.zeros(self.case.language_lanes, np.int64)
        np.maximum.at(ends, runs.destination_lane, runs.position + runs.rows)
        return tuple((-(-(ends + 1) // tp) * tp).tolist())

    def build_plan(self) -> BridgePlan:
        """A fresh plan, so that nothing is cached from the last run."""
        encoder, language = self.case.layout.encoders[ENCODER], self.case.layout.language
        rows = np.full(encoder.dp, self.rows // encoder.dp, np.int64)
        source = ReplicatedSource(rows, np.array(encoder.ranks).reshape(encoder.dp, encoder.tp))
        ranks = np.array(language.ranks).reshape(language.dp, 1, language.tp)
        lanes = np.arange(language.dp)  # with one segment each
        segments = LaneSegments(lanes, np.array(self.tokens), language.dp)
        destination = sharded_destination(segments, ranks, language.sp, self.runs)
        return BridgePlan.build(self.runs, source, destination)

    def values_of(self, lane: int, num_lanes: int) -> Tensor:
        """(N / num_lanes, H) fp32: the rows of one lane of a side, in order."""
        share = self.rows // num_lanes
        return self._values(torch.arange(lane * share, (lane + 1) * share))

    def values_at(self, rank: int, places: Tensor) -> Tensor:
        """(n, H) fp32: what `rank` must find at its local positions `places` (n,)."""
        return self._values(self._row_at(rank)[places])

    def needed_rows(self, rank: int) -> int:
        """The bound: rows that language `rank` needs before its first layer and does not hold."""
        return int((self._row_at(rank) >= 0).sum())

    def _row_at(self, rank: int) -> Tensor:
        """The number of the row at each local position of a language rank, -1 for text."""
        language = self.case.layout.language
        coords = language.coords(rank)
        row_at = np.full(self.tokens[coords.dp], -1)
        first = np.cumsum(self.runs.rows) - self.runs.rows
        for item in np.flatnonzero(self.runs.destination_lane == coords.dp):
            at, count = self.runs.position[item], self.runs.rows[item]
            row_at[at : at + count] = first[item] + np.arange(count)
        parts = np.split(row_at, language.tp if language.sp else 1)
        return torch.from_numpy(parts[coords.tp if language.sp else 0])

    def _values(self, numbers: Tensor) -> Tensor:
        columns = torch.arange(self.hidden, dtype=torch.float32) / self.hidden
        return numbers.to(torch.float32).unsqueeze(1) + columns


@dataclass(frozen=True)
class Passage(Contest):
    """The runs of all contestants one way, forward or backward, through one layout.

    received: bytes that each rank at the end of the way got in a run: rows at the language model,
    or gradients back at the encoder. bound: the least that could be.
    """

    case: Case
    rows: int
    way: Way
    received: dict[str, list[int]]
    bound: list[int]

    def times_bound(self, contestant: str) -> float:
        """All bytes that a contestant received, as a multiple of the bound."""
        return sum(self.received[contestant]) / sum(self.bound)


def bounds(passages: Sequence[Passage], plans: Sequence[StepTime]) -> Iterator[Bound]:
    """Every promise, kept or not.

    All layouts into tp 4 with SP are judged: bytes in both sizes, speed in the larger one, where
    bytes matter more than the latency of single calls. The tables show all layouts.
    """
    judged = [p for p in passages if p.case.sp and p.case.language_tp == _JUDGED_TP]
    most_rows = max((passage.rows for passage in judged), default=0)
    for passage in judged:
        name = passage.name
        if passage.way == "forward":
            ours, theirs = map(passage.times_bound, ("ours", "megatron"))
            yield Bound(f"{name}: bytes / lower bound", ours, _BYTES_OVER_BOUND, True)
            yield Bound(f"{name}: Megatron's bytes / ours", theirs / ours, _FEWER_BYTES, False)
        if passage.rows == most_rows:
            ratio = passage.ratio("megatron")
            yield Bound(f"{name}: times faster", ratio, _TIMES_FASTER[passage.way], False)
    for plan in plans:
        if plan.num_ranks == PLAN_RANKS[0] and not plan.packed:
            yield Bound(f"a step's plan for {plan.num_ranks} ranks, ms", plan.ms, _PLAN_MS, True)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 15,
    rival: Annotated[
        Path | None,
        typer.Option(help="Megatron's bridge_communicator.py, if not the installed one."),
    ] = None,
    json_path: Figures = None,
) -> int:
    """Compare the bridge with Megatron's; exit code 1 if a bound is missed or a rank fails."""
    baseline = _describe_baseline(rival)
    print(baseline, flush=True)
    warm_up(PRELOAD)
    passages: list[Passage] = []
    try:
        for rows in ROWS:
            for case in CASES:
                print(f"{case}, {rows} rows ...", flush=True)
                passages += _on_ranks(Workload(case, rows, HIDDEN), rounds, rival)
    except RanksFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    # After the ranks have ended, so that nothing else runs.
    plans = [time_step(ranks, packed) for ranks in PLAN_RANKS for packed in (False, True)]
    title = "a core plans a step of 32 microbatches from the index: median ms"
    return conclude(
        f"Bridges, rows of {HIDDEN} fp32, {rounds} rounds",
        passages,
        columns={
            "ms": lambda passage, name: f"{1e3 * passage.median(name):.1f}",
            "bytes / bound": lambda passage, name: f"{passage.times_bound(name):.3f}",
        },
        bounds=[*bounds(passages, plans)],
        json_path=json_path,
        tables={title: [asdict(plan) for plan in plans]},
        notes=[baseline, *_NOTES],
    )


def _describe_baseline(rival: Path | None) -> str:
    """Name the file of Megatron's bridge. Raises InputError if it has no such class."""
    if rival is None:
        return "Megatron's bridge: that of the installed megatron-core."
    source = rival.read_bytes() if rival.is_file() else b""
    if rival.suffix != ".py" or b"class BridgeCommunicator" not in source:
        raise InputError(f"--rival: got {rival}, needs a .py file with class BridgeCommunicator")
    digest = hashlib.sha256(source).hexdigest()[:12]
    return f"Megatron's bridge: {rival} (sha256 {digest}) instead of the installed one."


def _on_ranks(workload: Workload, rounds: int, rival: Path | None) -> list[Passage]:
    args, size = (workload, rounds, rival), workload.case.layout.world_size
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
        variables = rank_variables(Path(directory))
        return run_processes("benchmarks.bridge_sides:in_world", args, size, variables)[0]


if __name__ == "__main__":
    from benchmarks import bridge as module  # ranks look for its classes there, not in __main__

    command(module.main)()
