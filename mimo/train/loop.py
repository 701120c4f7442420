"""The training loop of one rank: steps, progress, validation, checkpoints, traces, garbage."""

import gc
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from data.decoding import Decoding
from mimo.checkpoint.folder import Progress
from mimo.checkpoint.hf.initial import InitialWeights
from mimo.checkpoint.manifest import naming
from mimo.checkpoint.save import Saver
from mimo.config.schema import LANGUAGE, Recipe, Train
from mimo.device import has_gpu, traced_activities
from mimo.model.build import build_model
from mimo.model.dataset import Dataset, item_processors, open_tokenizer, split_by_source
from mimo.model.decoding import open_decoding
from mimo.model.step_plan import StepFlops
from mimo.parallel.groups import Topology
from mimo.runtime.signals import SAVE_FAILED, EarlyStop
from mimo.spans import SPANS
from mimo.train.anomalies import AnomalyDetector, BadSamples, check_skipped
from mimo.train.batches import STEP, Batches, PreparedBatch
from mimo.train.metrics import StepTimes
from mimo.train.step import StepObserver, run_modules, total_loss, train_step


class Trainer:
    """One rank's training run: build it, then call `train`.

    initial, provided: passed on to `build_model`. early_stop: decides whether to stop after a step.
    """

    def __init__(
        self,
        recipe: Recipe,
        topology: Topology,
        run_dir: Path,
        initial: InitialWeights | None = None,
        provided: Collection[str] = (),
        early_stop: EarlyStop | None = None,
    ) -> None:
        self.recipe, self.topology, self.run_dir = recipe, topology, run_dir
        self.early_stop = early_stop or EarlyStop()
        self.chat = open_tokenizer(recipe)
        self.processors = item_processors(recipe)
        self.model = build_model(recipe, topology, self.chat.vocab_size, initial, provided)
        self.progress = Progress(step=0, samples=0)
        self.saver = Saver(self.model.modules, run_dir / "checkpoints", recipe)
        self.batches = partial(
            Batches, recipe=recipe, topology=topology, model=self.model, early_stop=self.early_stop
        )

    def train(
        self,
        dataset: Dataset,
        validation: Dataset | None,
        observer: StepObserver,
        bad_samples: BadSamples | None = None,
        owes_validation: bool = False,
    ) -> Generator[dict]:
        """Train from ``self.progress``, yielding each step's metrics.

        It ends with the last step, or after one with which all ranks agree on `early_stop`.
        bad_samples: on the one rank that lists them. owes_validation: the run that is
        resumed stopped before the validation of its last step; if one was due, it comes first.
        Raises FloatingPointError as `AnomalyDetector.check` does.
        """
        train, layout = self.recipe.train, self.topology.layout
        rank, reports = self.topology.rank, self.topology.reports
        steps = range(self.progress.step, train.steps)
        readers = (*dataset.readers, *(validation.readers if validation else ()))
        flops = StepFlops(self.recipe, self.chat.vocab_size, dataset) if reports else None
        times = StepTimes(layout, rank)
        anomalies = AnomalyDetector(train, self.run_dir, dataset, reports)
        SPANS.forget(on_device=has_gpu())
        with (
            open_decoding(self.recipe, layout, rank, readers) as decoding,
            self.batches(
                name=STEP,
                dataset=dataset,
                steps=steps,
                used=self.progress.used,
                num_prepared=1,
                decoding=decoding,
                flops=flops,
            ) as batches,
            profiler_of(train, rank, self.run_dir) as profile_step,
        ):
            if validation and owes_validation and _is_due(train.validate_every, steps.start):
                observer.at(steps.start - 1, "validation")
                yield {"step": steps.start, **self.validate(validation, decoding)}
            for step in steps:
                profile_step(step)
                self._count_skipped(step, batches.prepared[0], dataset, bad_samples)
                # The sum in `train_step` tells all ranks; the next save raises the reason.
                self.early_stop.local_reasons = (SAVE_FAILED,) if self.saver.has_failed else ()
                result = train_step(
                    step=step,
                    recipe=self.recipe,
                    model=self.model,
                    batches=batches,
                    observer=observer,
                    times=times,
                    wait_for_copy=self.saver.wait_for_copy,
                )
                done = step + 1
                self.progress = self.progress.after_step(step, batches.used, result.is_skipped)
                metrics = {
                    "step": step,
                    **result.metrics,
                    "skipped_samples": self.progress.skipped_samples,
                    "skipped_steps": self.progress.skipped_steps,
                }
                if reports:
                    metrics["epochs"] = dict(enumerate(dataset.order.epochs(batches.used.end)))
                anomalies.check(step, result)

                # ---- save (always after the last step) and validate, if they are due
                stops = bool(self.early_stop.reasons) and done < train.steps
                saves = done == train.steps or _is_due(train.save_interval, done) or stops
                if saves:
                    self.saver.on_progress = partial(observer.at, step, "checkpoint")
                    self.saver.on_progress()
                    with naming(self.run_dir / "checkpoints"):
                        self.run_dir.stat()  # raises if it is gone; a save would make another
                        metrics["save_seconds"] = self.saver.begin(self.progress)
                yield metrics
                # Skip validation on an early stop; the resumed run does it.
                if validation and _is_due(train.validate_every, done) and not stops:
                    observer.at(step, "validation")
                    yield {"step": done, **self.validate(validation, decoding)}
                if saves:  # after the caller wrote this step's line: no checkpoint is newer
                    self.saver.on_progress()
                    self.saver.publish()
                if stops:
                    break
            self.saver.on_progress()
            self.saver.wait()

    def _count_skipped(
        self, step: int, batch: PreparedBatch, dataset: Dataset, bad_samples: BadSamples | None
    ) -> None:
        """Count and list the samples that a batch skips. Raises as `check_skipped` does."""
        new = batch.unusable.keys() - self.progress.skipped
        self.progress = self.progress.with_skipped(batch.unusable.keys())
        if bad_samples is not None:
            bad_samples.append(step, [batch.unusable[sample] for sample in sorted(new)])
        check_skipped(self.recipe.data, self.progress, batch.used.samples, dataset)

    def validate(self, dataset: Dataset, decoding: Decoding) -> dict[str, float]:
        """Return the mean loss per token, over all sources and of each; all ranks call it.

        Each source is validated on `train.validation_batches` global batches of its own.
        """
        names = (LANGUAGE, *self.recipe.generators)

        def means(sums: np.ndarray) -> dict[str, float]:
            return dict(zip(names, (sums[0] / np.maximum(sums[1], 1.0)).tolist(), strict=True))

        sources = split_by_source(self.recipe, "validation", dataset)
        sums = {n: self._sums(source, decoding, names) for n, source in sources.items()}
        self.model.take_waited_seconds()
        whole = means(np.sum([*sums.values()], axis=0))
        losses = {"validation_loss": total_loss(self.recipe, whole)}
        if self.recipe.generators:
            losses |= {f"validation_loss_{name}": loss for name, loss in whole.items()}
        if len(sums) > 1:
            totals = {n: total_loss(self.recipe, means(part)) for n, part in sums.items()}
            losses |= {f"validation_loss_{n}": loss for n, loss in totals.items()}
        return losses

    def _sums(self, dataset: Dataset, decoding: Decoding, modules: Sequence[str]) -> np.ndarray:
        """Return (2, modules) the sums of losses and the numbers of tokens, or items."""
        steps = range(self.recipe.train.validation_batches)
        sums = np.zeros((2, len(modules)))
        # No batch is prepared ahead: a batch of training is waiting on the device too.
        with self.batches(
            name="validation batch", dataset=dataset, steps=steps, decoding=decoding
        ) as batches:
            for _ in steps:
                batch = batches.next()
                rank_losses = run_modules(self.model, batch, forward_only=True)
                counts = batch.plan.num_losses
                del batch  # its memory, before another batch is copied to the device
                batches.read_ahead()
                losses = batches.sum_over_world(rank_losses)
                sums += [[float(losses[n]) for n in modules], [counts[n] for n in modules]]
        return sums


