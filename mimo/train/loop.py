"""The training loop, as one rank sees it: read it from top to bottom.

Every rank (see `mimo.train.rank`) plans each step from the data index, reads what it owns, runs its
modules, completes their gradients, and updates its weights with one norm over all modules.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

from mimo.checkpoint.contents import save_checkpoint
from mimo.checkpoint.folder import Progress
from mimo.device import (
    synchronize,
)
from mimo.engines.megatron.parallel import squared_gradient_norm, step_optimizer
from mimo.families.registry import language_settings
from mimo.hf.initial import InitialWeights
from mimo.layout.grids import LANGUAGE, num_microbatches
from mimo.layout.groups import Topology
from mimo.model.build import build_model
from mimo.model.modules import MimoModel
from mimo.recipe.schema import Recipe
from mimo.step.dataset import Dataset, item_processors, open_tokenizer
from mimo.step.loader import LoadedStep, StepLoader, gather_items, pack_language
from mimo.step.plan import StepPlan, StepPlanner
from mimo.train.learning_rate import learning_rate
from mimo.train.metrics import StepResult, step_metrics
from mimo.train.told_where import told_where
from mimo.train.world_sum import sum_over_world

logger = logging.getLogger(__name__)

# Steps in which plan digests are compared over the bridge under `bridge.check: first_steps`.
_CHECKED_STEPS = 3


class Trainer:
    """One rank's training run. Build it, then call `train`."""

    def __init__(
        self,
        recipe: Recipe,
        topology: Topology,
        run_dir: Path,
        initial: InitialWeights | None = None,
        at: Callable[[int, str], None] = lambda step, phase: None,
    ) -> None:
        """at: told the step and one of `presence.PHASES` before each begins."""
        self.recipe = recipe
        self._at = at
        self.topology = topology
        self.run_dir = run_dir
        self.chat = open_tokenizer(recipe)
        self.processors = item_processors(recipe)
        self.model: MimoModel = build_model(recipe, topology, self.chat.vocab_size, initial)
        self.progress = Progress(step=0, samples=0)

    # ------------------------------------------------------------------ data

    def _planner(self, dataset: Dataset, done: tuple[int, int] = (0, 0)) -> StepPlanner:
        return StepPlanner(
            self.topology.layout,
            {name: tuple(one.media_tokens) for name, one in self.recipe.encoders.items()},
            dataset.indexes,
            dataset.order,
            self.recipe.train.micro_batch_size,
            num_microbatches(self.recipe, self.topology.layout),
            delivery=self.recipe.bridge.delivery,
            encode_group=self.model.encode_group,
            done=done,
            packed=self.recipe.data.packing,
            links=self.topology.bridges,
        )

    def _loader(
        self, dataset: Dataset, planner: StepPlanner, first: int, last: int, ahead: int
    ) -> StepLoader:
        return StepLoader(
            planner,
            dataset.readers,
            self.topology.layout,
            self.topology.rank,
            first,
            last,
            ahead,
        )

    def _flags(self, loaded: LoadedStep | None, planner: StepPlanner) -> list[float]:
        """Which samples of a step this rank could not read; 1 counts once per module."""
        flags = [0.0] * planner.samples_per_step
        for sample, error in (loaded.unusable if loaded else {}).items():
            flags[sample] = 1.0
            logger.warning("skipped %s", error)
        return flags

    def _finish_plan(
        self, loaded: LoadedStep, flags: list[float], planner: StepPlanner
    ) -> StepPlan:
        unusable = [sample for sample, flag in enumerate(flags) if flag > 0]
        return planner.finish(loaded.microbatches, unusable)

    # ------------------------------------------------------------- one step

    def _run(
        self,
        loaded: LoadedStep,
        plan: StepPlan,
        dataset: Dataset,
        forward_only: bool = False,
        check: bool = False,
    ) -> float:
        """Forward (and backward) of this rank's modules; returns its part of the summed loss."""
        layout, rank = self.topology.layout, self.topology.rank
        packed, items = [], {}
        if self.topology.owns(LANGUAGE):
            lane = layout.language.coords(rank).dp
            packed = pack_language(loaded, plan, dataset.readers, lane, self.chat.pad_token_id)
        for name, grid in layout.encoders.items():
            if self.topology.owns(name):
                dim = self.processors[self.recipe.encoders[name].media].patch_dim
                items[name] = gather_items(
                    loaded, plan, dataset.readers, name, grid.coords(rank), dim
                )

        def sample_keys(microbatch: int) -> list[str]:
            return dataset.sample_keys(plan.microbatches[microbatch].samples)

        batch = f"{'validation batch' if forward_only else 'step'} {loaded.step}"
        with told_where(self.model.watch, batch, sample_keys):
            return self.model.run(plan, packed, items, forward_only, check, sample_keys)

    def _update(self, step: int, squared_norm: float) -> float:
        """Clip by the norm over all modules and step every optimizer; returns the norm."""
        train = self.recipe.train
        norm = math.sqrt(squared_norm)
        _check_finite(step, "gradient norm", norm)
        clip = train.clip_grad_norm
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for module in self.model.modules.values():
            if module.optimizer is not None:
                rate = self._learning_rate(step, module.learning_rate)
                step_optimizer(module.optimizer, rate, factor)
        return norm

    def _learning_rate(self, step: int, peak: float) -> float:
        train = self.recipe.train
        return learning_rate(
            step, train.steps, peak, train.warmup_steps, train.min_learning_rate_ratio
        )

    def _squared_norm(self) -> float:
        return math.fsum(
            squared_gradient_norm(module.optimizer, module.groups)
            for module in self.model.modules.values()
            if module.optimizer is not None
        )

    # ------------------------------------------------------------ the loop

    def train(self, dataset: Dataset, validation: Dataset | None) -> Generator[dict]:
        """Train from ``self.progress`` to the last step, yielding each step's metrics."""
        train = self.recipe.train
        first = self.progress.step
        planner = self._planner(dataset, (first, self.progress.samples))
        ahead = self.recipe.data.prefetch_steps
        loader = self._loader(dataset, planner, first, train.steps, ahead)
        flops = self._flops_per_token()
        try:
            loaded = loader.next() if first < train.steps else None
            flags = sum_over_world(self._flags(loaded, planner)) if loaded else []
            for step in range(first, train.steps):
                assert loaded is not None
                synchronize()
                started = time.perf_counter()
                plan = self._finish_plan(loaded, flags, planner)
                progress = self.progress.with_skipped(_samples_at(loaded, flags, planner))
                skipped = progress.skipped_samples
                self._check_skipped(skipped)
                self._at(step, "forward and backward")
                loss = self._run(loaded, plan, dataset, check=self._checks(step - first))
                self._at(step, "gradients")
                self.model.finish_gradients(plan.num_loss_tokens)
                self._at(step, "data of the next step")
                loaded = loader.next() if step + 1 < train.steps else None
                idle = sum(s.take_waited_seconds() for s in self.model.senders.values())
                self._at(step, "norm and loss")
                squared_norm, loss, idle, *flags = sum_over_world(
                    [self._squared_norm(), loss, idle, *self._flags(loaded, planner)]
                )
                _check_finite(step, "loss", loss)
                self._at(step, "update")
                norm = self._update(step, squared_norm)
                self.progress = replace(
                    progress, step=step + 1, samples=planner.samples_before(step + 1)
                )
                synchronize()
                seconds = time.perf_counter() - started
                result = StepResult(plan, loss, norm, self._rates(step), idle, seconds, skipped)
                yield {"step": step, **step_metrics(result, self.topology.layout, flops)}
                done = step + 1
                if validation and train.validate_every and done % train.validate_every == 0:
                    self._at(step, "validation")
                    yield {"step": done, "validation_loss": self.validate(validation)}
                if done == train.steps or (train.save_every and done % train.save_every == 0):
                    self._at(step, "checkpoint")
                    self.save()
        finally:
            loader.close()

    def _checks(self, steps_done: int) -> bool:
        check = self.recipe.bridge.check
        return check == "always" or (check == "first_steps" and steps_done < _CHECKED_STEPS)

    def _check_skipped(self, skipped: int) -> None:
        limit = self.recipe.data.max_skipped_samples
        if skipped > limit:
            raise RuntimeError(
                f"{skipped} samples could not be read, more than data.max_skipped_samples "
                f"{limit}; the log_rank_<r>.txt files name each by shard and key"
            )

    def _rates(self, step: int) -> dict[str, float]:
        """The learning rate of every module that trains, whichever rank owns it."""
        parts = {LANGUAGE: self.recipe.language, **self.recipe.encoders}
        peak = self.recipe.train.learning_rate
        return {
            name: self._learning_rate(step, part.learning_rate or peak)
            for name, part in parts.items()
            if part.trains
        }

    def _flops_per_token(self) -> float:
        """Of the language model, forward and backward."""
        settings = language_settings(self.recipe)
        return settings.flops_per_token(settings.padded_vocab_size(self.chat.vocab_size))

    def validate(self, dataset: Dataset) -> float:
        """Mean loss per token over `train.validation_batches` global batches; all ranks call it."""
        planner = self._planner(dataset)
        batches = self.recipe.train.validation_batches
        loader = self._loader(dataset, planner, 0, batches, ahead=0)
        total = tokens = 0.0
        try:
            for _ in range(batches):
                loaded = loader.next()
                flags = sum_over_world(self._flags(loaded, planner))
                plan = self._finish_plan(loaded, flags, planner)
                (loss,) = sum_over_world([self._run(loaded, plan, dataset, forward_only=True)])
                total += loss
                tokens += plan.num_loss_tokens
        finally:
            loader.close()
        for sender in self.model.senders.values():
            sender.take_waited_seconds()
        return total / max(tokens, 1.0)

    def save(self) -> Path:
        """Write a checkpoint; every rank calls it."""
        return save_checkpoint(
            self.model.modules,
            self.progress,
            self.run_dir / "checkpoints",
            self.recipe,
            self.recipe.train.keep_checkpoints,
        )


def _check_finite(step: int, what: str, value: float) -> None:
    if not math.isfinite(value):
        raise FloatingPointError(
            f"step {step}: the {what} is {value}; lower train.learning_rate or look at the samples "
            f"of this step"
        )


def _samples_at(
    loaded: LoadedStep, flags: list[float], planner: StepPlanner
) -> set[tuple[int, int]]:
    """(data source, sample) of the flagged samples of a step."""
    found = set()
    for position in (i for i, flag in enumerate(flags) if flag > 0):
        microbatch, number = divmod(position, planner.samples_per_microbatch)
        samples = loaded.microbatches[microbatch].samples
        found.add((int(samples.source[number]), int(samples.sample[number])))
    return found
