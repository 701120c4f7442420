"""What an experiment has found, layout by layout: figures over its runs, and who follows whom."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mimo.experiment.compare import Followed, follow
from mimo.experiment.runs import Outcome, Record
from mimo.experiment.schema import Experiment

_MOST_WARMUP = 10  # steps in which memory, caches and the clocks of the machine settle


@dataclass(frozen=True)
class Result:
    """A layout.

    outcomes: of its runs. figures: the median over them of each run's own median over the steps
    after the first, by the name of the metric; tokens: the same of tokens per second by run.
    follows: of its runs that are done, the one that is furthest off; None without a reference.
    """

    name: str
    outcomes: Sequence[Outcome]
    figures: Mapping[str, float]
    tokens: Sequence[float]
    follows: Followed | None

    @property
    def error(self) -> str:
        """Of the first run that failed."""
        return next((one.error for one in self.outcomes if one.error), "")

    @property
    def state(self) -> str:
        """In words; `follows` if all is well."""
        if self.error:
            return "failed"
        if self.follows is None:
            return "cannot be compared"
        return "differs" if self.follows.problem else "follows"


def results_of(experiment: Experiment, outcomes: Sequence[Outcome], precision: str) -> list[Result]:
    """One per layout that has an outcome, in the order of the file."""
    by_layout: dict[str, list[Outcome]] = {}
    for one in outcomes:
        by_layout.setdefault(one.run.layout.name, []).append(one)
    done = {name: [o for o in own if not o.error] for name, own in by_layout.items()}
    reference = next((one.records for one in done.get(experiment.reference, ())), None)
    found = []
    for name in experiment.layouts:
        if name not in by_layout:
            continue
        steady = [_steady(one.records) for one in done[name]]
        names = dict.fromkeys(metric for own in steady for metric in own)
        figures = {one: median(own[one] for own in steady if one in own) for one in names}
        follows = None
        if reference is not None and done[name]:
            compared = [follow(one.records, reference, precision) for one in done[name]]
            follows = max(compared, key=lambda one: (bool(one.problem), one.difference))
        tokens = [own["tokens_per_second"] for own in steady]
        found.append(Result(name, by_layout[name], figures, tokens, follows))
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
    names.pop("tokens_per_second", None)
    head = ("layout", "state", "runs", "largest_loss_difference", "at_step", "problem")
    spread = ("tokens_per_second", "tokens_per_second_least", "tokens_per_second_most")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow((*head, *spread, *names))
        for one in results:
            off, found = one.follows, ("", "", "")
            if one.tokens:
                found = (median(one.tokens), min(one.tokens), max(one.tokens))
            compared = ("", "") if off is None else (off.difference, off.at + 1)
            problem = one.error or (off.problem if off else "")
            row = (one.name, one.state, len(one.tokens), *compared, problem, *found)
            writer.writerow((*row, *(one.figures.get(name, "") for name in names)))
