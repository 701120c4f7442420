"""`mimo report` and `mimo compare`: pages about one run, its phases, or several runs."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mimo.errors import InputError
from mimo.report.page import Part, Picture, Section, data_url, heat_map, lines, render, shares
from mimo.report.runs import (
    TIMES,
    Curve,
    RunData,
    begun_runs,
    jobs_of,
    last_output,
    read_runs,
    times_by_module,
)
from mimo.report.tables import Table, number, percent, show, write
from mimo.runtime.run_files import LAUNCH

_MAX_ROWS = 200  # of incidents, and of a job's output: the newest

# Families of metrics: section, title of the picture, unit, pattern of the names. A metric belongs
# to the first family that matches; other metrics have separate pictures.
_FAMILIES = (
    ("Loss", "Loss per token", "", r"(validation_)?loss"),
    ("Loss", "Loss of each module, per token or item", "", r"(validation_)?loss_[a-zA-Z].*"),
    ("Loss", "Learning rate", "", r"lr(_.+)?"),
    ("Loss", "Gradient norm", "", r"grad_norm(_.+)?"),
    ("Loss", "Update norm", "", r"update_norm(_.+)?"),
    ("Loss", "Steps skipped so far", "", r"skipped_steps"),
    ("Validation by source", "Loss per token", "", r"validation_loss_\d+"),
    ("Throughput", "Tokens per second", "1/s", r"tokens_per_second"),
    ("Throughput", "Share of the peak (MFU)", "", r"mfu"),
    ("Throughput", "A step", "seconds", r"(step|data_wait|host)_seconds"),
    ("Throughput", "Blocked by checkpointing", "seconds", r"save_seconds"),
    ("Where the time goes", "Idle share of ranks", "", r"idle_fraction(_.+)?"),
    ("Where the time goes", "Waits at bridges", "seconds", r"bridge_wait_seconds_.+"),
    ("Where the time goes", "Sent over bridges in a step", "bytes", r"bridge_(least_)?bytes_.+"),
    ("Balance", "Encoder imbalance (max/mean)", "", r"encoder_imbalance"),
    ("Balance", "Expert imbalance (max/mean)", "", r"expert_imbalance(_max)?"),
    ("Balance", "Tokens per expert and layer", "tokens", r"expert_tokens(_min)?"),
    ("Balance", "FLOPs of a step", "", r"flops_.+"),
    ("Memory", "Peak memory of any rank", "GiB", r"memory_gib_.+"),
    ("Data", "Epochs per source", "epochs", r"epochs_.+"),
    ("Data", "Tokens of a step", "", r"(loss_)?tokens"),
    ("Data", "Samples left out", "", r"skipped_samples"),
)
_OF_EXPERT = re.compile(r"expert_tokens_\d+")
_SECTIONS = tuple(dict.fromkeys(section for section, *_ in _FAMILIES))
_COMPARED = ("Loss", "Validation by source", "Throughput", "Where the time goes", "Memory")


def sections_of(run: RunData) -> list[Section]:
    """Return the sections about one run: the answers first."""
    pictures, times = _pictures(run.curves), _times(run)
    first = {"Where the time goes": times.pictures}
    tables = {
        "Where the time goes": times.tables,
        "Data": [_sources(run)],
        "Validation by source": [_validations(run)],
    }
    sections = [
        _predictions(run.folder),
        *(
            Section(name, [*first.get(name, ()), *pictures.pop(name, ())], tables.get(name, ()))
            for name in _SECTIONS
        ),
        Section("Other figures", pictures.get("", [])),
        _incidents(run),
        Section("Configuration", text=run.recipe_text),
        _environment(run),
    ]
    return [section for section in sections if section.has_content]


def _pictures(curves: Mapping[str, Curve]) -> dict[str, list[Picture]]:
    """Return the pictures by section, one for each family; "" has the other metrics."""
    experts = {name: curve for name, curve in curves.items() if _OF_EXPERT.fullmatch(name)}
    left = {n: c for n, c in curves.items() if not TIMES.fullmatch(n) and not c.is_zero}
    left = {name: curve for name, curve in left.items() if name not in experts}
    pictures = dict[str, list[Picture]]()
    for section, title, unit, pattern in _FAMILIES:
        members = {name: left.pop(name) for name in [*left] if re.fullmatch(pattern, name)}
        if members:
            pictures.setdefault(section, []).append(lines(title, unit, members))
    if experts:
        picture = heat_map("Tokens of each expert, the mean over layers", "expert", experts)
        pictures.setdefault("Balance", []).append(picture)
    pictures[""] = [lines(name, "", {name: curve}) for name, curve in left.items()]
    return pictures


def _times(run: RunData) -> Section:
    bars, rows, over_time = dict[str, dict[str, float]](), list[Sequence[str]](), list[Picture]()
    for module, phases in times_by_module(sorted(run.curves)).items():
        medians = {phase: run.median(name) or 0.0 for phase, name in phases.items()}
        bars[module] = medians
        for phase, seconds in sorted(medians.items(), key=lambda pair: -pair[1]):
            largest = run.median(f"{phases[phase]}_max")
            share = seconds / (sum(medians.values()) or 1.0)
            cells = (number(seconds), number(largest), percent(share))
            rows.append((module, phase.replace("_", " "), *cells))
        curves = {phase: run.curves[name] for phase, name in phases.items()}
        curves = {phase: curve for phase, curve in curves.items() if not curve.is_zero}
        over_time.append(lines(f"{module}: mean over its ranks", "seconds", curves))
    columns = ("module", "part of the step", "mean of its ranks, s", "slowest rank, s", "share")
    title = "A step by module and part of the step, medians over the steps"
    pictures = [shares(title, "seconds", bars)] if bars else []
    return Section("", [*pictures, *over_time], [Table(columns, rows)])


def _sources(run: RunData) -> Table:
    sources, rows = run.value_of("data.sources") or [], []
    weights = [source.get("weight", 1.0) for source in sources]
    for place, source in enumerate(sources):
        share, epochs = weights[place] / sum(weights), run.last(f"epochs_{place}")
        rows.append((str(place), str(source["path"]), percent(share), number(epochs)))
    return Table(("source", "path", "weight", "epochs"), rows)


def _validations(run: RunData) -> Table:
    """Return path and last loss of each validation source; empty if there is only one."""
    rows = [
        (str(place), str(source["path"]), number(run.last(name)))
        for place, source in enumerate(run.value_of("data.validation") or ())
        if (name := f"validation_loss_{place}") in run.curves
    ]
    return Table(("source", "path", "validation loss"), rows)


def _predictions(folder: Path) -> Section:
    """Show pictures, scores and answers that `mimo evaluate` wrote into the folder."""
    tables = list[Table]()
    files = [*sorted(folder.glob("held_out*.png")), *sorted(folder.glob("drawn_*.png"))]
    pictures = [Picture(file.stem, data_url(file.read_bytes(), "png")) for file in files]
    for path in sorted(folder.glob("held_out*.json")):
        try:
            scored = json.loads(path.read_text(encoding="utf-8"))
            scores = [(name, f"{scored[name]:.3f}") for name in scored["metrics"]]
            left_out = scored["left_out"].items()
            scores += [(f"left out: {reason}", str(count)) for reason, count in left_out]
            rows = [
                (a["question"], a["given"], a["expected"], "✓" if a["exact"] else "✗")
                for a in scored["samples"]
            ]
        except (ValueError, KeyError):
            continue  # the file is being written
        tables.append(Table((f"split {scored['split']}", "score"), scores))
        tables.append(Table(("question", "answer", "expected", "exact"), rows, words=True))
    return Section("Predictions", pictures, tables)


def _incidents(run: RunData) -> Section:
    counts = Counter(sorted(incident["kind"] for incident in run.incidents))
    note = ", ".join(f"{count} × {kind}" for kind, count in counts.items()) or "none"
    newest = run.incidents[-_MAX_ROWS:]
    if len(newest) < len(run.incidents):
        note += f"; the last {len(newest)} are shown"
    known = ("time", "kind", "step", "text")
    rows = []
    for incident in newest:
        facts = (f"{key} {incident[key]}" for key in incident.keys() - {*known})
        rows.append((*_cells(incident, known), ", ".join(facts)))
    return Section("Incidents", tables=[Table((*known, "facts"), rows, words=True)], note=note)


def _environment(run: RunData) -> Section:
    last = dict(run.starts[-1]) if run.starts else {}
    last.pop("summary", None)  # it is the page's header
    packages = last.pop("packages", {})
    facts = {**last, **packages}.items()
    rows = [(name, str(value)) for name, value in facts if value is not None]
    note = f"the last of {len(run.starts)} starts" if len(run.starts) > 1 else ""
    return Section("Environment", tables=[Table(("", ""), rows, words=True)], note=note)


def _jobs(folder: Path) -> Section:
    columns = ("job_id", "kind", "time", "script")
    rows = [_cells(job, columns) for job in jobs_of(folder)[-_MAX_ROWS:]]
    tables = [Table(columns, rows, words=True)]
    if output := last_output(folder, _MAX_ROWS):
        path, end = output
        tables.append(Table((f"the end of {path}",), [(line,) for line in end], words=True))
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
        "restarts": str(sum(incident.get("kind") == "restart" for incident in run.incidents)),
        "incidents": str(len(run.incidents)),
    }
    tiles = {name: value for name, value in tiles.items() if value != "–"}
    return Part(run.title if with_title else "", tiles, sections_of(run), run.summary)


def report(folder: Path, page: Path | None) -> int:
    """Write the page of a run for `mimo report`."""
    runs = begun_runs(folder)
    parts = [part_of(run, with_title=len(runs) > 1) for run in runs]
    if len(runs) > 1 and (answers := _predictions(folder)).has_content:
        parts.insert(0, Part("The whole job", {}, [answers]))
    if not runs or (folder / LAUNCH).is_dir():
        tiles = {} if runs else {"state": "no rank has started"}
        parts.append(Part("", tiles, [_jobs(folder)]))
    write(page or folder / "report.html", render(f"Run {folder.resolve().name}", parts))
    return 0


def figures(runs: Sequence[RunData]) -> Table:
    """Return the main figures of runs; medians over the steps."""
    rows = []
    for run in runs:
        validation = run.curves.get("validation_loss")
        best = validation.finite.min() if validation and validation.finite.size else None
        row = {
            "run": run.title,
            "state": run.state,
            "steps": f"{run.steps_done:,}",
            "loss, last 20 steps": number(run.last("loss", 20)),
            "validation loss": number(run.last("validation_loss")),
            "best": number(best),
            "tokens/s": number(run.median("tokens_per_second")),
            "step, s": number(run.median("step_seconds")),
            "MFU": percent(run.median("mfu")),
            "idle": percent(run.median("idle_fraction")),
        }
        rows.append(row)
    return Table([*rows[0]], [tuple(row.values()) for row in rows])


def differences(runs: Sequence[RunData]) -> Table:
    """Return recipe keys and shards that differ between runs; a dash for a missing value."""
    flat = [dict(_leaves(run.recipe)) | _shards(run) for run in runs]
    keys = sorted({key for leaves in flat for key in leaves} - {"name"})
    rows = [(key, *(str(leaves.get(key, "–")) for leaves in flat)) for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
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
    names, pictures = dict.fromkeys(name for run in runs for name in run.curves), []
    for section, _, unit, pattern in _FAMILIES:
        for name in filter(re.compile(pattern).fullmatch, names):
            curves = {run.title: run.curves[name] for run in runs if name in run.curves}
            curves = {title: curve for title, curve in curves.items() if not curve.is_zero}
            if curves and section in _COMPARED:
                pictures.append(lines(name, unit, curves))
    different = differences(runs)
    note = "" if different.rows else "The recipes are the same but for their names."
    return [
        Section("Results", tables=[figures(runs)]),
        Section("Differences", tables=[different], note=note),
        Section("Curves", pictures),
    ]


def compare(folders: Sequence[Path], page: Path) -> int:
    """Print the tables and write the page of `mimo compare`."""
    if len(folders) < 2:
        raise InputError("give two runs or more, such as runs/first runs/second")
    runs = [run for folder in folders for run in read_runs(folder)]
    titles = Counter(run.title for run in runs)
    runs = [replace(r, title=str(r.folder)) if titles[r.title] > 1 else r for r in runs]
    show(figures(runs), differences(runs))
    write(page, render("Runs compared", [Part("", {}, compared_sections(runs))]))
    return 0
