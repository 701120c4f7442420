"""`mimo report` and `mimo compare`: pages about one run, its phases, or several runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from mimo.errors import InputError
from mimo.report.page import (
    Part,
    Picture,
    Section,
    Table,
    data_url,
    is_flat_zero,
    lines,
    number,
    percent,
    render,
    shares,
    show,
    write,
)
from mimo.report.runs import TIMES, Curve, RunData, begun_runs, jobs_of, last_output, read_runs
from mimo.runtime.run_files import LAUNCH

_MAX_ROWS = 200  # of incidents, and of a job's output: the newest
_MAX_PICTURE_BYTES = 32 * 2**20

# Families of metrics: section, title of the picture, unit, pattern of the names. A metric belongs
# to the first family that matches; other metrics have separate pictures.
_FAMILIES = (
    ("Loss", "Loss per token", "", r"(validation_)?loss"),
    ("Loss", "Learning rate", "", r"lr(_.+)?"),
    ("Loss", "Gradient norm", "", r"grad_norm(_.+)?"),
    ("Loss", "Update norm", "", r"update_norm(_.+)?"),
    ("Loss", "Steps skipped so far", "", r"skipped_steps"),
    ("Validation by source", "Loss per token", "", r"validation_loss_.+"),
    ("Throughput", "Tokens per second", "1/s", r"tokens_per_second"),
    ("Throughput", "Share of the peak (MFU)", "", r"mfu"),
    ("Throughput", "A step", "seconds", r"(step|data_wait|host)_seconds"),
    ("Throughput", "Blocked by checkpointing", "seconds", r"save_seconds"),
    ("Where the time goes", "Idle share of ranks", "", r"(encoder_)?idle_fraction(_.+)?"),
    ("Where the time goes", "Waits at bridges", "seconds", r"bridge_wait_seconds_.+"),
    ("Where the time goes", "Sent over bridges in a step", "bytes", r"bridge_(least_)?bytes_.+"),
    ("Balance", "Encoder imbalance (max/mean)", "", r"encoder_imbalance"),
    ("Balance", "FLOPs of a step", "", r"flops_.+"),
    ("Memory", "Peak memory of any rank", "GiB", r"memory_gib_.+"),
    ("Data", "Epochs per source", "epochs", r"epochs_.+"),
    ("Data", "Tokens of a step", "", r"(loss_)?tokens"),
    ("Data", "Samples left out", "", r"skipped_samples"),
)
_SECTIONS = tuple(dict.fromkeys(section for section, *_ in _FAMILIES))


def sections_of(run: RunData) -> Iterator[Section]:
    """Yield all sections about one run, also empty ones: the answers first."""
    yield _predictions(run.folder)
    pictures = _pictures(run.curves)
    for title in _SECTIONS:
        tables, first = list[Table](), list[Picture]()
        if title == "Where the time goes":
            first, tables = _times(run)
        elif title == "Data":
            tables = [_sources(run)]
        elif title == "Validation by source":
            tables = [_validations(run)]
        yield Section(title, [*first, *pictures.pop(title, ())], tables)
    yield Section("Other figures", pictures.get("", []))
    yield _incidents(run)
    yield Section("Configuration", text=run.recipe_text)
    yield _environment(run)


def _pictures(curves: Mapping[str, Curve]) -> dict[str, list[Picture]]:
    """Return the pictures by section, one for each family; "" has the other metrics."""
    members = dict[int, dict[str, Curve]]()
    others = dict[str, Curve]()
    for name, curve in curves.items():
        if TIMES.fullmatch(name) or is_flat_zero(curve):
            continue
        fits = (n for n, family in enumerate(_FAMILIES) if re.fullmatch(family[-1], name))
        if (family := next(fits, None)) is None:
            others[name] = curve
        else:
            members.setdefault(family, {})[name] = curve
    found = dict[str, list[Picture]]()
    for family, own in sorted(members.items()):
        section, title, unit, _ = _FAMILIES[family]
        found.setdefault(section, []).append(lines(title, unit, own))
    found[""] = [lines(name, "", {name: curve}) for name, curve in others.items()]
    return found


def _times(run: RunData) -> tuple[list[Picture], list[Table]]:
    """Draw the seconds of a step by module and part: bars, curves by module, and a table."""
    names = [match for name in run.curves if (match := TIMES.fullmatch(name))]
    names.sort(key=lambda match: match["module"])
    bars, rows, over_time = dict[str, dict[str, float]](), list[Sequence[str]](), list[Picture]()
    for module, found in groupby(names, lambda match: match["module"]):
        own = [match for match in found if not match["max"]]
        medians = {one["phase"]: run.median(one[0]) or 0.0 for one in own}
        bars[module] = medians
        for phase, seconds in sorted(medians.items(), key=lambda pair: -pair[1]):
            largest = run.median(f"seconds_{module}_{phase}_max")
            share = seconds / (sum(medians.values()) or 1.0)
            cells = (number(seconds), number(largest), percent(share))
            rows.append((module, phase.replace("_", " "), *cells))
        curves = {one["phase"]: run.curves[one[0]] for one in own}
        curves = {name: curve for name, curve in curves.items() if not is_flat_zero(curve)}
        over_time.append(lines(f"{module}: mean over its ranks", "seconds", curves))
    columns = ("module", "part of the step", "mean of its ranks, s", "slowest rank, s", "share")
    title = "A step by module and part of the step, medians over the steps"
    pictures = [shares(title, "seconds", bars)] if bars else []
    return [*pictures, *over_time], [Table(columns, rows)]


def _sources(run: RunData) -> Table:
    """Return the weight and the epochs of each source."""
    given = run.value_of("data.sources")
    sources = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    weights = [one.get("weight", 1.0) for one in sources]
    weights = [weight if isinstance(weight, int | float) else 0.0 for weight in weights]
    rows = [
        (
            str(number_of),
            str(one.get("path")),
            percent(weight / (sum(weights) or 1.0)),
            number(run.last(f"epochs_{number_of}")),
        )
        for number_of, (one, weight) in enumerate(zip(sources, weights, strict=True))
    ]
    return Table(("source", "path", "weight", "epochs"), rows)


def _validations(run: RunData) -> Table:
    """Return path and last loss of each validation source; empty if there is only one."""
    given = run.value_of("data.validation")
    rows = [
        (str(source), str(one.get("path")), number(run.last(name)))
        for source, one in enumerate(given if isinstance(given, list) else ())
        if (name := f"validation_loss_{source}") in run.curves
    ]
    return Table(("source", "path", "validation loss"), rows)


def _predictions(folder: Path) -> Section:
    """Show pictures, scores and answers that `mimo evaluate` wrote into the folder."""
    pictures, tables = list[Picture](), list[Table]()
    for path in sorted(folder.glob("held_out*.png")):
        if path.stat().st_size <= _MAX_PICTURE_BYTES:
            pictures.append(Picture(path.stem, data_url(path.read_bytes(), "png")))
    for path in sorted(folder.glob("held_out*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            names = found.get("metrics", ("exact_match", "per_word"))
            scores = [(name, f"{found[name]:.3f}") for name in names]
            left_out = dict(found.get("left_out", {})).items()
            scores += [(f"left out: {reason}", str(count)) for reason, count in left_out]
            rows = [
                (one["question"], one["given"], one["expected"], "✓" if one["exact"] else "✗")
                for one in found["samples"]
            ]
        except (ValueError, KeyError, TypeError):
            continue  # the file is being written
        tables.append(Table((f"split {found.get('split')}", "score"), scores))
        tables.append(Table(("question", "answer", "expected", "exact"), rows, words=True))
    return Section("Predictions", pictures, tables)


def _incidents(run: RunData) -> Section:
    kinds = [str(one.get("kind")) for one in run.incidents]
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    told = [f"{count} × {kind}" for kind, count in counts.items()]
    shown = run.incidents[-_MAX_ROWS:]
    note = ", ".join(told) if told else "none"
    if len(shown) < len(run.incidents):
        note += f"; the last {len(shown)} are shown"
    known = ("time", "kind", "step", "text")
    rows = [
        (
            *("" if one.get(name) is None else str(one[name]) for name in known),
            ", ".join(f"{key} {one[key]}" for key in one.keys() - {*known}),
        )
        for one in shown
    ]
    return Section("Incidents", tables=[Table((*known, "facts"), rows, words=True)], note=note)


def _environment(run: RunData) -> Section:
    """List the starts of the run, and the environment of the last one."""
    columns = ("time", "step", "host", "ranks", "device", "slurm_job")
    starts = [_cells(one, columns) for one in run.starts[-_MAX_ROWS:]]
    last = dict(run.starts[-1]) if run.starts else {}
    packages = last.pop("packages", {})
    last.pop("summary", None)  # it is the page's header
    facts = {**last, **(packages if isinstance(packages, dict) else {})}
    rows = [(str(name), str(value)) for name, value in facts.items() if name not in columns]
    note = f"{len(run.starts)} starts" if len(run.starts) > 1 else ""
    tables = [Table(columns, starts, words=True), Table(("", "at the last start"), rows, True)]
    return Section("Environment", tables=tables, note=note)


def _jobs(folder: Path) -> Section:
    """List the submitted jobs, and the end of the newest one's output."""
    columns = ("job_id", "kind", "time", "script")
    rows = [_cells(one, columns) for one in jobs_of(folder)[-_MAX_ROWS:]]
    tables = [Table(columns, rows, words=True)]
    if found := last_output(folder, _MAX_ROWS):
        path, lines = found
        tables.append(Table((f"the end of {path}",), [(line,) for line in lines], words=True))
    return Section("Jobs", tables=tables)


