"""The picture of `mimo bench bridge`: one panel per part."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mimo.bench.bridge_report import Report
from mimo.bench.bridge_result import Contest
from mimo.bench.outcome import median_ratio

OURS, THEIRS, OTHER, BOUND = "#1f6feb", "#d4722b", "#8b949e", "#222222"


def draw(report: Report, path: Path) -> None:
    """Write a PNG with four panels: times, bytes, time to plan, balance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    rows = max(contest.rows for contest in report.against_megatron)
    largest = [c for c in report.against_megatron if c.rows == rows]
    replicated = [c for c in report.against_replicated if c.rows == rows]
    _draw_times(axes[0, 0], largest + replicated)
    _draw_bytes(axes[0, 1], largest + replicated)
    _draw_plans(axes[1, 0], report)
    _draw_balance(axes[1, 1], report)
    hidden = largest[0].hidden
    figure.suptitle(f"mimo bench bridge: {rows} rows × {hidden} fp32, {report.repeats} pairs")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _names(contests: Sequence[Contest]) -> list[str]:
    return [
        contest.case.replace(" → ", "\n→ ")
        + ("\n(replicated)" if contest.rival == "replicated" else "")
        for contest in contests
    ]


def _legend(axis: Any) -> None:
    """Put the legend above the bars, which become shorter to make room."""
    axis.set_ylim(top=1.3 * axis.get_ylim()[1])
    axis.legend(fontsize=8, loc="upper center", ncols=2)


def _draw_times(axis: Any, contests: Sequence[Contest]) -> None:
    place = np.arange(len(contests))
    pairs = [
        ("ours, forward", OURS, [c.forward_ours_ms for c in contests]),
        ("rival, forward", THEIRS, [c.forward_theirs_ms for c in contests]),
        ("ours, forward + backward", OURS, [c.both_ours_ms for c in contests]),
        ("rival, forward + backward", THEIRS, [c.both_theirs_ms for c in contests]),
    ]
    for number, (label, colour, times) in enumerate(pairs):
        heights = [statistics.median(own) for own in times]
        hatch = "//" if number >= 2 else None
        at = place + 0.2 * (number - 1.5)
        axis.bar(at, heights, 0.2, label=label, color=colour, hatch=hatch, edgecolor="white")
    for number, contest in enumerate(contests):
        ratios = (
            median_ratio(contest.forward_theirs_ms, contest.forward_ours_ms),
            median_ratio(contest.both_theirs_ms, contest.both_ours_ms),
        )
        heights = (contest.forward_theirs_ms, contest.both_theirs_ms)
        for offset, ratio, times in zip((-0.1, 0.3), ratios, heights, strict=True):
            text = f"{ratio:.1f}×"
            axis.text(
                number + offset,
                statistics.median(times),
                text,
                ha="center",
                va="bottom",
                fontsize=8,
            )
    axis.set_xticks(place, _names(contests), fontsize=8)
    axis.set_ylabel("milliseconds, median")
    axis.set_title("Time per microbatch; the rival is Megatron's bridge if not named")
    _legend(axis)


def _draw_bytes(axis: Any, contests: Sequence[Contest]) -> None:
    place = np.arange(len(contests))
    parts = [
        ("lower bound", BOUND, [sum(c.rows_received.bound) for c in contests]),
        ("ours", OURS, [sum(c.rows_received.ours) for c in contests]),
        ("rival", THEIRS, [sum(c.rows_received.theirs) for c in contests]),
    ]
    for number, (label, colour, sizes) in enumerate(parts):
        heights = [size / 1e6 for size in sizes]
        axis.bar(place + 0.27 * (number - 1), heights, 0.27, label=label, color=colour)
    for number, contest in enumerate(contests):
        ours, theirs = sum(contest.rows_received.ours), sum(contest.rows_received.theirs)
        text = f"{theirs / ours:.2f}×"
        axis.text(number + 0.27, theirs / 1e6, text, ha="center", va="bottom", fontsize=8)
    axis.set_xticks(place, _names(contests), fontsize=8)
    axis.set_ylabel("MB received by all language ranks, forward")
    axis.set_title("Bytes until every rank holds its first layer's input")
    _legend(axis)


def _draw_plans(axis: Any, report: Report) -> None:
    ranks = sorted({plan.num_ranks for plan in report.plan})
    for packed, style, label in (
        (False, "o-", "sequences of one sample"),
        (True, "s--", "as many samples as fit"),
    ):
        heights = [plan.ms for plan in report.plan if plan.packed == packed]
        axis.plot(ranks, heights, style, color=THEIRS if packed else OURS, label=label)
    for bound in report.bounds:
        if bound.name.startswith("a step's plan"):
            axis.axhline(bound.limit, color=BOUND, linewidth=1, linestyle=":", label="limit")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(rank) for rank in ranks])
    axis.set_xlabel("language ranks")
    axis.set_ylabel("milliseconds, median")
    axis.set_yscale("log")
    axis.set_title("Time of a core to plan a step of 32 microbatches, on the slower kind of rank")
    axis.legend(fontsize=8)


def _draw_balance(axis: Any, report: Report) -> None:
    place = np.arange(len(report.balance))
    parts = [
        ("lower bound", BOUND, [b.bound for b in report.balance]),
        ("items, largest first", OURS, [b.items for b in report.balance]),
        ("samples, largest first", THEIRS, [b.samples for b in report.balance]),
        ("samples in turn", OTHER, [b.in_turn for b in report.balance]),
    ]
    for number, (label, colour, draws) in enumerate(parts):
        medians = [statistics.median(values) for values in draws]
        at = place + 0.2 * (number - 1.5)
        axis.bar(at, medians, 0.2, label=label, color=colour)
        for x, median, values in zip(at, medians, draws, strict=True):
            axis.vlines(x, min(values), max(values), color="#555555", linewidth=1)
            axis.text(x, max(values), f"{median:.2f}", ha="center", va="bottom", fontsize=8)
    names = [f"{b.num_items} items" for b in report.balance]
    axis.set_xticks(place, names)
    axis.set_ylabel("largest lane / mean")
    lanes = report.balance[0].lanes
    axis.set_title(f"Imbalance over {lanes} lanes: median, smallest and largest draw")
    _legend(axis)
