"""Forecast the steps of a recipe: their time over the data, idle shares, and who waits for whom."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mimo.config.schema import Recipe
from mimo.errors import InputError
from mimo.model.dataset import Dataset
from mimo.model.indexing import indexed_dataset
from mimo.model.step_plan import StepPlan, step_planner
from mimo.parallel.grids import Layout
from mimo.plan.rates import Rates
from mimo.plan.schedules import BACKWARD
from mimo.plan.simulate import Role, Timeline, run_tasks
from mimo.plan.work import StepWork


@dataclass(frozen=True)
class Step:
    """One simulated step. tail: seconds from its last backward to its end."""

    timeline: Timeline
    tail: float
    tokens: int
    flops: float

    @property
    def seconds(self) -> float:
        return self.timeline.seconds + self.tail


@dataclass(frozen=True)
class Forecast:
    """Simulated steps of one layout. peak: FLOP/s of all ranks together; 0 if unknown."""

    steps: list[Step]
    peak: float

    def percentile(self, percent: float) -> float:
        """Return a percentile of the seconds of a step."""
        return float(np.percentile([step.seconds for step in self.steps], percent))

    @cached_property
    def median_step(self) -> Step:
        return sorted(self.steps, key=lambda step: step.seconds)[len(self.steps) // 2]

    @property
    def tokens_per_second(self) -> float:
        return sum(s.tokens for s in self.steps) / sum(s.seconds for s in self.steps)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs per second as a share of the peak; None if it is unknown."""
        flops = sum(step.flops for step in self.steps) / sum(step.seconds for step in self.steps)
        return flops / self.peak if self.peak else None

    @cached_property
    def idle(self) -> dict[Role, float]:
        """The idle share of each module and stage in the median step."""
        return self.median_step.timeline.idle(self.median_step.tail)

    def idle_of(self, module: str) -> float:
        """Return the idle share of a module: the mean over its stages."""
        return float(np.mean([share for (name, _), share in self.idle.items() if name == module]))

    @cached_property
    def waits(self) -> dict[tuple[Role, Role], float]:
        """Who waits for whom in the median step; see `Timeline.waits`."""
        return self.median_step.timeline.waits()


def forecast(
    recipe: Recipe, layout: Layout, dataset: Dataset, rates: Rates, num_steps: int = 16
) -> Forecast:
    """Simulate the first steps of a recipe. Raises `Deadlock`."""
    work = StepWork(recipe, layout, dataset, rates)
    count = min(num_steps, recipe.train.steps)
    steps = [simulate(work, plan) for plan in plans(recipe, layout, dataset, count)]
    return Forecast(steps, rates.peak * layout.world_size)


def simulate(work: StepWork, plan: StepPlan) -> Step:
    """Simulate a planned step. Raises `Deadlock`."""
    tasks = work.tasks(plan)
    timeline = run_tasks(tasks.workers, tasks.tasks, work.rates.cores)
    passes, count = timeline.busy().items(), len(plan.microbatches)
    backward = {module: seconds / count for (module, kind), seconds in passes if kind == BACKWARD}
    tail = work.tail_seconds(backward)
    return Step(timeline, tail, plan.num_tokens, sum(work.flops.of(plan).values()))


def dataset_of_index(recipe: Recipe, path: Path) -> Dataset:
    """Return the training data. path: of the recipe. Raises InputError unless they are indexed."""
    if (dataset := indexed_dataset(recipe)) is None:
        raise InputError(f"{path}: its data are not indexed; run: mimo data index {path}")
    return dataset


def plans(recipe: Recipe, layout: Layout, dataset: Dataset, count: int) -> Iterator[StepPlan]:
    """Yield the plans of the first ``count`` steps, without bridges."""
    planner = step_planner(recipe, layout, dataset, links=())
    for step in range(count):
        yield planner.finish(planner.microbatches(step))
