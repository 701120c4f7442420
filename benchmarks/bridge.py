"""Compare the bridge with others on several layouts, and time the planning of a step.

Rows from an encoder: with Megatron's bridge. Rows for a generator, which Megatron's cannot move:
with the same messages alone.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import Bound, Contest, Figures, Quick, command, conclude
from bridge import BridgePlan, ItemRuns, LaneSegments, ReplicatedSource, sharded_destination
from data.order import SampleOrder
from mimo.errors import InputError
from mimo.model.step_plan import StepPlanner
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.runtime.processes import run_processes, warm_up
from mimo.runtime.ranks import rank_variables

MODULE = "module"
PRELOAD = ("mimo.engines.megatron.preload", "benchmarks.bridge_sides")
_ROWS_PER_ITEM, _TEXT_PER_ITEM = 128, 32
_BYTES_OVER_BOUND = 1.01
_FEWER_BYTES = 3.9
_TIMES_FASTER = {"forward": 5.0, "forward + backward": 3.0}
_PLAN_RANKS, _PLAN_MS = 1024, 50.0  # 1 % of a step of 5 seconds
_MICROBATCHES, _REPEATS = 32, 5
_TP, _CP, _RANKS_PER_ENCODER_LANE = 8, 2, 8
_SAMPLES, _BLOCK, _IMAGES = 200_000, 64, 5


@dataclass(frozen=True)
class Case:
    """Rows between a module and a language model with sequence parallelism, on separate ranks.

    rows: equally many on every lane of the module and in the order of the lanes, because Megatron's
    bridge supports nothing else on all of these layouts. is_output: rows go to the module.
    """

    module_tp: int
    module_lanes: int
    language_tp: int
    rows: int = 8192
    hidden: int = 1024
    language_lanes: int = 1
    is_output: bool = False

    def __str__(self) -> str:
        """Format as in `2×tp1 → tp4 sp`: lanes × tensor parallelism of senders and receivers."""
        language = f"{self.language_lanes}×tp{self.language_tp} sp".removeprefix("1×")
        ends = [f"{self.module_lanes}×tp{self.module_tp}", language]
        return " → ".join(reversed(ends) if self.is_output else ends)

    @property
    def layout(self) -> Layout:
        """The ranks that send rows, then those that receive them."""
        grid = GridSpec(MODULE, tp=self.module_tp, dp=self.module_lanes)
        language = GridSpec(LANGUAGE, tp=self.language_tp, sp=True, dp=self.language_lanes)
        size = grid.size + language.size
        if self.is_output:
            grid = replace(grid, rank_offset=language.size)
            return Layout(language, {}, size, generators={MODULE: grid})
        return Layout(replace(language, rank_offset=grid.size), {MODULE: grid}, size)

    @cached_property
    def runs(self) -> ItemRuns:
        """The items, one per sample, with text before each; the same on all ranks."""
        per_lane = max(1, self.rows // self.module_lanes // _ROWS_PER_ITEM)
        lane = np.repeat(np.arange(self.module_lanes), per_lane)
        number, rows = np.arange(len(lane)), np.full(len(lane), self.rows // len(lane))
        return ItemRuns(
            sample=number,
            source_lane=lane,
            destination_lane=number % self.language_lanes,
            position=(number // self.language_lanes + 1) * (self.text + rows) - rows,
            rows=rows,
            num_samples=len(lane),
        )

    @property
    def text(self) -> int:
        """Tokens before each item; hidden states are all rows."""
        return 0 if self.is_output else _TEXT_PER_ITEM

    def build_plan(self) -> BridgePlan:
        """A fresh plan, so that nothing is cached from the last run."""
        grid, language = self.layout.item_grids[MODULE], self.layout.language
        rows = np.full(grid.dp, self.rows // grid.dp, np.int64)
        source = ReplicatedSource(rows, np.array(grid.ranks).reshape(grid.dp, grid.tp))
        ranks = np.array(language.ranks).reshape(language.dp, 1, language.tp)
        tokens = (self.rows + self.text * self.runs.num_samples) // language.dp
        lanes = np.arange(language.dp)
        segments = LaneSegments(lanes, np.full(language.dp, tokens), language.dp)
        destination = sharded_destination(segments, ranks, True, self.runs)
        return BridgePlan.build(self.runs, source, destination)


# Layouts that Megatron's bridge supports, the first is the headline, and one of a generator.
CASES = (
    Case(module_tp=1, module_lanes=1, language_tp=4),
    Case(module_tp=1, module_lanes=2, language_tp=4),
    Case(module_tp=2, module_lanes=2, language_tp=4),
    Case(module_tp=1, module_lanes=2, language_tp=2, language_lanes=2, is_output=True),
)


class DrawnIndex:
    """The columns of an `Index` that planning reads: chats of up to five images, without files."""

    media = ("image",)

    def __init__(self, num_samples: int = _SAMPLES) -> None:
        draw = np.random.default_rng(0)
        count, text = draw.integers([[0], [20]], [[_IMAGES + 1], [1500]], (2, num_samples))
        start = np.cumsum([0, *count])
        shape = draw.integers(7, 33, (start[-1], 2))  # up to 896 x 896 pixels
        rows = shape.prod(axis=1)
        before, first = np.cumsum([0, *rows]), np.repeat(start[:-1], count)
        # A token before each image and one after it.
        place = before[:-1] - before[first] + 2 * (np.arange(len(rows)) - first) + 1
        self.columns: dict[str, np.ndarray] = {
            "token_length": text + before[start[1:]] - before[start[:-1]] + 2 * count,
            "loss_tokens": text // 2,
            "item_start": start,
            "item_media": np.zeros_like(rows),
            "item_rows": rows,
            "item_placeholder": place,
            "item_cost": rows * (rows + 4096),
        }

    def __len__(self) -> int:
        return len(self.columns["token_length"])

    def column(self, name: str, numbers: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return entries of a column, like `Index.column`."""
        return self.columns[name][numbers]


