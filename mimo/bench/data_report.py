"""What `mimo bench data` found, judged, and its tables and picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mimo.bench.bridge_picture import OURS, THEIRS
from mimo.bench.bridge_tables import bounds_table, table_of
from mimo.bench.data_contest import Contestant, Pass
from mimo.bench.data_workload import BATCH, Workload
from mimo.bench.outcome import Bound, median_ratio

_GOALS = {"webdataset": 1.5, "energon": 1.2}  # how many times our CPU seconds theirs are
_RESUME_SECONDS = 1.0
_NOTES = (
    "A pass reads, decodes, prepares, tokenizes and packs all samples, up to what is given to the "
    "device. It runs in a process of its own, after one that is not timed; loaders take turns. "
    "Figures are medians; CPU and memory are of all processes of a loader.",
    f"Batches of {BATCH} samples, one thread in each process; nothing is done with a batch. With 0 "
    "workers, ours decodes in a thread beside the one that packs.",
    "Ours gives the device bytes, once for both frames of a patch, and positions; theirs fp32 "
    "values of both frames.",
)


@dataclass(frozen=True)
class Cell:
    """The passes of one loader over one workload. num_workers: 0 for a single process."""

    workload: Workload
    num_workers: int
    contestant: Contestant
    passes: list[Pass]

    @property
    def contest(self) -> str:
        """Those who share it are compared."""
        return f"{self.workload}, {self.num_workers} workers"

    def __str__(self) -> str:
        """For example `webdataset, pil: 1024 × 768, 2 workers`."""
        return f"{self.contestant}: {self.contest}"

    def figures(self, name: str) -> list[float]:
        """A figure of each pass."""
        return [getattr(one, name) for one in self.passes]

    def per_sample(self, name: str) -> float:
        """The median of a figure."""
        return statistics.median(self.figures(name)) / self.workload.num_samples


@dataclass(frozen=True)
class DataReport:
    """What was measured and judged, as written to `--json`.

    missing: packages of rivals that were left out, by their imports. image_bytes: mean, by
    workload. differences: by rival, of pixel values, and samples with other tokens.
    """

    machine: dict[str, Any]
    missing: dict[str, str]
    image_bytes: dict[str, float]
    cells: list[Cell]
    differences: dict[str, tuple[float, int]]
    resume_seconds: list[float]
    bounds: list[Bound]

    def to_json(self) -> str:
        """As JSON."""
        cells = [{"cell": str(own), "passes": [*map(asdict, own.passes)]} for own in self.cells]
        bounds = [{**asdict(bound), "holds": bound.holds} for bound in self.bounds]
        return json.dumps({**vars(self), "cells": cells, "bounds": bounds}, indent=1) + "\n"


def judge(
    cells: Sequence[Cell], differences: Mapping[str, tuple[float, int]], resumes: Sequence[float]
) -> list[Bound]:
    """Every promise, kept or not: that it was the same work, and how much faster."""
    left_out = max(own.workload.num_samples - min(own.figures("samples")) for own in cells)
    found = [Bound("samples that a pass left out", left_out, 0, True)]
    for rival, (pixels, tokens) in differences.items():
        found.append(Bound(f"{rival}: samples with other tokens", tokens, 0, True))
        if rival.endswith("pil"):  # torchvision rounds in another way
            found.append(Bound(f"{rival}: difference of pixel values", pixels, 0, True))
    ours = {cell.contest: cell for cell in cells if cell.contestant.backend is None}
    for cell in cells:
        if cell.contestant.backend is not None:
            pair = [one.figures("processor_seconds") for one in (cell, ours[cell.contest])]
            goal = _GOALS[cell.contestant.loader]
            found.append(Bound(f"CPU time of {cell}, by ours", median_ratio(*pair), goal, False))
    seconds = statistics.median(resumes)
    return [*found, Bound("resume at sample 100,000,000, s", seconds, _RESUME_SECONDS, True)]


def print_data(report: DataReport, console: Console) -> None:
    """Print all tables, the notes, and every bound."""
    lines = [", ".join(f"{key} {value}" for key, value in report.machine.items())]
    lines += [f"{name}: {size / 1e6:.2f} MB a JPEG" for name, size in report.image_bytes.items()]
    lines += [
        f"left out: {package} (pip install {name})" for package, name in report.missing.items()
    ]
    for rival, (pixels, _) in report.differences.items():
        lines.append(f"{rival}: pixel values differ from ours by {pixels:.3g} at most")
    for ours in (cell for cell in report.cells if cell.contestant.backend is None):
        columns = ("samples/s", "CPU ms / sample", "MB / sample", "peak MiB")
        table = table_of(ours.contest, "loader", *columns, "CPU / ours", "time / ours")
        for cell in (cell for cell in report.cells if cell.contest == ours.contest):
            table.add_row(
                str(cell.contestant),
                f"{1 / cell.per_sample('seconds'):.1f}",
                f"{1e3 * cell.per_sample('processor_seconds'):.1f}",
                f"{cell.per_sample('num_bytes') / 1e6:.2f}",
                f"{statistics.median(cell.figures('peak_bytes')) / 2**20:.0f}",
                *(
                    f"{median_ratio(cell.figures(name), ours.figures(name)):.2f} ×"
                    for name in ("processor_seconds", "seconds")
                ),
            )
        console.print(table)
    for line in (*lines, *(f"- {note}" for note in _NOTES)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(bounds_table(report.bounds))


def draw_data(report: DataReport, path: Path) -> None:
    """Write a PNG: CPU milliseconds per sample of every loader."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(11, 0.4 * len(report.cells) + 1), layout="constrained")
    axis.barh(
        [str(cell) for cell in reversed(report.cells)],
        [1e3 * cell.per_sample("processor_seconds") for cell in reversed(report.cells)],
        color=[OURS if own.contestant.backend is None else THEIRS for own in report.cells[::-1]],
    )
    axis.set_xlabel("CPU ms per sample")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
