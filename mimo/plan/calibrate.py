"""Fit rates to the metrics of runs, however short.

A rank's seconds in each kind of pass are its FLOPs times the module's seconds per FLOP, plus a
constant for each layer and pass. Least squares of relative errors over all runs give these
constants. Passes that share cores take longer than alone: each fit divides measured times by the
slowdown in a simulation with the previous fit.
"""

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import LANGUAGE, Recipe
from mimo.errors import InputError
from mimo.families.registry import GENERAL, encoder_settings, language_settings
from mimo.model.dataset import Dataset
from mimo.model.indexing import indexed_dataset
from mimo.model.step_plan import StepPlan
from mimo.parallel.build import build_layout
from mimo.parallel.grids import Layout
from mimo.plan.forecast import Step, plans, simulate
from mimo.plan.rates import Rates
from mimo.plan.work import StepWork
from mimo.runtime.run_files import METRICS, json_lines, starts_of

_FITS, _STEPS = 6, 3
_MIN_WORK = 0.1  # least share of a pass's time that is not messages
_HERE, _STEPS_HERE = "this_machine", 8
_WARMUP = 3  # first steps, whose times are ignored
_TAIL = ("gradients", "update")  # parts of a step after its last backward
_CALLS = ("call", "call_back")
_NO_RATES = Rates("", {}, {})

Key = tuple[str, str]
"""Module and kind of pass."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run and the medians of its metrics. cores: of its machine; infinity on a GPU."""

    name: str
    recipe: Recipe
    layout: Layout
    dataset: Dataset
    metrics: Mapping[str, float]
    cores: float = math.inf


def read_run(folder: Path) -> MeasuredRun:
    """Read a finished or stopped run. Raises InputError."""
    lines = json_lines(folder / METRICS)
    timed = [line for line in lines if "idle_fraction" in line]
    timed = [line for line in timed if line["step"] > _WARMUP] or timed
    if not timed:
        raise InputError(
            f"{folder}: no step in {METRICS} has its times; give the folder of a run with a logged "
            "step after its first"
        )
    recipe = load_recipe(folder / "recipe.yaml")
    if (dataset := indexed_dataset(recipe)) is None:
        raise InputError(f"{folder}: its data are not indexed here; run mimo data index first")
    names = dict.fromkeys(name for line in timed for name in line)
    values = {name: [line[name] for line in timed if name in line] for name in names}
    metrics = {
        name: median(v) for name, v in values.items() if all(isinstance(x, int | float) for x in v)
    }
    start = (starts_of(folder) or [{}])[-1]
    on_cpu = start.get("device", "CPU") == "CPU"
    cores = float(start.get("cores", 1)) if on_cpu else math.inf
    layout = build_layout(recipe, start.get("ranks"))
    return MeasuredRun(folder.name, recipe, layout, dataset, metrics, cores)


