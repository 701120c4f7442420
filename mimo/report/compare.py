"""`mimo compare RUN RUN ...`: curves on top of each other, and how the runs differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mimo.errors import InputError
from mimo.report.page import Part, Section, Table, number, percent, render, show, write
from mimo.report.pictures import is_flat_zero, lines
from mimo.report.runs import RunData, read_runs

# Metrics that are drawn where any run has them, with their units.
_DRAWN = (
    (r"loss|validation_loss.*", ""),
    (r"grad_norm.*|update_norm.*|lr", ""),
    (r"tokens_per_second", "1/s"),
    (r"mfu|idle_fraction.*", ""),
    (r"step_seconds|bridge_wait_seconds_.*", "seconds"),
    (r"memory_gib_.*", "GiB"),
)
_FIGURES = (
    "run",
    "state",
    "steps",
    "loss, last 20 steps",
    "validation loss",
    "best",
    "tokens/s",
    "step, s",
    "MFU",
    "idle",
)


def figures(runs: Sequence[RunData]) -> Table:
    """What a person compares first; medians over the steps."""
    rows = []
    for run in runs:
        validation = run.curves.get("validation_loss")
        best = validation.finite.min() if validation and validation.finite.size else None
        rows.append(
            (
                run.title,
                run.state,
                f"{run.steps_done:,}",
                number(run.last("loss", 20)),
                number(run.last("validation_loss")),
                number(best),
                number(run.median("tokens_per_second")),
                number(run.median("step_seconds")),
                percent(run.median("mfu")),
                percent(run.median("idle_fraction")),
            )
        )
    return Table(_FIGURES, rows)


def differences(runs: Sequence[RunData]) -> Table:
    """What is not the same in all runs: keys of the recipes, and the shards of each source.

    A dash where a run has none.
    """
    flat = [dict(_leaves(run.recipe)) | _shards(run) for run in runs]
    keys = sorted({key for one in flat for key in one} - {"name"})
    rows = [
        (key, *(str(one.get(key, "–")) for one in flat))
        for key in keys
        if any(key not in one or one[key] != flat[0].get(key) for one in flat)
    ]
    return Table(("key", *(run.title for run in runs)), rows, words=True)


def _shards(run: RunData) -> dict[str, str]:
    """The shards that each source had at the last start, where it was recorded."""
    facts = run.summary.items()
    return {f"{name} (shards)": text for name, text in facts if name.startswith("data.")}


def _leaves(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value by its dotted key; entries of lists by their numbers."""
    if isinstance(data, Mapping) and (data or not key):
        items = data.items()
    elif isinstance(data, list) and data:
        items = enumerate(data)
    else:
        yield key, data
        return
    for name, value in items:
        yield from _leaves(value, f"{key}.{name}" if key else str(name))


def sections_of(runs: Sequence[RunData]) -> list[Section]:
    """Figures, differences, and one picture per metric."""
    known = dict.fromkeys(name for run in runs for name in run.curves)
    pictures = []
    for pattern, unit in _DRAWN:
        for name in filter(re.compile(pattern).fullmatch, known):
            drawn = [run for run in runs if name in run.curves]
            having = [run for run in drawn if not is_flat_zero(run.curves[name])]
            if having:
                curves = {run.title: run.curves[name] for run in having}
                pictures.append(lines(name, unit, curves))
    different = differences(runs)
    note = "" if different.rows else "The recipes are the same but for their names."
    if not different.rows and all(map(_shards, runs)):
        note += " So are the shards of their data."
    return [
        Section("Results", tables=[figures(runs)]),
        Section("Differences", tables=[different], note=note),
        Section("Curves", pictures),
    ]


def _named_apart(runs: Sequence[RunData]) -> list[RunData]:
    """The runs, those of one name called by their folders."""
    titles = [run.title for run in runs]
    return [
        replace(run, title=str(run.folder)) if titles.count(run.title) > 1 else run for run in runs
    ]


def main(folders: Sequence[Path], page: Path) -> int:
    """`mimo compare`: print the table and write the page."""
    if len(folders) < 2:
        raise InputError("give two runs or more, such as runs/first runs/second")
    runs = _named_apart([run for folder in folders for run in read_runs(folder)])
    show(figures(runs), differences(runs))
    write(page, render("Runs compared", [Part("", {}, sections_of(runs))]))
    return 0
