"""Our training loop on the samples of `mimo bench train`: steps, their sections, a profile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from mimo.bench.contest import timed
from mimo.bench.train_workload import OURS, Lengths, Workload, lengths_of
from mimo.device import initialize_distributed, set_threads
from mimo.hf.initial import initial_weights
from mimo.layout.build import build_layout
from mimo.layout.groups import build_topology
from mimo.recipe.schema import Recipe
from mimo.step.dataset import open_dataset
from mimo.step.plan import StepPlan
from mimo.train.loop import Trainer
from mimo.train.observer import StepObserver

_SLOWEST = 10  # operators
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
        if what == "profile":
            return contestants["packed"].profile()
        return timed(contestants[what].step, until_idle=True)

    return answer


class Sections(StepObserver):
    """How long the loop stays in each activity. seconds: by activity, of each step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.counts: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._activity, self._since = "metrics", time.perf_counter()

    def at(self, step: int, activity: str) -> None:
        """Note how long the last activity took."""
        now = time.perf_counter()
        self.seconds.setdefault(self._activity, []).append(now - self._since)
        self._activity, self._since = activity, now

    def planned(self, step: int, plan: StepPlan) -> None:
        """Count the tokens."""
        computed = sum(int(m.samples.lane_tokens.sum()) for m in plan.microbatches)
        batches = len(plan.microbatches)
        self.counts = {"tokens": plan.num_tokens, "computed": computed, "batches": batches}


class OurSteps:
    """`mimo train` on one rank, step by step, in a world of one that exists."""

    def __init__(self, recipe: Recipe) -> None:
        topology = build_topology(build_layout(recipe))
        trainer = Trainer(recipe, topology, Path(recipe.train.run_dir), initial_weights(recipe))
        dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
        assert dataset is not None, "the recipe has a source"
        self.sections = Sections()
        self._steps = trainer.train(dataset, None, self.sections)

    def step(self) -> dict[str, float]:
        """One step: the loss per loss token, and what was counted."""
        self.sections.begin()
        metrics = next(self._steps)
        self.sections.at(metrics["step"], "metrics")
        return {"loss": metrics["loss"], **self.sections.counts}

    def profile(self) -> dict[str, Any]:
        """One more step, under PyTorch's profiler, which itself costs time outside operators.

        sections: seconds by activity, medians of the steps before but the first. operators: share
        of the time in PyTorch's operators. slowest: (name, share, calls) of the ten slowest.
        """
        sections = {
            name: statistics.median(own[1:] or own) for name, own in self.sections.seconds.items()
        }
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            started = time.perf_counter()
            self.step()
            seconds = time.perf_counter() - started
        found = [
            (event.key, event.self_cpu_time_total / 1e6 / seconds, event.count)
            for event in profile.key_averages()
            if event.key.startswith("aten::")
        ]
        found.sort(key=lambda one: -one[1])
        operators = sum(share for _, share, _ in found)
        return {"sections": sections, "operators": operators, "slowest": found[:_SLOWEST]}