def measure_here(recipe: Recipe, folder: Path) -> MeasuredRun:
    """Train a few steps on one rank of this machine, and return that run. Raises InputError.

    Widths are the recipe's. The language model has one period of layers, and random weights.
    folder: where the run is written, with a checkpoint of this model.
    """
    if GENERAL in {recipe.module(name).family for name in recipe.modules}:
        raise InputError(
            "--calibrate here: models of family transformers cannot be shortened; give the folder "
            "of a run"
        )
    if "fsdp" in {recipe.module(name).engine for name in recipe.modules}:
        raise InputError(
            "--calibrate here: with engine: fsdp the folder of init_from sets the number of "
            "layers; give the folder of a run"
        )
    settings = language_settings(recipe)
    levels = max((encoder_settings(recipe, name).num_levels for name in recipe.encoders), default=0)
    layers = math.ceil(max(levels, 1) / settings.layer_period) * settings.layer_period
    data = recipe.model_dump(mode="json") | {"name": _HERE, "init_from": None}
    data[LANGUAGE] |= {"grid": {}, "model": {**data[LANGUAGE]["model"], "num_layers": layers}}
    for part in (*data["encoders"].values(), *data["generators"].values()):
        part |= {"grid": {}, "placement": "colocated"}
    for encoder in data["encoders"].values():
        encoder["encode_group"] = "all"
    data["train"] |= {
        "steps": _STEPS_HERE,
        "global_batch_size": 2 * recipe.train.micro_batch_size,
        "log_every": 1,
        "save_every": None,
        "validate_every": None,
        "warmup_steps": 0,
        "schedule": "constant",
        "decay_steps": None,
        "loggers": [],
        "profile": None,
        "run_dir": str(folder),
    }
    path = folder / "here.yaml"
    path.write_text(Recipe.model_validate(data).to_yaml(), encoding="utf-8")
    print(f"training {_STEPS_HERE} steps on one rank of this machine", flush=True)
    command = [sys.executable, "-m", "mimo.cli.main", "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise InputError(f"--calibrate here: training on one rank failed: {' '.join(last)}")
    return read_run(folder / _HERE)


def calibrate(runs: Sequence[MeasuredRun], assumed: Rates) -> Rates:
    """Return rates fitted to runs. assumed: rates of links, and of the update if not measured."""
    all_features = [_Features(run) for run in runs]
    modules = list(dict.fromkeys(name for run in runs for name in run.layout.grids))
    rates = replace(assumed, cores=runs[0].cores)
    if math.isfinite(rates.cores):  # messages inside one machine count as free
        rates = replace(rates, node=math.inf, network=math.inf, latency=0.0, peak=0.0)
    rates = replace(rates, forward={}, backward={}, call=0.0, call_back=0.0, element=0.0, step=0.0)
    names = [f"{module} {kind}" for module in modules for kind in ("first", "back")] + [*_CALLS]
    fit = dict.fromkeys(names, 0.0)
    for _ in range(_FITS):
        matrix, seconds = [], []
        for features in all_features:
            alone = features.work(rates)
            slowdowns = features.slowdowns(rates, alone)
            for key, measured in features.measured.items():
                row, unshared = features.per_constant[key], measured / slowdowns.get(key, 1.0)
                messages = alone[key] - sum(fit[name] * value for name, value in row.items())
                matrix.append([row.get(name, 0.0) for name in names])
                seconds.append(max(unshared - messages, _MIN_WORK * unshared))
        fit = dict(zip(names, _nonnegative_least_squares(matrix, seconds), strict=True))
        forward = {module: fit[f"{module} first"] for module in modules}
        backward = {module: fit[f"{module} back"] for module in modules}
        for fitted in (forward, backward):
            fitted[""] = float(np.mean([*fitted.values()]))  # of modules that no run has
        calls = {name: fit[name] for name in _CALLS}
        rates = replace(rates, forward=forward, backward=backward, **calls)
    element = [cost for features in all_features for cost in features.element_costs(rates)]
    rates = replace(rates, element=median(element) if element else assumed.element)
    rest = [features.unsimulated(rates) for features in all_features]
    source = "fitted to " + ", ".join(run.name for run in runs)
    return replace(rates, name="fitted", step=median(rest), source=source)


class _Features:
    """A run's measured times, and per_constant: seconds of each key per unit of a constant."""

    def __init__(self, run: MeasuredRun) -> None:
        self.run, self.seconds = run, run.metrics["step_seconds"]
        self.plans: list[StepPlan] = [*plans(run.recipe, run.layout, run.dataset, _STEPS)]
        self.per_constant: dict[Key, dict[str, float]] = {}
        for name, rates in self._bases().items():
            for key, seconds in self.work(rates).items():
                self.per_constant.setdefault(key, {})[name] = seconds
        values = {key: run.metrics.get(f"seconds_{key[0]}_{key[1]}") for key in self.per_constant}
        self.measured = {key: value for key, value in values.items() if value}

    def _bases(self) -> dict[str, Rates]:
        cores = self.run.cores
        bases = {name: replace(_NO_RATES, **{name: 1.0}, cores=cores) for name in _CALLS}
        for module in self.run.layout.grids:
            bases[f"{module} first"] = replace(_NO_RATES, forward={module: 1.0}, cores=cores)
            bases[f"{module} back"] = replace(_NO_RATES, backward={module: 1.0}, cores=cores)
        return bases

    def work(self, rates: Rates) -> dict[Key, float]:
        """Return the mean seconds of each key per worker and step, with a core for each rank."""
        totals: dict[Key, float] = {}
        workers: dict[Key, set[int]] = {}
        work = StepWork(self.run.recipe, self.run.layout, self.run.dataset, rates)
        for plan in self.plans:
            for task in work.tasks(plan).tasks:
                key = task.module, task.kind
                totals[key] = totals.get(key, 0.0) + task.seconds
                workers.setdefault(key, set()).add(task.worker)
        return {key: t / len(workers[key]) / len(self.plans) for key, t in totals.items()}

    def _simulate(self, rates: Rates) -> list[Step]:
        work = StepWork(self.run.recipe, self.run.layout, self.run.dataset, rates)
        return [simulate(work, plan) for plan in self.plans]

    def slowdowns(self, rates: Rates, alone: Mapping[Key, float]) -> dict[Key, float]:
        """Return the slowdown of passes by shared cores. alone: seconds with a core per rank."""
        if math.isinf(rates.cores) or not rates.forward:
            return {}
        shared = Counter[Key]()
        for step in self._simulate(rates):
            shared.update(step.timeline.busy())
        return {key: shared[key] / len(self.plans) / alone[key] for key in shared if alone[key]}

    def unsimulated(self, rates: Rates) -> float:
        """Return the seconds of a step that are not simulated, with a core for each rank."""
        work = StepWork(self.run.recipe, self.run.layout, self.run.dataset, rates)
        simulated = float(np.mean([step.seconds for step in self._simulate(rates)]))
        return max(0.0, self.seconds - simulated) / work.ranks_per_core

    def element_costs(self, rates: Rates) -> list[float]:
        """Return each module's seconds of gradients and update per element that a rank updates."""
        work = StepWork(self.run.recipe, self.run.layout, self.run.dataset, rates)
        costs = []
        for name, (_, updated) in work.elements.items():
            parts = [self.run.metrics.get(f"seconds_{name}_{p}", 0.0) for p in _TAIL]
            if updated and sum(parts):
                costs.append(sum(parts) / work.ranks_per_core / updated)
        return costs


def _nonnegative_least_squares(
    matrix: Sequence[Sequence[float]], seconds: Sequence[float]
) -> list[float]:
    """Return constants >= 0 by least squares of relative errors, dropping negative ones."""
    rows = np.array(matrix) / np.array(seconds)[:, None]
    scale = np.abs(rows).max(axis=0)
    used = scale > 0
    while True:
        result = np.zeros(len(scale))
        columns = rows[:, used] / scale[used]
        result[used] = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=1e-9)[0] / scale[used]
        if not (result < 0).any():
            return result.tolist()
        used &= result != result.min()
