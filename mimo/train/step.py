"""One training step of one rank; read `train_step` from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from bridge import BridgeError
from mimo.model.modules import MimoModel
from mimo.recipe.schema import Recipe, Train
from mimo.train.batches import Batches, RankBatch
from mimo.train.metrics import StepResult
from mimo.train.observer import StepObserver

# With `bridge.check: first_steps`, plan digests are compared over the bridge in this many steps.
_CHECKED_STEPS = 3
_SHOWN_SAMPLES = 16  # in one error message


def train_step(
    step: int, recipe: Recipe, model: MimoModel, batches: Batches, observer: StepObserver
) -> StepResult:
    """Train on the next batch; every rank of the world calls it.

    On a device the host is ahead of it, and waits for it once: when it reads the norm and the loss.
    A step lasts from asking for its batch until its update is queued; the device still works on
    the update, which counts for the next step.

    Raises FloatingPointError for a loss or a norm that is not finite.
    """
    started = time.perf_counter()

    # ---- batch: planned, packed and on its way to the device since an earlier step
    observer.at(step, "batch")
    batch = batches.next()
    plan, flops = batch.plan, batch.flops
    observer.planned(step, plan)

    # ---- forward and backward of the modules of this rank
    observer.at(step, "forward and backward")
    own_loss = run_modules(model, batch, check=_checks(recipe, step - batches.steps.start))
    del batch  # its memory, before another batch is copied to the device

    # ---- complete the gradients: sum over lanes, divide once by the tokens of the whole batch
    observer.at(step, "gradients")
    model.finish_gradients(plan.num_loss_tokens)
    observer.gradients_complete(step, model.modules)

    # ---- norm: one over all modules; the loss and a later batch's unusable samples travel along
    observer.at(step, "data of a later step")
    batches.read_ahead()
    idle = sum(sender.end.clock.seconds for sender in model.senders.values())
    observer.at(step, "norm and loss")
    own_part = sum(module.squared_norm() for module in model.modules.values())
    waited = batches.take_waited_seconds()
    asked = time.perf_counter()
    squared_norm, loss, idle, *data_waits = batches.sum_over_world(
        own_part, own_loss, idle, *batches.shares_of_means(waited)
    )
    waited += time.perf_counter() - asked + model.take_waited_seconds()
    norm = math.sqrt(squared_norm)
    _check_finite(step, {"loss": loss, "gradient norm": norm})

    # ---- update: clip all modules by one factor; each learns at its own rate
    observer.at(step, "update")
    factor = _clip_factor(recipe.train, norm)
    for module in model.modules.values():
        module.update(learning_rate(recipe.train, module.learning_rate, step), factor)
    observer.updated(step, model.modules)

    # ---- metrics
    seconds = time.perf_counter() - started
    return StepResult(
        plan,
        flops,
        loss,
        norm,
        _rates(recipe, step),
        idle,
        step_seconds=seconds,
        data_wait_seconds=max(data_waits),
        host_seconds=seconds - waited,
    )


def run_modules(
    model: MimoModel, batch: RankBatch, forward_only: bool = False, check: bool = False
) -> float | Tensor:
    """Forward (and backward) of this rank's modules; returns its part of the summed loss.

    check: compare plans over the bridge first. Every rank of the world calls it.
    """
    with _errors_name(batch, model):
        return model.run(
            batch.plan, batch.language, batch.items, forward_only, check, batch.sample_keys
        )


@contextmanager
def _errors_name(batch: RankBatch, model: MimoModel) -> Iterator[None]:
    """Add the batch's name and the microbatch's samples, as a note, to errors raised inside.

    An error about one sample names only that sample.

    Until the next batch the model can say the same: on a device, transfers started inside may turn
    out to be late long afterwards. So it must not hold the batch itself.
    """
    name, sample_keys, microbatches = batch.name, batch.sample_keys, batch.plan.microbatches
    del batch

    def in_words(microbatch: int | None) -> str:
        if microbatch is None:
            return f"in {name}"
        samples, keys = microbatches[microbatch].samples, sample_keys(microbatch, _SHOWN_SAMPLES)
        size = f"{samples.length.sum()} tokens, {samples.item_rows.sum()} rows"
        more = samples.num_samples - len(keys)
        shown = ", ".join(keys) + (f" and {more} more" if more else "")
        return f"in {name}, samples of microbatch {microbatch} ({size}): {shown}"

    def note(error: Exception) -> None:
        if not isinstance(error, BridgeError):
            error.add_note(in_words(None if model.doing is None else model.doing[1]))
        elif error.microbatch is None or error.sample is None:
            error.add_note(in_words(error.microbatch))
        else:
            key = sample_keys(error.microbatch)[error.sample]
            error.add_note(f"in {name}, sample {key} of microbatch {error.microbatch}")

    model.batch_in_words = in_words
    if model.watch is not None:
        model.watch.tell_where = note
    try:
        yield
    except Exception as error:
        note(error)
        raise


def _checks(recipe: Recipe, steps_done: int) -> bool:
    """Whether this step compares plans. steps_done: since the run began or was resumed."""
    check = recipe.bridge.check
    return check == "always" or (check == "first_steps" and steps_done < _CHECKED_STEPS)


def _clip_factor(train: Train, norm: float) -> float:
    clip = train.clip_grad_norm
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


def _check_finite(step: int, values: Mapping[str, float]) -> None:
    for what, value in values.items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"step {step}: the {what} is {value}; lower train.learning_rate or look at the "
                f"samples of this step"
            )


def learning_rate(train: Train, peak: float, step: int) -> float:
    """The learning rate of ``step``, which counts from 0.

    It rises linearly to ``peak``, then falls along half a cosine to a fraction of it.
    peak: the module's learning rate.
    """
    if step < train.warmup_steps:
        return peak * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    lowest = train.min_learning_rate_ratio
    return peak * (lowest + (1 - lowest) * cosine)


def _rates(recipe: Recipe, step: int) -> dict[str, float]:
    """The learning rate of every module that trains, whichever rank owns it."""
    train = recipe.train
    return {
        name: learning_rate(train, part.learning_rate or train.learning_rate, step)
        for name, part in recipe.modules.items()
        if part.trains
    }
