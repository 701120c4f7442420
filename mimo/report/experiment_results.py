"""The results of an experiment: metrics of each layout, and how far its losses may differ.

Another layout adds the same numbers in another order. That changes the last bits of the first
losses, and training lets such differences grow: in fp32 some tenfold every ten steps once the
learning rate is high. A learning rate that is wrong by one percent shows in the second loss at
6e-5. So the first steps are compared strictly, and with them the gradient norm of every module,
which shows a wrong gradient that the optimizer scales away. Then the bound grows as rounding may,
until, after some hundred steps, only means over many steps say anything.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from mimo.report.experiment_file import Experiment
from mimo.report.experiment_runs import Outcome, num_steps
from mimo.report.runs import Curve

TOKENS = "tokens_per_second"
STRICT_STEPS = 10
_STEPS_TO_DOUBLE = 10
_LIMIT = 0.05
# Means over this many steps; correct layouts of the quickstart differed by up to 7 %.
_WINDOW, _MEAN_LIMIT = 100, 0.25
# Relative differences that rounding explains in the first steps, by the precision of the weights.
_FIRST = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 0.02}
_MOST_WARMUP = 10  # steps in which memory, caches and the clocks of the machine settle


@dataclass(frozen=True)
class Followed:
    """The comparison of a run with the reference.

    difference: the largest relative difference of losses, over the steps that have a bound. at: its
    step. problem: a sentence about the first step beyond the bound, or "".
    """

    difference: float
    at: int
    problem: str = ""


def bound(step: int, precision: str) -> float | None:
    """Return the largest relative error that rounding explains at ``step`` (from 0); None: any."""
    doubled = max(0, step + 1 - STRICT_STEPS) / _STEPS_TO_DOUBLE
    allowed = _FIRST[precision] * 2.0 ** min(doubled, 64.0)
    return allowed if allowed <= _LIMIT else None


def difference(ours: float, theirs: float) -> float:
    """Return the difference relative to the reference, ``theirs``; 0 if neither is finite."""
    if math.isnan(ours) or math.isnan(theirs):  # not finite, as metrics write it
        return 0.0 if math.isnan(ours) and math.isnan(theirs) else math.inf
    return abs(ours - theirs) / abs(theirs) if ours != theirs and theirs else abs(ours - theirs)


def follow(curves: Mapping[str, Curve], reference: Mapping[str, Curve], precision: str) -> Followed:
    """Compare all steps of a run with the reference's, which has as many."""

    def differs_at(step: int, name: str) -> float:
        ours = curves[name].values[step] if name in curves else math.nan
        return difference(ours, reference[name].values[step])

    largest, at, problem = 0.0, 0, ""
    norms = [name for name in reference if name.startswith("grad_norm")]
    for step in range(num_steps(reference)):
        name = "loss"
        if (allowed := bound(step, precision)) is None:
            allowed, name = _MEAN_LIMIT, f"the mean loss of {_WINDOW} steps"
            off = difference(_mean(curves["loss"], step), _mean(reference["loss"], step))
        else:
            off = differs_at(step, name)
            if off > largest:
                largest, at = off, step
        if step < STRICT_STEPS:
            off, name = max((off, name), *((differs_at(step, norm), norm) for norm in norms))
        if not problem and off > allowed:
            problem = f"{name} of step {step + 1} is off by {off:.1e}, beyond {allowed:.1e}"
    return Followed(largest, at, problem)


def _mean(losses: Curve, step: int) -> float:
    last = losses.values[max(0, step + 1 - _WINDOW) : step + 1]
    finite = last[np.isfinite(last)]
    return float(finite.mean()) if len(finite) else math.nan


@dataclass(frozen=True)
class Result:
    """The results of a layout.

    outcomes: of its runs. of_runs: for each complete run the medians of its metrics without the
    first steps. follows: the comparison of the worst run; None without a reference.
    """

    name: str
    outcomes: Sequence[Outcome]
    of_runs: Sequence[Mapping[str, float]]
    follows: Followed | None

    def values(self, metric: str) -> list[float]:
        """Return the metric of each run that has it."""
        return [figures[metric] for figures in self.of_runs if metric in figures]

    @cached_property
    def figures(self) -> Mapping[str, float]:
        """The median of each metric over the runs."""
        names = dict.fromkeys(name for figures in self.of_runs for name in figures)
        return {name: median(self.values(name)) for name in names}

    @property
    def error(self) -> str:
        """The error of the first run that failed."""
        return next((outcome.error for outcome in self.outcomes if outcome.error), "")

    @property
    def state(self) -> str:
        if self.error:
            return "failed"
        if any(outcome.job for outcome in self.outcomes):
            return "not done yet"
        if self.follows is None:
            return "cannot be compared"
        return "differs" if self.follows.problem else "follows"


def results_of(experiment: Experiment, outcomes: Sequence[Outcome], precision: str) -> list[Result]:
    """Return the results of each layout, in the order of the file."""
    of_layout = {name: [o for o in outcomes if o.run.layout == name] for name in experiment.layouts}
    done = {name: [o.curves for o in runs if o.is_done] for name, runs in of_layout.items()}
    reference, results = done[experiment.reference][:1], []
    for name, runs in done.items():
        compared = [follow(ours, expected, precision) for expected in reference for ours in runs]
        worst = max(compared, key=lambda f: (bool(f.problem), f.difference), default=None)
        results.append(Result(name, of_layout[name], [*map(_steady, runs)], worst))
    return results


def warmup_steps(steps: int) -> int:
    """Return the number of first steps that are left out of speeds."""
    return min(_MOST_WARMUP, steps // 5)


def _steady(curves: Mapping[str, Curve]) -> dict[str, float]:
    """Return medians after the warm-up, else of all steps; the last loss and the peak of memory."""
    first, figures = warmup_steps(num_steps(curves)), dict[str, float]()
    for name, curve in curves.items():
        late = curve.values[(curve.steps > first) & np.isfinite(curve.values)]
        values = late if len(late) else curve.finite
        if not len(values):
            continue
        # Without a device, memory is a rank's current use, so the peak is the maximum of all steps.
        is_peak = name.startswith("memory_")
        figures[name] = float(curve.finite.max() if is_peak else np.median(values))
    if math.isfinite(last := curves["loss"].values[-1]):
        figures["loss"] = float(last)
    return figures


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Write one line per layout, with all figures."""
    rows = []
    for result in results:
        followed, tokens = result.follows, result.values(TOKENS)
        row: dict[str, object] = {
            "layout": result.name,
            "state": result.state,
            "runs": len(result.of_runs),
            "largest_loss_difference": followed.difference if followed else "",
            "at_step": followed.at + 1 if followed else "",
            "problem": result.error or (followed.problem if followed else ""),
            TOKENS: median(tokens) if tokens else "",
            f"{TOKENS}_least": min(tokens, default=""),
            f"{TOKENS}_most": max(tokens, default=""),
        }
        rows.append({**row, **result.figures})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
        writer.writeheader()
        writer.writerows(rows)
