"""`mimo plan`: print forecasts of steps or the best layouts; draw timelines; write overrides."""

import functools
import json
import operator
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.schema import Recipe
from mimo.errors import InputError, RecipeError, suggestion
from mimo.model.dataset import Dataset
from mimo.model.indexing import indexed_dataset
from mimo.model.recipe_checks import check_recipe
from mimo.plan.calibrate import MeasuredRun, calibrate, measure_here, read_run
from mimo.plan.forecast import Forecast, forecast
from mimo.plan.rates import parse_gpu, rates_of_gpu
from mimo.plan.search import Choice, search, searched_keys
from mimo.plan.simulate import Timeline
from mimo.report.tables import Table, number, percent, show, write

_GIB = 2**30
_COLORS = {"forward": "tab:blue", "encode": "tab:cyan", "backward": "tab:orange"}
_MICROSECONDS = 1e6


def main(
    path: Path,
    overrides: Sequence[str],
    gpus: int | None,
    gpu: str,
    nodes_of: int,
    fixes: Sequence[str] = (),
    calibrate_on: Sequence[str] = (),
    experiment: Path | None = None,
    timeline: Path | None = None,
    to_write: Path | None = None,
) -> int:
    """Print a forecast or, with ``gpus``, the best layouts. Raises InputError.

    calibrate_on: folders of runs that rates are fitted to, or "here" for a short run on this
    machine. experiment: a folder with such folders.
    """
    device = parse_gpu(gpu)
    phases = load_phases(path, overrides).phases
    recipe = phases[0].recipe
    if len(phases) > 1:
        print(f"planning the first phase, {phases[0].title}")
    dataset = dataset_of_index(recipe, path)
    rates = rates_of_gpu(device, nodes_of)
    runs = [] if experiment is None else [read_run(folder) for folder in runs_of(experiment)]
    runs += [_run_for_rates(recipe, text) for text in calibrate_on]
    if runs:
        rates = calibrate(runs, rates)
    print(f"rates: {rates.source}")
    if gpus is None:
        if fixes or to_write is not None:
            raise InputError("--fix and --write belong to a search; give --gpus as well")
        layout = check_recipe(recipe, None)
        result = forecast(recipe, layout, dataset, rates)
        show(forecast_table(result), roles_table(result))
        chosen = result
    else:
        fixed = parse_fixes(path, overrides, fixes)
        results = search(recipe, dataset, rates, device, gpus, fixed)
        counts = ", ".join(f"{count:,} {name}" for name, count in results.counts.items())
        print(f"layouts on {gpus} GPUs: {counts}")
        show(choices_table(results.choices, device.memory))
        best = results.choices[0]
        line = " ".join(f"{k}={json.dumps(v)}" for k, v in best.overrides.items())
        print(f"overrides of the first: {line}")
        chosen = best.forecast
        if to_write is not None:
            write(to_write, "".join(f"{k}={json.dumps(v)}\n" for k, v in best.overrides.items()))
    if timeline is not None:
        write(timeline / "trace.json", json.dumps(trace(chosen.median_step.timeline)))
        draw(chosen.median_step.timeline, timeline / "timeline.png")
    return 0


def _run_for_rates(recipe: Recipe, text: str) -> MeasuredRun:
    if text != "here":
        return read_run(Path(text))
    with tempfile.TemporaryDirectory(prefix="mimo-plan-") as folder:
        return measure_here(recipe, Path(folder))


def dataset_of_index(recipe: Recipe, path: Path) -> Dataset:
    """Return the training data. Raises InputError unless they are indexed."""
    dataset = indexed_dataset(recipe)
    if dataset is None:
        raise InputError(
            f"{path}: data.sources are not indexed, but a plan needs the sizes of samples; "
            f"run: mimo data index {path}"
        )
    return dataset


def runs_of(experiment: Path) -> list[Path]:
    """Return the run folders of an experiment that have metrics. Raises InputError."""
    folders = sorted(file.parent for file in experiment.glob("*/metrics.jsonl"))
    if not folders:
        raise InputError(f"--from {experiment}: no run is in it; give the folder of an experiment")
    return folders


