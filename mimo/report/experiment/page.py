"""The page of an experiment, and its pictures as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from mimo.report.compare import differences
from mimo.report.experiment.compare import STRICT_STEPS, bound, difference
from mimo.report.experiment.results import TOKENS, Result, warmup_steps
from mimo.report.experiment.runs import Record
from mimo.report.experiment.schema import Experiment
from mimo.report.page import Part, Section, Table, number, percent, render, write
from mimo.report.pictures import lines, shares, spreads
from mimo.report.runs import TIMES, Curve, read_runs

_MIB = 2**20


def results_table(results: Sequence[Result], reference: str) -> Table:
    """What a person compares first."""
    base = next((one.figures.get(TOKENS) for one in results if one.name == reference), None)
    rows = []
    for one in results:
        tokens, runs, spread = one.figures.get(TOKENS), one.values(TOKENS), ""
        if len(runs) > 1:
            spread = f"{number(min(runs))} to {number(max(runs))}"
        rows.append(
            (
                f"{one.name} (reference)" if one.name == reference else one.name,
                one.state,
                number(None if one.follows is None else one.follows.difference),
                number(tokens),
                spread,
                number(tokens / base if tokens and base else None),
                number(one.figures.get("step_seconds")),
                percent(one.figures.get("idle_fraction")),
                number(_most(one.figures, "memory_gib_")),
            )
        )
    head = ("layout", "loss curve", "largest difference", "tokens/s", "of its runs", "× reference")
    return Table((*head, "step, s", "idle", "memory of a rank, GiB"), rows)


def _most(figures: Mapping[str, float], prefix: str) -> float | None:
    return max((value for name, value in figures.items() if name.startswith(prefix)), default=None)


def _modules(results: Sequence[Result]) -> Iterator[tuple[Result, str, dict[str, float]]]:
    """Each module of each layout with the seconds of its parts of a step."""
    for one in results:
        parts = dict[str, dict[str, float]]()
        for name, value in one.figures.items():
            if (found := TIMES.fullmatch(name)) and not found["max"]:
                parts.setdefault(found["module"], {})[found["phase"]] = value
        for module in sorted(parts):
            yield one, module, parts[module]


def _times(results: Sequence[Result]) -> Section:
    rows, bars = [], dict[str, dict[str, float]]()
    idle, memory = dict[str, list[float]](), dict[str, list[float]]()
    for one, module, parts in _modules(results):
        place = f"{one.name}: {module}"
        bars[place] = {name.replace("_", " "): s for name, s in parts.items()}
        idle[place] = one.values(f"idle_fraction_{module}")
        memory[place] = one.values(f"memory_gib_{module}")
        computes = ("encode", "forward", "backward", "bridge_wait", "pipeline_wait", "sync")
        rows.append(
            (
                place,
                percent(one.figures.get(f"idle_fraction_{module}")),
                *(number(parts.get(phase, 0.0)) for phase in computes),
                number(one.figures.get(f"flops_{module}")),
                number(one.figures.get(f"memory_gib_{module}")),
            )
        )
    columns = ("layout: module", "idle", "encode, s", "forward, s", "backward, s")
    waits = ("wait at bridges, s", "wait in the pipeline, s", "wait for all ranks, s")
    table = Table((*columns, *waits, "FLOPs of a step", "memory, GiB"), rows)
    title = "A step by layout, module and part: mean over the module's ranks"
    if not rows:
        return Section("Where the time goes")
    pictures = [
        shares(title, "seconds", bars),
        spreads("Idle share of a module's ranks", "", idle),
        spreads("Peak of the memory of a module's ranks", "GiB", memory),
    ]
    return Section("Where the time goes", pictures, [table])


def _bridges(results: Sequence[Result]) -> Section:
    rows, bars = [], dict[str, list[float]]()
    for one in results:
        for name, sent in one.figures.items():
            if not name.startswith("bridge_bytes_"):
                continue
            edge = name.removeprefix("bridge_bytes_")
            least = one.figures[f"bridge_least_bytes_{edge}"]
            place = f"{one.name}: {edge.replace('_', ' ')}"
            bars[place] = [sent / _MIB]
            bars[f"lower bound: {edge.replace('_', ' ')}"] = [least / _MIB]
            rows.append(
                (
                    place,
                    number(sent / _MIB),
                    number(least / _MIB),
                    number(sent / least) if least else "–",
                    number(one.figures.get(f"bridge_wait_seconds_{edge}")),
                )
            )
    columns = ("layout: edge", "sent in a step, MiB", "lower bound, MiB", "× bound", "wait, s")
    note = (
        "The lower bound has each row once forward, and its gradient once back if the encoder "
        "trains. What stays on a rank is not sent, so layouts that share ranks may be below it."
    )
    pictures = [spreads("Sent over bridges in a step", "MiB", bars)] if rows else []
    return Section("Bridges", pictures, [Table(columns, rows)], note if rows else "")


def _losses(results: Sequence[Result], reference: str, precision: str) -> Section:
    curves = {one.name: _curve(one.first.records) for one in results if one.first}
    pictures = [lines("Loss per token", "", curves)] if curves else []
    if reference in curves:
        theirs = curves[reference].values
        apart = {"bound": _allowed(len(theirs), precision)}
        for name, own in curves.items():
            if name != reference and len(own.values) == len(theirs):
                pairs = zip(own.values, theirs, strict=True)
                values = np.array([difference(float(a), float(b)) for a, b in pairs])
                # The axis is logarithmic, and many first losses are the same to the last bit.
                apart[name] = Curve(own.steps[values > 0], values[values > 0])
        pictures.append(lines("Difference of the losses from the reference", "", apart))
    return Section("Losses", pictures)


def _curve(records: Sequence[Record]) -> Curve:
    losses = [np.nan if one["loss"] is None else one["loss"] for one in records]
    return Curve(np.array([one["step"] + 1 for one in records]), np.array(losses))


def _allowed(steps: int, precision: str) -> Curve:
    allowed = [bound(step, precision) for step in range(steps)]
    values = np.array([np.nan if one is None else one for one in allowed])
    return Curve(np.arange(steps) + 1, values)


def problems_table(results: Sequence[Result]) -> Table:
    """Runs that failed, with their logs, and layouts that do not follow the reference."""
    rows = []
    for one in results:
        if one.follows is not None and one.follows.problem:
            rows.append((one.name, one.follows.problem, ""))
        for outcome in one.outcomes:
            if not outcome.is_done:
                log = str(outcome.run.errors) if outcome.run.errors.exists() else ""
                rows.append((outcome.run.name, outcome.error or outcome.job, log))
    return Table(("layout or run", "problem", "log"), rows, words=True)


def verdict(results: Sequence[Result], reference: str) -> str:
    """One sentence: who follows the reference, who does not."""
    wrong = [f"{one.name} {one.state}" for one in results if one.state != "follows"]
    right = len(results) - len(wrong)
    told = f"{right} of {len(results)} layouts follow the losses of {reference}, but for rounding"
    return f"{told}; {', '.join(wrong)}" if wrong else told


def write_page(
    experiment: Experiment, results: Sequence[Result], folder: Path, precision: str, steps: int
) -> None:
    """`index.html` and the pictures as PNG, in the experiment's folder."""
    tokens = {one.name: one.values(TOKENS) for one in results}
    seconds = {one.name: one.values("step_seconds") for one in results}
    runs = [one.first.run.run_dir for one in results if one.first]
    lost = problems_table(results)
    speed = Section(
        "Results",
        [
            spreads("Tokens per second, from the slowest run to the fastest", "1/s", tokens),
            spreads("A step, from the fastest run to the slowest", "seconds", seconds),
        ],
        [results_table(results, experiment.reference), lost],
        note=f"{verdict(results, experiment.reference)}. The bound is {bound(0, precision):g}, of "
        f"the loss and of all gradient norms, in the first {STRICT_STEPS} steps; then it is of the "
        f"loss alone and grows, until only means over many steps have to be alike. Speeds are "
        f"medians without the first {warmup_steps(steps)} steps.",
    )
    sections = [speed, _losses(results, experiment.reference, precision), _times(results)]
    sections.append(_bridges(results))
    read = [found for run in runs for found in read_runs(run)]
    sections.append(Section("Differences of the recipes", tables=[differences(read)]))
    shown = [one for one in sections if one.says_something]
    for section in shown:
        for at, picture in enumerate(section.pictures):
            name = section.title.lower().replace(" ", "_")
            picture.write_png(folder / (f"{name}_{at}.png" if at else f"{name}.png"))
    tiles = {
        "layouts": str(len(results)),
        "runs of each": str(experiment.repeats),
        "steps": str(steps),
        "follow the reference": str(sum(one.state == "follows" for one in results)),
    }
    text = render(f"Experiment {experiment.name}", [Part("", tiles, shown)])
    write(folder / "index.html", text)
