"""Everything that `mimo bench train` found, judged, and its tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from mimo.bench.bridge_tables import bounds_table, table_of
from mimo.bench.outcome import Bound, median_ratio
from mimo.bench.train_result import PADDED_BATCH, Contestant, Overhead, Steps

_FASTER_EQUAL = 1.15
_FASTER_PADDED = 2.0
_LOSS_ERROR = 1e-4  # relative; fp32 on both sides, in another order of sums
# Contestants that are compared: ours, theirs, and the least times faster that is promised.
_PAIRS: tuple[tuple[Contestant, Contestant, float | None], ...] = (
    ("packed", "padded", _FASTER_PADDED),
    ("packed", "sorted", None),
    ("packed equal", "batched equal", _FASTER_EQUAL),
)


@dataclass(frozen=True)
class TrainReport:
    """What was measured and judged, as written to `--json`. threads: of each side."""

    machine: dict[str, Any]
    threads: int
    model: str
    samples: str
    notes: list[str]
    steps: list[Steps]
    overhead: Overhead
    bounds: list[Bound]

    def of(self, contestant: Contestant) -> Steps:
        """The steps of one contestant."""
        return next(one for one in self.steps if one.contestant == contestant)

    def times_faster(self) -> dict[str, float]:
        """Median over rounds of how many times as long theirs took."""
        return {
            f"{ours} / {theirs}": median_ratio(self.of(theirs).seconds, self.of(ours).seconds)
            for ours, theirs, _ in _PAIRS
        }

    def to_json(self) -> str:
        """As JSON, with tokens per second and ratios."""
        found = asdict(self)
        for one, entry in zip(self.steps, found["steps"], strict=True):
            entry["tokens_per_second"] = one.tokens_per_second
        for bound, entry in zip(self.bounds, found["bounds"], strict=True):
            entry["holds"] = bound.holds
        found["times_faster"] = self.times_faster()
        return json.dumps(found, indent=1) + "\n"


def judge(steps: Sequence[Steps]) -> list[Bound]:
    """Every promise, kept or not: that it was the same work, and how much faster."""
    by_name = {one.contestant: one for one in steps}
    found = []
    for ours, theirs, least in _PAIRS:
        one, other = by_name[ours], by_name[theirs]
        pairs = zip(one.losses, other.losses, strict=True)
        error = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
        name = f"{ours}, {theirs}: relative difference of losses"
        found.append(Bound(name, error, _LOSS_ERROR, True))
        difference = float(abs(one.tokens - other.tokens))
        found.append(Bound(f"{ours}, {theirs}: difference of real tokens", difference, 0, True))
        if least is not None:
            ratio = median_ratio(other.seconds, one.seconds)
            found.append(Bound(f"{ours} against {theirs}, times faster", ratio, least, False))
    return found


def notes(rounds: int, tokens: int) -> list[str]:
    """What a reader must know to judge the comparison."""
    return [
        f"A step is data, forward, backward and update; all steps of a contestant train on the "
        f"same samples. {rounds} rounds after one that is not timed; in every round each runs "
        f"once, in another order. Ratios are medians over rounds of steps of the same round.",
        "Ours and theirs are two processes on the same cores; one sleeps while the other trains. "
        "What a side prepares for its next step counts in the step that it is prepared in.",
        f"padded: batches of {PADDED_BATCH} in the samples' order. sorted: by length over all "
        f"samples of the step, as many in a batch as have {tokens} tokens with their padding. "
        "transformers can pack only with kernels that need a GPU.",
        "transformers prepares images by pillow, as ours does, and updates by fused AdamW.",
    ]


def print_report(report: TrainReport, console: Console) -> None:
    """Print all tables, the notes, and every bound."""
    found = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    lines = (f"{found}; {report.threads} threads", report.model, report.samples)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_steps(report))
    console.print(_ratios(report))
    console.print(_overhead(report.overhead))
    console.print(_slowest(report.overhead))
    for note in report.notes:
        console.print(f"- {note}", highlight=False, soft_wrap=True)
    console.print(bounds_table(report.bounds))


def _steps(report: TrainReport) -> Table:
    table = table_of(
        "real tokens per second: median (least to most)",
        *("contestant", "tokens/s", "spread", "s / step", "processor s / step"),
        *("real tokens", "computed", "batches"),
    )
    for one in report.steps:
        rates = one.tokens_per_second
        table.add_row(
            one.contestant,
            f"{statistics.median(rates):.0f}",
            f"{min(rates):.0f} to {max(rates):.0f}",
            f"{statistics.median(one.seconds):.2f}",
            f"{statistics.median(one.processor_seconds):.2f}",
            str(one.tokens),
            str(one.computed),
            str(one.batches),
        )
    return table


def _ratios(report: TrainReport) -> Table:
    columns = ("median", "rounds", "by processor seconds")
    table = table_of("how many times faster ours is", "ours / theirs", *columns)
    for ours, theirs, _ in _PAIRS:
        our, their = report.of(ours), report.of(theirs)
        ratios = [b / a for a, b in zip(our.seconds, their.seconds, strict=True)]
        by_processor = median_ratio(their.processor_seconds, our.processor_seconds)
        table.add_row(
            f"{ours} / {theirs}",
            f"{statistics.median(ratios):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios),
            f"{by_processor:.2f}",
        )
    return table


def _overhead(overhead: Overhead) -> Table:
    table = table_of("what our loop does in a step (packed)", "activity", "ms", "share")
    total = sum(overhead.sections.values())
    for name, seconds in overhead.sections.items():
        table.add_row(name, f"{1e3 * seconds:.1f}", f"{100 * seconds / total:.2f} %")
    return table


def _slowest(overhead: Overhead) -> Table:
    outside = 100 * (1 - overhead.operators)
    table = table_of(
        f"a step under the profiler: {outside:.1f} % outside PyTorch's {overhead.calls} operators",
        *("operator", "share", "calls"),
    )
    for name, share, calls in overhead.slowest:
        table.add_row(name, f"{100 * share:.1f} %", str(calls))
    return table
