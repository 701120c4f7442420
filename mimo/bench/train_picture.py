"""The picture of `mimo bench train`: tokens per second of every contestant, and our step."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from mimo.bench.bridge_picture import BOUND, OURS, THEIRS
from mimo.bench.train_report import TrainReport
from mimo.bench.train_result import OURS as OUR_CONTESTANTS


def draw_training(report: TrainReport, path: Path) -> None:
    """Write a PNG with two panels: tokens per second, and the slowest operators of our step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    _draw_rates(axes[0], report)
    _draw_step(axes[1], report)
    figure.suptitle(f"mimo bench train: {report.model}, {report.threads} threads")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_rates(axis: Any, report: TrainReport) -> None:
    for place, one in enumerate(report.steps):
        rates = one.tokens_per_second
        colour = OURS if one.contestant in OUR_CONTESTANTS else THEIRS
        axis.bar(place, statistics.median(rates), 0.6, color=colour)
        axis.vlines(place, min(rates), max(rates), color=BOUND, linewidth=1)
        text = f"{statistics.median(rates):.0f}"
        axis.text(place, max(rates), text, ha="center", va="bottom", fontsize=9)
    names = [one.contestant.replace(" ", "\n") for one in report.steps]
    axis.set_xticks(range(len(names)), names)
    axis.set_ylabel("real tokens per second: median, least to most")
    ratios = ", ".join(f"{name}: {ratio:.2f} ×" for name, ratio in report.times_faster().items())
    axis.set_title(ratios, fontsize=9)


def _draw_step(axis: Any, report: TrainReport) -> None:
    found = report.overhead
    bars = [(name.removeprefix("aten::"), 100 * share) for name, share, _ in found.slowest]
    bars.append(("other operators", 100 * (found.operators - sum(s for _, s, _ in found.slowest))))
    bars.append(("outside operators", 100 * (1 - found.operators)))
    names, shares = zip(*reversed(bars), strict=True)
    axis.barh(names, shares, color=OURS)
    axis.set_xlabel("% of one of our steps, under the profiler")
    axis.tick_params(axis="y", labelsize=8)
