"""Fit rates to the metrics of runs, however short.

A rank's seconds in each kind of pass are its FLOPs times the module's seconds per FLOP, plus a
constant for each layer and pass. Least squares of relative errors over all runs give these
constants. Passes that share cores take longer than alone: each fit divides measured times by the
slowdown in a simulation with the previous fit.
"""

import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import LANGUAGE, Recipe
from mimo.errors import InputError
from mimo.families.registry import GENERAL, encoder_settings, language_settings
from mimo.model.dataset import Dataset
from mimo.model.step_plan import StepPlan
from mimo.parallel.build import build_layout
from mimo.parallel.grids import Layout
from mimo.plan.forecast import dataset_of_index, plans, simulate
from mimo.plan.rates import Rates
from mimo.plan.simulate import Pass, mean_seconds
from mimo.plan.work import StepWork
from mimo.runtime.run_files import METRICS, json_lines, starts_of

_FITS, _STEPS = 6, 3
_MIN_WORK = 0.1  # least share of a pass's time that is not messages
_HERE, _STEPS_HERE = "this_machine", 8
_WARMUP = 3  # first steps, whose times are ignored
_TAIL = ("gradients", "update")  # parts of a step after its last backward


@dataclass(frozen=True)
class MeasuredRun:
    """A run and the medians of its metrics. cores: of its machine; infinity on a GPU."""

    name: str
    recipe: Recipe
    layout: Layout
    dataset: Dataset
    metrics: Mapping[str, float]
    cores: float = math.inf

    @cached_property
    def plans(self) -> list[StepPlan]:
        return [*plans(self.recipe, self.layout, self.dataset, _STEPS)]

    def work(self, rates: Rates) -> StepWork:
        return StepWork(self.recipe, self.layout, self.dataset, rates)

    def pass_seconds(self, rates: Rates, is_shared: bool = False) -> dict[Pass, float]:
        """Return the mean seconds of each kind of pass per worker and step.

        is_shared: as simulated on the machine's cores; else with a core for each rank.
        """
        totals, work = Counter[Pass](), self.work(rates)
        for plan in self.plans:
            tasks = work.tasks(plan).tasks
            alone = mean_seconds(tasks, [task.seconds for task in tasks])
            totals.update(simulate(work, plan).timeline.busy() if is_shared else alone)
        return {key: total / len(self.plans) for key, total in totals.items()}

    def unsimulated(self, rates: Rates) -> float:
        """Return the seconds of a step that are not simulated, with a core for each rank."""
        work = self.work(rates)
        simulated = float(np.mean([simulate(work, plan).seconds for plan in self.plans]))
        return max(0.0, self.metrics["step_seconds"] - simulated) / work.ranks_per_core

    def element_costs(self, rates: Rates) -> list[float]:
        """Return each module's seconds of gradients and update per element that a rank updates."""
        work, costs = self.work(rates), []
        for name, (_, updated) in work.elements.items():
            seconds = sum(self.metrics.get(f"seconds_{name}_{part}", 0.0) for part in _TAIL)
            if updated and seconds:
                costs.append(seconds / work.ranks_per_core / updated)
        return costs


def read_run(folder: Path) -> MeasuredRun:
    """Read a finished or stopped run. Raises InputError."""
    timed = [line for line in json_lines(folder / METRICS) if "idle_fraction" in line]
    timed = [line for line in timed if line["step"] > _WARMUP] or timed
    if not timed:
        raise InputError(
            f"{folder}: no step in {METRICS} has its times; give the folder of a run with a logged "
            "step after its first"
        )
    recipe = load_recipe(folder / "recipe.yaml")
    dataset = dataset_of_index(recipe, folder / "recipe.yaml")
    names = {n for line in timed for n in line if n.startswith(("seconds_", "step_seconds"))}
    metrics = {name: median(line[name] for line in timed if name in line) for name in names}
    start = (starts_of(folder) or [{}])[-1]
    on_cpu = start.get("device", "CPU") == "CPU"
    cores = float(start.get("cores", 1)) if on_cpu else math.inf
    layout = build_layout(recipe, start.get("ranks"))
    return MeasuredRun(folder.name, recipe, layout, dataset, metrics, cores)


