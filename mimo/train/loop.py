"""The training loop of one rank: steps, progress, validation, checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Generator
from functools import partial
from pathlib import Path

from data.packing import Used
from mimo.checkpoint.folder import Progress
from mimo.checkpoint.hf.initial import InitialWeights
from mimo.checkpoint.manifest import naming
from mimo.checkpoint.save import Saver
from mimo.config.schema import Recipe
from mimo.device import has_gpu
from mimo.model.build import build_model
from mimo.model.dataset import Dataset, apart, item_processors, open_tokenizer
from mimo.model.decoding import Decoding, open_decoding
from mimo.model.flops import StepFlops
from mimo.parallel.groups import Topology
from mimo.runtime.ending import SAVE_FAILED, Ending
from mimo.spans import SPANS
from mimo.train.bad_samples import BadSamples, check_skipped
from mimo.train.batches import STEP, Batches
from mimo.train.metrics import step_metrics
from mimo.train.observer import StepObserver
from mimo.train.odd_steps import OddSteps
from mimo.train.profile import profiler_of
from mimo.train.step import run_modules, train_step
from mimo.train.times import StepTimes


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
        self.saver = Saver(self.model.modules, run_dir / "checkpoints", recipe)
        self.ending = Ending()

    def train(
        self,
        dataset: Dataset,
        validation: Dataset | None,
        observer: StepObserver,
        bad_samples: BadSamples | None = None,
        owes_validation: bool = False,
    ) -> Generator[dict]:
        """Train from ``self.progress``, yielding each step's metrics.

        It ends with the last step, or after one with which all ranks agree on ``self.ending``.
        bad_samples: on the one rank that lists them. owes_validation: the run ended between the
        last step and the validation after it, if one is due there.
        Raises FloatingPointError as `OddSteps.look_at` does.
        """
        train, layout = self.recipe.train, self.topology.layout
        steps = range(self.progress.step, train.steps)
        flops = StepFlops(self.recipe, self.chat.vocab_size, dataset)
        readers = (*dataset.readers, *(validation.readers if validation else ()))
        times = StepTimes(layout, self.topology.rank)
        SPANS.forget(on_device=has_gpu())
        used, counts = self.progress.used, flops if self.topology.reports else None
        odd_steps = OddSteps(train, self.run_dir, dataset, self.topology.reports)
        with (
            open_decoding(self.recipe, layout, self.topology.rank, readers) as decoding,
            self.batches(STEP, dataset, steps, used, 1, decoding, counts) as batches,
            profiler_of(train, self.topology.rank, self.run_dir) as profiler,
        ):
            if validation and owes_validation and _is_due(train.validate_every, steps.start):
                observer.at(steps.start - 1, "validation")
                yield {"step": steps.start, **self.validate(validation, decoding)}
            for step in steps:
                profiler.reaches(step)
                unusable = batches.unusable_samples()
                progress = self.progress.with_skipped(unusable.keys())
                if bad_samples is not None:
                    new = unusable.keys() - self.progress.skipped
                    bad_samples.found(step, [unusable[one] for one in sorted(new)])
                check_skipped(self.recipe.data, progress, batches.coming_used.samples, dataset)
                # All ranks hear of it with this step, and the save that then begins raises why.
                self.ending.own = (SAVE_FAILED,) if self.saver.has_failed else ()
                given = self.recipe, self.model, batches, observer, times
                result = train_step(step, *given, self.saver.wait_for_copy)
                done = step + 1
                self.progress = progress.after_step(step, batches.used, result.is_skipped)
                skipped = self.progress.skipped_samples, self.progress.skipped_steps
                metrics = {"step": step, **step_metrics(result, layout, *skipped)}
                if self.topology.reports:
                    metrics["epochs"] = dict(enumerate(dataset.order.epochs(batches.used.end)))
                odd_steps.look_at(step, result)
                # The last step is done as ever: nobody would go on to make up for what it lacks.
                soon = bool(self.ending.reasons) and done < train.steps
                saves = done == train.steps or _is_due(train.save_interval, done) or soon
                if saves:
                    self.saver.on_progress = partial(observer.at, step, "checkpoint")
                    self.saver.on_progress()
                    with naming(self.run_dir / "checkpoints"):
                        self.run_dir.stat()  # raises if it is gone; a save would make another
                        metrics["save_seconds"] = self.saver.begin(self.progress)
                yield metrics
                # Who asks to end soon may not wait for long: the run that goes on validates first.
                if validation and _is_due(train.validate_every, done) and not soon:
                    observer.at(step, "validation")
                    yield {"step": done, **self.validate(validation, decoding)}
                if saves:  # only now, so that no line of a step before a checkpoint is missing
                    self.saver.on_progress()
                    self.saver.publish()
                if soon:
                    break
            self.saver.on_progress()
            self.saver.wait()

    def validate(self, dataset: Dataset, decoding: Decoding) -> dict[str, float]:
        """Mean loss per token: of several sources, over all and of each; all ranks call it.

        Each source is validated on `train.validation_batches` global batches of its own.
        """
        sources = apart(self.recipe, "validation", dataset)
        sums = {n: self._loss_and_tokens(one, decoding) for n, one in sources.items()}
        self.model.take_waited_seconds()
        total, tokens = map(sum, zip(*sums.values(), strict=True))
        found = {"validation_loss": total / max(tokens, 1.0)}
        if len(sums) > 1:
            found |= {f"validation_loss_{n}": a / max(b, 1.0) for n, (a, b) in sums.items()}
        return found

    def _loss_and_tokens(self, dataset: Dataset, decoding: Decoding) -> tuple[float, float]:
        steps = range(self.recipe.train.validation_batches)
        total = tokens = 0.0
        # None is prepared ahead of use: a batch of training is waiting on the device too.
        with self.batches("validation batch", dataset, steps, Used(), 0, decoding) as batches:
            for _ in steps:
                batch = batches.next()
                own_part = run_modules(self.model, batch, forward_only=True)
                tokens += batch.plan.num_loss_tokens
                del batch  # its memory, before another batch is copied to the device
                batches.read_ahead()
                (loss,) = batches.sum_over_world(own_part)
                total += loss
        return total, tokens

    def batches(
        self,
        name: str,
        data: Dataset,
        steps: range,
        used: Used,
        num_prepared: int,
        decoding: Decoding,
        counts: StepFlops | None = None,
    ) -> Batches:
        """Batches for this rank's model; all as of `Batches`."""
        given = (name, self.recipe, self.topology, data, steps, used, num_prepared)
        return Batches(*given, self.model, decoding, self.ending, counts)


def _is_due(every: int | None, done: int) -> bool:
    """Whether something that is done ``every`` so many steps follows after ``done`` of them."""
    return every is not None and done % every == 0