def _cells(record: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return ["" if record.get(name) is None else str(record[name]) for name in names]


def part_of(run: RunData, with_title: bool) -> Part:
    """Return the part of a page about one run."""
    planned = "" if run.steps_planned is None else f" of {run.steps_planned:,}"
    tiles = {
        "state": run.state,
        "steps": f"{run.steps_done:,}{planned}",
        "loss, last 20 steps": number(run.last("loss", 20)),
        "validation loss": number(run.last("validation_loss")),
        "tokens/s, median": number(run.median("tokens_per_second")),
        "MFU, median": percent(run.median("mfu")),
        "of ranks' time idle, median": percent(run.median("idle_fraction")),
        "restarts": str(sum(one.get("kind") == "restart" for one in run.incidents)),
        "incidents": str(len(run.incidents)),
    }
    tiles = {name: value for name, value in tiles.items() if value != "–"}
    found = [section for section in sections_of(run) if section.has_content]
    return Part(run.title if with_title else "", tiles, found, run.summary)


def report(run: Path, page: Path | None) -> int:
    """Write the page of a run for `mimo report`."""
    runs = begun_runs(run)
    parts = [part_of(one, with_title=len(runs) > 1) for one in runs]
    if len(runs) > 1 and (answers := _predictions(run)).has_content:
        parts.insert(0, Part("The whole job", {}, [answers]))
    if not runs or (run / LAUNCH).is_dir():
        tiles = {} if runs else {"state": "no rank has started"}
        parts.append(Part("", tiles, [_jobs(run)]))
    write(page or run / "report.html", render(f"Run {run.resolve().name}", parts))
    return 0


# Metrics of the curves of `mimo compare`, with their units.
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
    """Return the main figures of runs; medians over the steps."""
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
    """Return the keys of recipes and the shards of sources that differ between runs.

    A dash stands for a missing value.
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
    """Return the shards of each source at the last start, where they were recorded."""
    facts = run.summary.items()
    return {f"{name} (shards)": text for name, text in facts if name.startswith("data.")}


def _leaves(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every plain value with its dotted key; entries of lists have numbers."""
    if isinstance(data, Mapping) and (data or not key):
        items = data.items()
    elif isinstance(data, list) and data:
        items = enumerate(data)
    else:
        yield key, data
        return
    for name, value in items:
        yield from _leaves(value, f"{key}.{name}" if key else str(name))


def compared_sections(runs: Sequence[RunData]) -> list[Section]:
    """Return the figures, the differences and one picture per metric."""
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


def _with_unique_titles(runs: Sequence[RunData]) -> list[RunData]:
    """Return the runs, those with equal titles renamed to their folders."""
    titles = [run.title for run in runs]
    return [
        replace(run, title=str(run.folder)) if titles.count(run.title) > 1 else run for run in runs
    ]


def compare(folders: Sequence[Path], page: Path) -> int:
    """Print the tables and write the page of `mimo compare`."""
    if len(folders) < 2:
        raise InputError("give two runs or more, such as runs/first runs/second")
    runs = _with_unique_titles([run for folder in folders for run in read_runs(folder)])
    show(figures(runs), differences(runs))
    write(page, render("Runs compared", [Part("", {}, compared_sections(runs))]))
    return 0
