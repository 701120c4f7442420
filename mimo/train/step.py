"""One training step of one rank; read `train_step` from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from bridge import BridgeError
from mimo.config.schema import Recipe, Train
from mimo.model.modules import MimoModel
from mimo.spans import RANK, SPANS
from mimo.train.batches import Batches, RankBatch
from mimo.train.metrics import StepResult, is_logged
from mimo.train.observer import StepObserver
from mimo.train.schedule import learning_rate, learning_rates
from mimo.train.times import StepTimes

# With `bridge.check: first_steps`, plan digests are compared over the bridge in this many steps.
_CHECKED_STEPS = 3
_SHOWN_SAMPLES = 16  # in one error message


@SPANS.step()
def train_step(
    step: int,
    recipe: Recipe,
    model: MimoModel,
    batches: Batches,
    observer: StepObserver,
    times: StepTimes,
    wait_for_copy: Callable[[Callable[[], None]], float] = lambda _: 0.0,
) -> StepResult:
    """Train on the next batch; every rank of the world calls it.

    wait_for_copy: called before modules are updated, of which a copy may be on its way, with what
        it is to call while that gets on; returns the seconds, which are none of the step's.

    On a device the host is ahead of it, and waits for it once: when it reads the norm and the loss.
    A step lasts from asking for its batch until its update is queued; the device still works on
    the update, which counts for the next step.

    A loss or a norm that is not finite, which all ranks see, updates no module: what is left is as
    if the step had not been.
    """
    started = time.perf_counter()

    # ---- batch: planned, packed and on its way to the device since an earlier step
    observer.at(step, "batch")
    with SPANS.span(RANK, "data"):
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

    # ---- norms: the loss, the last update's change, unusable samples of a later batch go along
    observer.at(step, "data of a later step")
    with SPANS.span(RANK, "data"):
        batches.read_ahead()
    idle = sum(sender.end.clock.seconds for sender in model.senders.values())
    observer.at(step, "norm and loss")
    train, rates = recipe.train, learning_rates(recipe, step)
    own_norms: dict[str, Tensor] = {}
    for name, module in model.modules.items():
        with SPANS.span(name, "gradients"):
            own_norms[name] = module.squared_norm()
    SPANS.end_period(measures=is_logged(train, step + 2))
    own_times = []
    if is_logged(train, step):
        own_times = times.of_this_rank(model.bridge_bytes(plan))
    own_changes, model.squared_changes = model.squared_changes, {}
    squares = [own.get(name, 0.0) for own in (own_norms, own_changes) for name in rates]
    waited = batches.take_waited_seconds()
    waits = batches.shares_of_means(waited)
    asked = time.perf_counter()
    with SPANS.span(RANK, "sync"):
        loss, idle, *sums = batches.sum_over_world(own_loss, idle, *squares, *waits, *own_times)
    waited += time.perf_counter() - asked + model.take_waited_seconds()
    n = len(rates)
    squared_norms, squared_changes, sums = sums[:n], sums[n : 2 * n], sums[2 * n :]
    norm = math.sqrt(sum(squared_norms))

    # ---- update: clip all modules by one factor; each learns at its own rate
    observer.at(step, "update")
    is_skipped = not (math.isfinite(loss) and math.isfinite(norm))
    if not is_skipped:
        # Its seconds are those of the save, not of the step.
        started += wait_for_copy(partial(observer.at, step, "update"))
        factor, measured = _clip_factor(train, norm), is_logged(train, step + 1)
        for name, module in model.modules.items():
            rate = learning_rate(train, module.learning_rate, recipe.warmup_steps(name), step)
            with SPANS.span(name, "update"):
                model.squared_changes[name] = module.update(rate, factor, measured)
        observer.updated(step, model.modules)

    # ---- metrics
    seconds = time.perf_counter() - started
    has_changes = step > batches.steps.start and is_logged(train, step)
    return StepResult(
        plan,
        flops,
        loss,
        norm,
        rates,
        idle,
        step_seconds=seconds,
        data_wait_seconds=max(sums[: len(waits)]),
        host_seconds=seconds - waited,
        is_skipped=is_skipped,
        grad_norms=_roots(rates, squared_norms),
        update_norms=_roots(rates, squared_changes) if has_changes else dict.fromkeys(rates),
        times=times.figures(sums[len(waits) :]),
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


def _roots(names: Iterable[str], squares: Iterable[float]) -> dict[str, float]:
    return {name: math.sqrt(square) for name, square in zip(names, squares, strict=True)}