def plan_milliseconds(num_ranks: int) -> float:
    """Return the median time in which a core plans a step, on the slower of two ranks.

    One sends, the other receives. num_ranks: of the language model.
    """
    lanes, dp = num_ranks // _RANKS_PER_ENCODER_LANE, num_ranks // (_TP * _CP)
    language = GridSpec(LANGUAGE, tp=_TP, sp=True, cp=_CP, dp=dp, rank_offset=lanes)
    layout = Layout(language, {MODULE: GridSpec(MODULE, dp=lanes)}, lanes + num_ranks)
    index: Any = DrawnIndex()
    medians = []
    for rank in (0, language.rank_offset):
        planner = StepPlanner(
            layout,
            {MODULE: DrawnIndex.media},
            [index],
            SampleOrder([len(index)], [1.0], seed=0, block=_BLOCK),
            micro_batch_size=1,
            num_microbatches=_MICROBATCHES,
            rank=rank,
            linear_tokens=4096,
        )
        times = []
        for step in range(1 + _REPEATS):
            started = time.process_time()
            plan = planner.finish(planner.microbatches(step))
            (bridges,) = plan.bridges.values()
            for bridge in bridges:
                for messages in ("receives", "returns") if rank else ("sends", "collects"):
                    getattr(bridge, messages)(rank)
            times.append(time.process_time() - started)
        medians.append(1e3 * statistics.median(times[1:]))  # the first one warms up
    return max(medians)


def judge(way: str, contest: Contest) -> Iterator[Bound]:
    """Yield the bounds of one case, held or missed. way: a key of `_TIMES_FASTER`."""
    ours = contest.median("ours", "bytes / bound")
    if way == "forward" or "messages" in contest.runs:
        yield Bound(f"{contest.name}: bytes / lower bound", ours, _BYTES_OVER_BOUND, True)
    if "messages" in contest.runs:  # as fast as the transport is
        return
    if way == "forward":
        theirs = contest.median("megatron", "bytes / bound")
        name = f"{contest.name}: Megatron's bytes / ours"
        yield Bound(name, theirs / ours, _FEWER_BYTES, False)
    ratio = contest.ratio("megatron")
    yield Bound(f"{contest.name}: times faster", ratio, _TIMES_FASTER[way], False)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 15,
    rival: Annotated[
        Path | None,
        typer.Option(help="Megatron's bridge_communicator.py, if not the installed one."),
    ] = None,
    quick: Quick = False,
    json_path: Figures = None,
) -> int:
    """Compare the bridge with Megatron's; exit code 1 if a bound is missed or a rank fails."""
    baseline = _describe_baseline(rival)
    warm_up(PRELOAD)
    cases, rounds = ((replace(CASES[0], rows=512, hidden=16),), 1) if quick else (CASES, rounds)
    contests, bounds = list[Contest](), list[Bound]()
    for case in cases:
        print(f"{case} ...", flush=True)
        args, size = (case, rounds, rival), case.layout.world_size
        with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
            variables = rank_variables(Path(directory))
            by_way, *_ = run_processes("benchmarks.bridge_sides:in_world", args, size, variables)
        contests += by_way.values()
        for way, contest in by_way.items():
            bounds += judge(way, contest)
    if not quick:  # after the ranks have ended, so that nothing else runs
        name = f"a core plans a step of {_MICROBATCHES} microbatches for {_PLAN_RANKS} ranks, ms"
        bounds.append(Bound(name, plan_milliseconds(_PLAN_RANKS), _PLAN_MS, True))
    return conclude(
        f"Bridges, {cases[0].rows} rows of {cases[0].hidden} fp32, {rounds} rounds; {baseline}",
        contests,
        columns={
            "ms": lambda contest, name: 1e3 * contest.median(name),
            "bytes / bound": lambda contest, name: contest.median(name, "bytes / bound"),
        },
        bounds=bounds,
        json_path=json_path,
        judge_speed=not quick,
    )


def _describe_baseline(rival: Path | None) -> str:
    """Name the file of Megatron's bridge. Raises InputError if it has no such class."""
    if rival is None:
        return "Megatron's is the installed one"
    source = rival.read_bytes() if rival.is_file() else b""
    if rival.suffix != ".py" or b"class BridgeCommunicator" not in source:
        raise InputError(f"--rival: got {rival}, needs a .py file with class BridgeCommunicator")
    digest = hashlib.sha256(source).hexdigest()[:12]
    return f"Megatron's is {rival} (sha256 {digest})"


if __name__ == "__main__":
    from benchmarks import bridge as module  # ranks look for its classes there, not in __main__

    command(module.main)()