def _is_due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


# ----------------------------------------------------- a trace of some steps: `train.profile`


@contextmanager
def profiler_of(train: Train, rank: int, run_dir: Path) -> Iterator[Callable[[int], None]]:
    """Trace the steps of `train.profile` on this rank; call the result before each step."""
    if train.profile is None or rank not in train.profile.ranks:
        yield lambda _: None
        return
    first, last = train.profile.steps
    path = run_dir / "profile" / f"rank_{rank}_steps_{first}_to_{last}.json"
    trace = torch.profiler.profile(activities=traced_activities(), acc_events=True)

    def start_step(step: int) -> None:
        if not SPANS.named and first <= step <= last:
            trace.start()
            SPANS.named = True
        elif step > last:
            stop()

    def stop() -> None:
        if SPANS.named:
            SPANS.named = False
            trace.stop()
            path.parent.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(path))

    try:
        yield start_step
    finally:
        stop()


# ------------------------------------------------------------------- garbage collection


def with_synchronized_gc[T](steps: Iterable[T], every: int = 50) -> Iterator[T]:
    """Yield from ``steps``, collecting garbage only after every ``every`` of them.

    By default Python collects when a process has made enough objects: on each rank in another step,
    and each time all the others wait in their next exchange.
    """
    gc.collect()
    gc.disable()
    try:
        for number, step in enumerate(steps, start=1):
            yield step
            if number % every == 0:
                gc.collect()
    finally:
        gc.enable()
