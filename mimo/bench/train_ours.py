"""Our training loop on the samples of `mimo bench train`: steps, their sections, a profile."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from mimo.bench.train_result import Overhead
from mimo.hf.initial import initial_weights
from mimo.layout.build import build_layout
from mimo.layout.groups import build_topology
from mimo.recipe.schema import Recipe
from mimo.step.dataset import open_dataset
from mimo.step.plan import StepPlan
from mimo.train.loop import Trainer
from mimo.train.observer import StepObserver

_SLOWEST = 10  # operators


class Sections(StepObserver):
    """How long the loop stays in each activity. seconds: by activity, of each step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.computed = self.tokens = self.batches = 0
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
        self.batches = len(plan.microbatches)
        self.tokens = plan.num_tokens
        self.computed = sum(int(m.samples.lane_tokens.sum()) for m in plan.microbatches)

    def medians(self) -> dict[str, float]:
        """Seconds by activity, over the steps after the first."""
        return {name: statistics.median(own[1:] or own) for name, own in self.seconds.items()}


class OurSteps:
    """`mimo train` on one rank, step by step, in a world of one that exists."""

    def __init__(self, recipe: Recipe) -> None:
        topology = build_topology(build_layout(recipe))
        run_dir = Path(recipe.train.run_dir)
        trainer = Trainer(recipe, topology, run_dir, initial_weights(recipe))
        dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
        assert dataset is not None, "the recipe has a source"
        self.sections = Sections()
        self._steps = trainer.train(dataset, None, self.sections)

    def step(self) -> float:
        """One step; returns the loss per loss token."""
        self.sections.begin()
        metrics = next(self._steps)
        self.sections.at(metrics["step"], "metrics")
        return metrics["loss"]

    def profile(self) -> Overhead:
        """One more step, under PyTorch's profiler, which itself costs time outside operators."""
        sections = self.sections.medians()
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
        return Overhead(
            seconds=seconds,
            sections=sections,
            operators=sum(share for _, share, _ in found),
            calls=sum(count for *_, count in found),
            slowest=found[:_SLOWEST],
        )
