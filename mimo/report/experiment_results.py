"""The results of an experiment: metrics of each layout, and who follows the reference."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from mimo.report.experiment_file import Experiment, Followed, follow
from mimo.report.experiment_runs import Outcome, Record

TOKENS = "tokens_per_second"
_MOST_WARMUP = 10  # steps in which memory, caches and the clocks of the machine settle


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
    def first(self) -> Outcome | None:
        """The first complete run."""
        return next((one for one in self.outcomes if one.is_done), None)

    @property
    def error(self) -> str:
        """The error of the first run that failed."""
        return next((one.error for one in self.outcomes if one.error), "")

    @property
    def state(self) -> str:
        """The state in words; `follows` if the layout follows the reference."""
        if self.error:
            return "failed"
        if any(one.job for one in self.outcomes):
            return "not done yet"
        if self.follows is None:
            return "cannot be compared"
        return "differs" if self.follows.problem else "follows"


def results_of(experiment: Experiment, outcomes: Sequence[Outcome], precision: str) -> list[Result]:
    """Return the results of each layout that has an outcome, in the order of the file."""
    by_layout: dict[str, list[Outcome]] = {}
    for one in outcomes:
        by_layout.setdefault(one.run.layout.name, []).append(one)
    done = {name: [o for o in own if o.is_done] for name, own in by_layout.items()}
    reference = next((one.records for one in done.get(experiment.reference, ())), None)
    found = []
    for name in experiment.layouts:
        if name not in by_layout:
            continue
        follows = None
        if reference is not None and done[name]:
            compared = [follow(one.records, reference, precision) for one in done[name]]
            follows = max(compared, key=lambda one: (bool(one.problem), one.difference))
        steady = [_steady(one.records) for one in done[name]]
        found.append(Result(name, by_layout[name], steady, follows))
    return found


def warmup_steps(steps: int) -> int:
    """Return the number of first steps that are left out of speeds."""
    return min(_MOST_WARMUP, steps // 5)


def _steady(records: Sequence[Record]) -> dict[str, float]:
    """Return medians of metrics without the first steps, the last loss and the peak of memory.

    Metrics without later values have the median of all steps.
    """
    values: dict[str, list[float]] = {}
    late: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(name, []).append(value)
                if record["step"] >= warmup_steps(len(records)):
                    late.setdefault(name, []).append(value)
    found = {name: median(late.get(name, own)) for name, own in values.items() if name != "step"}
    # Without a device, memory is a rank's current use, so the peak is the maximum of all steps.
    peaks = {name: max(own) for name, own in values.items() if name.startswith("memory_")}
    last = records[-1]["loss"]
    return found | peaks | ({} if last is None else {"loss": last})


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Write one line per layout, with all figures."""
    names = dict.fromkeys(name for one in results for name in one.figures)
    names.pop(TOKENS, None)
    head = ("layout", "state", "runs", "largest_loss_difference", "at_step", "problem")
    spread = (TOKENS, f"{TOKENS}_least", f"{TOKENS}_most")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow((*head, *spread, *names))
        for one in results:
            off, found, tokens = one.follows, ("", "", ""), one.values(TOKENS)
            if tokens:
                found = (median(tokens), min(tokens), max(tokens))
            compared = ("", "") if off is None else (off.difference, off.at + 1)
            problem = one.error or (off.problem if off else "")
            row = (one.name, one.state, len(one.of_runs), *compared, problem, *found)
            writer.writerow((*row, *(one.figures.get(name, "") for name in names)))
