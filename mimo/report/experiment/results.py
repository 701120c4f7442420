"""What an experiment has found, layout by layout: figures over its runs, and who follows whom."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from mimo.report.experiment.compare import Followed, follow
from mimo.report.experiment.runs import Outcome, Record
from mimo.report.experiment.schema import Experiment

TOKENS = "tokens_per_second"
_MOST_WARMUP = 10  # steps in which memory, caches and the clocks of the machine settle


@dataclass(frozen=True)
class Result:
    """A layout.

    outcomes: of its runs. of_runs: by run that is done the medians of its metrics over the steps
    after the first. follows: of these runs, the one that is furthest off; None without a reference.
    """

    name: str
    outcomes: Sequence[Outcome]
    of_runs: Sequence[Mapping[str, float]]
    follows: Followed | None

    def values(self, metric: str) -> list[float]:
        """Of each run that has it."""
        return [own[metric] for own in self.of_runs if metric in own]

    @cached_property
    def figures(self) -> Mapping[str, float]:
        """Of every metric the median over the runs."""
        names = dict.fromkeys(name for own in self.of_runs for name in own)
        return {name: median(self.values(name)) for name in names}

    @property
    def first(self) -> Outcome | None:
        """Of its runs that are done."""
        return next((one for one in self.outcomes if one.is_done), None)

    @property
    def error(self) -> str:
        """Of the first run that failed."""
        return next((one.error for one in self.outcomes if one.error), "")

    @property
    def state(self) -> str:
        """In words; `follows` if all is well."""
        if self.error:
            return "failed"
        if any(one.job for one in self.outcomes):
            return "not done yet"
        if self.follows is None:
            return "cannot be compared"
        return "differs" if self.follows.problem else "follows"


def results_of(experiment: Experiment, outcomes: Sequence[Outcome], precision: str) -> list[Result]:
    """One per layout that has an outcome, in the order of the file."""
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
    """How many steps are left out of figures about speed."""
    return min(_MOST_WARMUP, steps // 5)


def _steady(records: Sequence[Record]) -> dict[str, float]:
    """Medians of a run's metrics after its first steps, of all where later ones have none; the last
    loss, and the peak of the memory.
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
    # Without a device, memory is what a rank has at the moment, so the most of all is the peak.
    peaks = {name: max(own) for name, own in values.items() if name.startswith("memory_")}
    last = records[-1]["loss"]
    return found | peaks | ({} if last is None else {"loss": last})


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """One line per layout, with every figure of any of them."""
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
