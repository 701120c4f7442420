"""Forecasts of an experiment's layouts, with rates fitted to the first two, beside its results."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

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
    figures_of = {result.name: result.figures for result in results}
    compared = []
    for name, (run, *_) in runs.items():
        result = forecast(run.recipe, run.layout, run.dataset, rates)
        ranks = {module: grid.size for module, grid in run.layout.grids.items()}
        shares = [(result.idle_of(m), ranks[m]) for m in dict.fromkeys(m for m, _ in result.idle)]
        idle = sum(share * count for share, count in shares) / sum(count for _, count in shares)
        measured = [figures_of[name][key] for key in ("step_seconds", "idle_fraction")]
        compared.append(
            Comparison(name, name in fitted, measured[0], result.percentile(50), measured[1], idle)
        )
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
    pairs = [
        (first, second)
        for first, second in combinations(compared, 2)
        if abs(first.measured_seconds - second.measured_seconds)
        > _MIN_DIFFERENCE * min(first.measured_seconds, second.measured_seconds)
    ]
    in_order = sum(
        (first.measured_seconds < second.measured_seconds) == (first.seconds < second.seconds)
        for first, second in pairs
    )
    return (
        f"forecasts of {len(errors)} layouts: median error {percent(median(errors))}, largest "
        f"{percent(max(errors))}; {in_order} of {len(pairs)} pairs that differ by more than "
        f"{percent(_MIN_DIFFERENCE)} are in the right order"
    )
