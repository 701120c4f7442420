"""The training loop of one rank: steps, progress, validation, checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Generator
from pathlib import Path

from data.packing import Used
from mimo.checkpoint.contents import save_checkpoint
from mimo.checkpoint.folder import Progress
from mimo.hf.initial import InitialWeights
from mimo.layout.groups import Topology
from mimo.model.build import build_model
from mimo.model.flops import StepFlops
from mimo.recipe.schema import Recipe
from mimo.step.dataset import Dataset, item_processors, open_tokenizer
from mimo.step.decoding import Decoding, open_decoding
from mimo.train.batches import Batches
from mimo.train.metrics import step_metrics
from mimo.train.observer import StepObserver
from mimo.train.step import run_modules, train_step


class Trainer:
    """One rank's training run. Build it, then call `train`."""

    def __init__(
        self,
        recipe: Recipe,
        topology: Topology,
        run_dir: Path,
        initial: InitialWeights | None = None,
        provided: Collection[str] = (),
    ) -> None:
        """initial, provided: as of `build_model`."""
        self.recipe = recipe
        self.topology = topology
        self.run_dir = run_dir
        self.chat = open_tokenizer(recipe)
        self.processors = item_processors(recipe)
        self.model = build_model(recipe, topology, self.chat.vocab_size, initial, provided)
        self.progress = Progress(step=0, samples=0)

    def train(
        self, dataset: Dataset, validation: Dataset | None, observer: StepObserver
    ) -> Generator[dict]:
        """Train from ``self.progress`` to the last step, yielding each step's metrics."""
        train, layout = self.recipe.train, self.topology.layout
        steps = range(self.progress.step, train.steps)
        flops = StepFlops(self.recipe, self.chat.vocab_size, dataset)
        readers = (*dataset.readers, *(validation.readers if validation else ()))
        with (
            open_decoding(self.recipe, layout, self.topology.rank, readers) as decoding,
            self._batches("step", dataset, steps, self.progress.used, 1, decoding) as batches,
        ):
            for step in steps:
                progress = self.progress.with_skipped(batches.unusable_samples())
                self._check_skipped(progress.skipped_samples)
                result = train_step(step, self.recipe, self.model, batches, observer)
                done = step + 1
                self.progress = progress.after_step(step, batches.used)
                counted = flops.of(result.plan) if self.topology.reports else {}
                yield {
                    "step": step,
                    **step_metrics(result, layout, counted, progress.skipped_samples),
                }
                if validation and train.validate_every and done % train.validate_every == 0:
                    observer.at(step, "validation")
                    yield {"step": done, "validation_loss": self.validate(validation, decoding)}
                if done == train.steps or (train.save_every and done % train.save_every == 0):
                    observer.at(step, "checkpoint")
                    self.save()

    def validate(self, dataset: Dataset, decoding: Decoding) -> float:
        """Mean loss per token over `train.validation_batches` global batches; all ranks call it."""
        steps = range(self.recipe.train.validation_batches)
        total = tokens = 0.0
        # None is prepared ahead of use: a batch of training is waiting on the device too.
        with self._batches("validation batch", dataset, steps, Used(), 0, decoding) as batches:
            for _ in steps:
                batch = batches.next()
                own_part = run_modules(self.model, batch, forward_only=True)
                tokens += batch.plan.num_loss_tokens
                del batch  # its memory, before another batch is copied to the device
                batches.read_ahead()
                (loss,) = batches.sum_over_world(own_part)
                total += loss
        self.model.take_waited_seconds()
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

    def _batches(
        self,
        name: str,
        dataset: Dataset,
        steps: range,
        used: Used,
        num_prepared: int,
        decoding: Decoding,
    ) -> Batches:
        given = (name, self.recipe, self.topology, dataset, steps, used, num_prepared)
        return Batches(*given, self.model, decoding)

    def _check_skipped(self, skipped: int) -> None:
        limit = self.recipe.data.max_skipped_samples
        if skipped > limit:
            raise RuntimeError(
                f"{skipped} samples could not be read, more than data.max_skipped_samples "
                f"{limit}; the log_rank_<r>.txt files name each by shard and key"
            )
