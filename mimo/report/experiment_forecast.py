"""Forecasts of an experiment's layouts, with rates fitted to the first two, beside its results."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from mimo.errors import InputError
from mimo.plan.calibrate import calibrate, read_run
from mimo.plan.forecast import forecast
from mimo.plan.rates import GPUS, rates_of_gpu
from mimo.report.experiment_results import Result
from mimo.report.tables import Table, number, percent

_NUM_FITTED = 2
_MIN_DIFFERENCE = 0.10  # of two layouts' times, relative, for their order to count


@dataclass(frozen=True)
class Comparison:
    """A step of a layout, measured and simulated. is_fitted: the rates are fitted to it."""

    layout: str
    is_fitted: bool
    measured_seconds: float
    seconds: float
    measured_idle: float
    idle: float

    @property
    def error(self) -> float:
        return self.seconds / self.measured_seconds - 1


def compare_forecasts(results: Sequence[Result]) -> list[Comparison]:
    """Simulate every layout that has run. Raises InputError if fewer than two have."""
    done = {r.name: [o.run.run_dir for o in r.outcomes if o.is_done] for r in results}
    runs = {name: [read_run(folder) for folder in of] for name, of in done.items() if of}
    if len(runs) < _NUM_FITTED:
        raise InputError(f"--simulate: rates are fitted to two layouts, but {len(runs)} have run")
    fitted = [*runs][:_NUM_FITTED]
    assumed = rates_of_gpu(GPUS["h100"], ranks_per_node=8)
    rates = calibrate([run for name in fitted for run in runs[name]], assumed)
    compared = []
    for name, figures in ((r.name, r.figures) for r in results if r.name in runs):
        run, *_ = runs[name]
        result = forecast(run.recipe, run.layout, run.dataset, rates)
        grids = [run.layout.grids[module] for module, _ in result.idle]  # of each stage
        idle = np.average([*result.idle.values()], weights=[grid.size / grid.pp for grid in grids])
        measured, measured_idle = figures["step_seconds"], figures["idle_fraction"]
        seconds, is_fitted = result.percentile(50), name in fitted
        compared.append(Comparison(name, is_fitted, measured, seconds, measured_idle, float(idle)))
    return compared


def forecasts_table(compared: Sequence[Comparison]) -> Table:
    """Return a table of measured and simulated times."""
    rows = [
        (
            f"{c.layout} (fitted)" if c.is_fitted else c.layout,
            number(c.measured_seconds),
            number(c.seconds),
            f"{100 * c.error:+.1f} %",
            percent(c.measured_idle),
            percent(c.idle),
        )
        for c in compared
    ]
    columns = ("layout", "step, s", "forecast, s", "error", "idle", "forecast")
    return Table(columns, rows, title="forecasts")


def forecasts_verdict(compared: Sequence[Comparison]) -> str:
    """Return a sentence about the errors and the order of forecasts."""
    errors = [abs(c.error) for c in compared if not c.is_fitted] or [0.0]
    by_time = sorted(compared, key=lambda c: c.measured_seconds)
    pairs = [
        (faster, slower)
        for faster, slower in combinations(by_time, 2)
        if slower.measured_seconds > (1 + _MIN_DIFFERENCE) * faster.measured_seconds
    ]
    in_order = sum(faster.seconds < slower.seconds for faster, slower in pairs)
    return (
        f"forecasts of {len(errors)} layouts: median error {percent(median(errors))}, largest "
        f"{percent(max(errors))}; {in_order} of {len(pairs)} pairs that differ by more than "
        f"{percent(_MIN_DIFFERENCE)} are in the right order"
    )
