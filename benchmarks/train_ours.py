"""Our training loop on the samples of `python -m benchmarks.train`: steps, and a profile of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore

from benchmarks.harness import timed
from benchmarks.train_workload import OURS, Lengths, Workload, lengths_of
from mimo.checkpoint.hf.initial import initial_weights
from mimo.config.schema import Recipe
from mimo.device import initialize_distributed, set_threads
from mimo.model.dataset import open_dataset
from mimo.model.step_plan import StepPlan
from mimo.parallel.build import build_layout
from mimo.parallel.groups import build_topology
from mimo.train.loop import Trainer
from mimo.train.step import StepObserver

_TIMEOUT_SECONDS = 1800.0


def our_side(
    workload: Workload, steps: int, threads: int, mean_tokens: Mapping[Lengths, float]
) -> Callable[[str], Any]:
    """For a process of its own: a function that lets a contestant do a step, or the profile."""
    set_threads(threads, 1)
    initialize_distributed(0, 1, HashStore(), _TIMEOUT_SECONDS)
    contestants = {}
    for name in OURS:
        lengths = lengths_of(name)
        contestants[name] = OurSteps(workload.recipe(lengths, steps, mean_tokens[lengths], threads))

    def answer(what: str) -> Any:
        return timed(contestants[what].step, until_idle=True)

    return answer


class Counts(StepObserver):
    """What the plan of the last step says."""

    def planned(self, step: int, plan: StepPlan) -> None:
        """Count tokens, with and without padding."""
        computed = sum(int(m.samples.lane_tokens.sum()) for m in plan.microbatches)
        batches = len(plan.microbatches)
        self.found = {"tokens": plan.num_tokens, "computed": computed, "batches": batches}


class OurSteps:
    """`mimo train` on one rank, step by step, in a world of one that exists."""

    def __init__(self, recipe: Recipe) -> None:
        topology = build_topology(build_layout(recipe))
        trainer = Trainer(recipe, topology, Path(recipe.train.run_dir), initial_weights(recipe))
        dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
        assert dataset is not None, "the recipe has a source"
        self.counts = Counts()
        self._steps = trainer.train(dataset, None, self.counts)

    def step(self) -> dict[str, float]:
        """One step: the loss per loss token, the wait for data, and what was counted."""
        metrics = next(self._steps)
        own: dict[str, float] = {name: metrics[name] for name in ("loss", "data_wait_seconds")}
        return {**own, **self.counts.found}
