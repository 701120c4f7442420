"""`mimo plan`: print forecasts of steps or the best layouts; draw timelines; write overrides."""

import functools
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.schema import Recipe
from mimo.errors import InputError, RecipeError, suggestion
from mimo.plan.calibrate import calibrate, measure_here, read_run
from mimo.plan.forecast import Forecast
from mimo.plan.rates import Rates
from mimo.plan.search import Choice, searched_keys
from mimo.plan.simulate import Role, Timeline
from mimo.report.tables import Table, number, percent, write

_GIB = 2**30
_COLORS = {"forward": "tab:blue", "encode": "tab:cyan", "backward": "tab:orange"}


def fitted_rates(
    recipe: Recipe, assumed: Rates, calibrate_on: Sequence[str], experiment: Path | None
) -> Rates:
    """Return rates fitted to runs; those assumed if there are none. Raises InputError.

    calibrate_on: folders of runs, or "here" for a short run on this machine. experiment: a folder
    with such folders.
    """
    files = [] if experiment is None else sorted(experiment.glob("*/metrics.jsonl"))
    if experiment is not None and not files:
        raise InputError(f"--from {experiment}: no run is in it; give the folder of an experiment")
    runs = [read_run(file.parent) for file in files]
    runs += [measure_here(recipe) if w == "here" else read_run(Path(w)) for w in calibrate_on]
    return calibrate(runs, assumed) if runs else assumed


def parse_fixes(path: Path, overrides: Sequence[str], fixes: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--fix` by key. Raises RecipeError for unsearched keys, bad values."""
    known = searched_keys(load_phases(path, overrides).phases[0].recipe)
    keys = [text.partition("=")[0] for text in fixes]
    for key, text in zip(keys, fixes, strict=True):
        if key not in known:
            raise RecipeError(
                f"--fix {text}: this key is not searched, so give it as an override without "
                f"--fix; {suggestion(key, known)}"
            )
    values = load_phases(path, [*overrides, *fixes]).phases[0].recipe.model_dump(mode="json")
    return {key: functools.reduce(operator.getitem, key.split("."), values) for key in keys}


# ------------------------------------------------------------------------------ tables


def forecast_table(result: Forecast) -> Table:
    """Return a table of the speed over all simulated steps."""
    columns = ("steps", "p50, s", "p95, s", "p99, s", "tokens/s", "MFU")
    seconds = (number(result.percentile(share)) for share in (50, 95, 99))
    speed = number(result.tokens_per_second), percent(result.mfu)
    row = (str(len(result.steps)), *seconds, *speed)
    return Table(columns, [row], title="forecast")


def roles_table(result: Forecast) -> Table:
    """Return a table of each role's idle share, and the role that it waits for most."""
    rows = []
    for role, share in result.idle.items():
        waits = {whom: seconds for (who, whom), seconds in result.waits.items() if who == role}
        longest = max(waits.items(), key=operator.itemgetter(1), default=None)
        why = _wait(*longest, result) if longest else "nobody"
        rows.append((_role(*role), percent(share), why))
    return Table(("role", "idle", "waits most for"), rows, words=True, title="the median step")


def _wait(whom: Role, seconds: float, result: Forecast) -> str:
    return f"{_role(*whom)}, {percent(seconds / result.median_step.seconds)}"


def choices_table(choices: Sequence[Choice], memory: float) -> Table:
    """Return a table of the best layouts and their longest waits. memory: bytes of a GPU."""
    rows = []
    for place, choice in enumerate(choices, start=1):
        result, why = choice.forecast, "nobody waits"
        modules = list(dict.fromkeys(name for name, _ in result.idle))
        idle = ", ".join(f"{name} {percent(result.idle_of(name))}" for name in modules)
        for (who, whom), seconds in sorted(result.waits.items(), key=operator.itemgetter(1)):
            why = f"{_role(*who)} for {_wait(whom, seconds, result)}"  # the last is the longest
        room = f"{choice.memory / _GIB:.1f} of {memory / _GIB:.0f} ({choice.role})"
        speed = (number(result.percentile(50)), number(result.tokens_per_second))
        rows.append((str(place), describe(choice), *speed, room, idle, why))
    columns = ("", "layout", "step, s", "tokens/s", "memory, GiB", "idle", "longest wait")
    return Table(columns, rows, words=True, title="best layouts")


def describe(choice: Choice) -> str:
    """Return a one-line description of a layout."""
    parts = []
    for name, grid in choice.layout.grids.items():
        sizes = {axis: getattr(grid, axis) for axis in ("tp", "cp", "pp", "vpp", "ep", "dp")}
        axes = "·".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "1 rank"
        parts.append(f"{name}{' colocated' * (name in choice.layout.colocated)} {axes}")
    batch, recompute = choice.recipe.train.micro_batch_size, choice.recipe.language.recompute
    return ", ".join((*parts, f"microbatch {batch}, recompute {recompute}"))


def _role(module: str, stage: int) -> str:
    return f"{module} {stage}"


# ------------------------------------------------------------------------------ timelines


def write_timeline(timeline: Timeline, folder: Path) -> None:
    """Write trace.json and timeline.png. Raises InputError."""
    write(folder / "trace.json", json.dumps(trace(timeline)))
    draw(timeline).savefig(folder / "timeline.png", dpi=150, metadata={"Software": None})
    print(f"written: {folder / 'timeline.png'}")


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as events that Perfetto and chrome://tracing read."""
    events = list[dict[str, Any]]()
    for worker, who in enumerate(timeline.workers):
        name = f"{who.module} stage {who.stage} lane {who.lane}"
        event = {"ph": "M", "tid": worker, "name": "thread_name", "args": {"name": name}}
        events.append({"pid": 0, **event})
    for task, start, end in zip(timeline.tasks, timeline.start, timeline.end, strict=True):
        times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}  # microseconds
        events.append({"ph": "X", "pid": 0, "tid": task.worker, "name": str(task), **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


@mpl.rc_context({"font.size": 8})
def draw(timeline: Timeline) -> Figure:
    """Draw the first lane of each module and stage."""
    shown = [n for n, worker in enumerate(timeline.workers) if worker.lane == 0]
    figure = Figure(figsize=(12, 1.0 + 0.45 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for row, worker in enumerate(shown):
        tasks = [n for n, task in enumerate(timeline.tasks) if task.worker == worker]
        start, colors = timeline.start[tasks], [_COLORS[timeline.tasks[n].kind] for n in tasks]
        style = {"color": colors, "edgecolor": "white", "linewidth": 0.4}
        axes.barh([row] * len(tasks), timeline.end[tasks] - start, left=start, **style)
    for kind in dict.fromkeys(task.kind for task in timeline.tasks):
        axes.barh(0, 0, color=_COLORS[kind], label=kind)
    axes.set_yticks(range(len(shown)), [_role(*timeline.workers[n].role) for n in shown])
    axes.invert_yaxis()
    axes.set(xlabel="seconds (lane 0 of each module)")
    figure.legend(ncols=4, frameon=False, loc="outside upper right")
    return figure