def parse_fixes(path: Path, overrides: Sequence[str], fixes: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--fix` by key. Raises RecipeError for unsearched keys, bad values."""
    known = searched_keys(load_phases(path, overrides).phases[0].recipe)
    for text in fixes:
        key, _, _ = text.partition("=")
        if key not in known:
            raise RecipeError(
                f"--fix {text}: this key is not searched, so give it as an override without --fix; "
                f"{suggestion(key, known)}"
            )
    fixed = load_phases(path, [*overrides, *fixes]).phases[0].recipe.model_dump(mode="json")
    return {
        key: functools.reduce(operator.getitem, key.split("."), fixed)
        for key in (text.partition("=")[0] for text in fixes)
    }


# ------------------------------------------------------------------------------ tables


def forecast_table(result: Forecast) -> Table:
    """Return a table of the speed over all simulated steps."""
    columns = ("steps", "p50, s", "p95, s", "p99, s", "tokens/s", "MFU")
    seconds = (number(result.percentile(percent)) for percent in (50, 95, 99))
    mfu = percent(result.mfu) if result.mfu is not None else "–"
    row = (str(len(result.steps)), *seconds, number(result.tokens_per_second), mfu)
    return Table(columns, [row], title="forecast")


def roles_table(result: Forecast) -> Table:
    """Return a table of each role's idle share, and the role that it waits for most."""
    rows = []
    for role, share in result.idle.items():
        waits = {whom: seconds for (who, whom), seconds in result.waits.items() if who == role}
        longest = max(waits, key=lambda whom: waits[whom], default=None)
        why = _wait(longest, waits[longest], result) if longest else "nobody"
        rows.append((_role(*role), percent(share), why))
    return Table(("role", "idle", "waits most for"), rows, words=True, title="the median step")


def _wait(whom: tuple[str, int], seconds: float, result: Forecast) -> str:
    return f"{_role(*whom)}, {percent(seconds / result.median_step.seconds)}"


def choices_table(choices: Sequence[Choice], memory: float) -> Table:
    """Return a table of the best layouts and their longest waits. memory: bytes of a GPU."""
    rows = []
    for place, choice in enumerate(choices, start=1):
        result = choice.forecast
        modules = list(dict.fromkeys(name for name, _ in result.idle))
        idle = ", ".join(f"{name} {percent(result.idle_of(name))}" for name in modules)
        longest = max(result.waits.items(), key=lambda wait: wait[1], default=None)
        why = "nobody waits"
        if longest is not None:
            (who, whom), seconds = longest
            why = f"{_role(*who)} for {_wait(whom, seconds, result)}"
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


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as events that Perfetto and chrome://tracing read."""
    names = {n: f"{w.module} stage {w.stage} lane {w.lane}" for n, w in enumerate(timeline.workers)}
    events: list[Mapping[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": n, "name": "thread_name", "args": {"name": name}}
        for n, name in names.items()
    ]
    for number_, task in enumerate(timeline.tasks):
        start, end = timeline.start[number_], timeline.end[number_]
        times = {"ts": start * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS}
        events.append({"ph": "X", "pid": 0, "tid": task.worker, "name": str(task), **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(timeline: Timeline, path: Path) -> None:
    """Draw the first lane of each module and stage as a PNG. Raises InputError."""
    shown = [n for n, worker in enumerate(timeline.workers) if worker.lane == 0]
    place = {worker: row for row, worker in enumerate(shown)}
    with mpl.rc_context({"font.size": 8}):
        figure = Figure(figsize=(12, 1.0 + 0.45 * len(shown)), layout="constrained")
        axes = figure.subplots()
        for number_, task in enumerate(timeline.tasks):
            if task.worker in place:
                start, end = timeline.start[number_], timeline.end[number_]
                color = _COLORS[task.kind]
                box = {"left": start, "color": color, "edgecolor": "white", "linewidth": 0.4}
                axes.barh(place[task.worker], end - start, **box)
        for kind in dict.fromkeys(task.kind for task in timeline.tasks):
            axes.barh(0, 0, color=_COLORS[kind], label=kind)
        workers = [timeline.workers[n] for n in shown]
        axes.set_yticks(range(len(shown)), [_role(*worker.role) for worker in workers])
        axes.invert_yaxis()
        axes.set(xlabel="seconds (lane 0 of each module)")
        figure.legend(ncols=4, frameon=False, loc="outside upper right")
        try:
            figure.savefig(path, dpi=150, metadata={"Software": None})
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error.strerror})") from error
    print(f"written: {path}")