def measure_here(recipe: Recipe) -> MeasuredRun:
    """Train a few steps on one rank of this machine, and return that run. Raises InputError.

    Widths are the recipe's. The language model has one period of layers, and random weights. The
    run, with a checkpoint of this model, is in a temporary folder.
    """
    if any(part.family == GENERAL or part.engine == "fsdp" for part in recipe.modules.values()):
        raise InputError(
            "--calibrate here: the models of family transformers and of engine fsdp cannot be "
            "shortened; give the folder of a run"
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
    data["train"] |= {"steps": _STEPS_HERE, "global_batch_size": 2 * recipe.train.micro_batch_size}
    data["train"] |= {"log_every": 1, "loggers": [], "warmup_steps": 0, "schedule": "constant"}
    data["train"] |= dict.fromkeys(("save_every", "validate_every", "decay_steps", "profile"))
    print(f"training {_STEPS_HERE} steps on one rank of this machine", flush=True)
    with tempfile.TemporaryDirectory(prefix="mimo-plan-") as folder:
        data["train"]["run_dir"] = folder
        path = Path(folder) / "here.yaml"
        path.write_text(Recipe.model_validate(data).to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "mimo.cli.main", "train", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise InputError(f"--calibrate here: training on one rank failed: {' '.join(last)}")
        return read_run(Path(folder) / _HERE)


def calibrate(runs: Sequence[MeasuredRun], assumed: Rates) -> Rates:
    """Return rates fitted to runs. assumed: rates of links, and of the update if not measured."""
    rates = replace(assumed, cores=runs[0].cores, element=0.0, step=0.0)
    if math.isfinite(rates.cores):  # messages inside one machine count as free
        rates = replace(rates, node=math.inf, network=math.inf, latency=0.0, peak=0.0)
    modules = list(dict.fromkeys(name for run in runs for name in run.layout.grids))
    zero_rates, num_constants = Rates("", {}, {}, cores=runs[0].cores), 2 * len(modules) + 2
    units = [_with_constants(zero_rates, modules, unit) for unit in np.eye(num_constants).tolist()]
    per_constant = [[run.pass_seconds(unit) for unit in units] for run in runs]
    rates, fit = _with_constants(rates, modules, [0.0] * num_constants), [0.0] * num_constants
    for _ in range(_FITS):
        matrix, seconds = [], []
        for run, per_unit in zip(runs, per_constant, strict=True):
            alone, shared = run.pass_seconds(rates), run.pass_seconds(rates, is_shared=True)
            for (module, kind), expected in alone.items():
                if not (measured := run.metrics.get(f"seconds_{module}_{kind}")):
                    continue
                row = [of_constant[module, kind] for of_constant in per_unit]
                unshared = measured * expected / shared[module, kind] if expected else measured
                messages = expected - float(np.dot(row, fit))
                matrix.append(row)
                seconds.append(max(unshared - messages, _MIN_WORK * unshared))
        fit = _nonnegative_least_squares(np.array(matrix), np.array(seconds))
        rates = _with_constants(rates, modules, fit)
    element = [cost for run in runs for cost in run.element_costs(rates)]
    rates = replace(rates, element=median(element) if element else assumed.element)
    return replace(
        rates,
        source="fitted to " + ", ".join(run.name for run in runs),
        forward={**rates.forward, "": float(np.mean([*rates.forward.values()]))},
        backward={**rates.backward, "": float(np.mean([*rates.backward.values()]))},
        step=median(run.unsimulated(rates) for run in runs),
    )


def _with_constants(rates: Rates, modules: Sequence[str], constants: Sequence[float]) -> Rates:
    """Return rates with seconds per FLOP of each module's forward, each backward, then calls."""
    *per_flop, call, call_back = constants
    forward = dict(zip(modules, per_flop[: len(modules)], strict=True))
    backward = dict(zip(modules, per_flop[len(modules) :], strict=True))
    return replace(rates, forward=forward, backward=backward, call=call, call_back=call_back)


def _nonnegative_least_squares(matrix: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return constants >= 0 by least squares of relative errors, dropping negative ones."""
    rows = matrix / seconds[:, None]
    scale = np.abs(rows).max(axis=0)
    used = scale > 0
    while True:
        result = np.zeros(len(scale))
        columns = rows[:, used] / scale[used]
        result[used] = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=1e-9)[0] / scale[used]
        if not (result < 0).any():
            return result.tolist()
        used &= result != result.min()
