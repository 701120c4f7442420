"""One training step of one rank; read `train_step` from top to bottom."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
from torch import Tensor
from torch.utils._pytree import register_dataclass

from bridge import BridgeError
from mimo.config.schema import Recipe
from mimo.engines.contract import Module
from mimo.model.modules import MimoModel
from mimo.model.step_plan import StepPlan
from mimo.spans import RANK, SPANS
from mimo.train.batches import Batches, RankBatch
from mimo.train.metrics import Column, StepResult, StepTimes, is_logged, router_metrics
from mimo.train.schedule import learning_rates

# With `bridge.check: first_steps`, plan digests are compared over the bridge in this many steps.
_CHECKED_STEPS = 3
_SHOWN_SAMPLES = 16  # in one error message


class StepObserver:
    """Watches the steps of one rank. The methods do nothing; an observer overrides some of them.

    All ranks call them in the same order, so an observer on every rank may use collectives.
    modules: those of which this rank owns a part, by name.
    """

    def at(self, step: int, activity: str) -> None:
        """Observe that the rank begins one of `mimo.runtime.heartbeat.ACTIVITIES`."""

    def planned(self, step: int, plan: StepPlan) -> None:
        """Observe that the plan of a step is complete; nothing has been computed yet."""

    def gradients_complete(self, step: int, modules: Mapping[str, Module]) -> None:
        """Observe that all gradients are summed and divided, but not yet clipped."""

    def updated(self, step: int, modules: Mapping[str, Module]) -> None:
        """Observe that the step has updated the weights."""


@dataclass(frozen=True)
class StepSums:
    """The content of a step's one collective: the terms of this rank, then their sums.

    losses: by module, summed over tokens or items. squared_norms: of the gradients;
    squared_changes: of the weights in the update before; both by module that trains.
    data_wait_seconds: terms of the mean over each module's ranks. routers: see
    `MimoModel.router_sums`. times: the table of `StepTimes`. Both are empty in steps that are not
    logged.
    """

    losses: Mapping[str, float | Tensor]
    squared_norms: Mapping[str, float | Tensor]
    squared_changes: Mapping[str, float | Tensor]
    data_wait_seconds: Mapping[str, float]
    routers: np.ndarray | Tensor
    times: Mapping[Column, np.ndarray]


register_dataclass(StepSums)


@SPANS.step()
def train_step(
    *,
    step: int,
    recipe: Recipe,
    model: MimoModel,
    batches: Batches,
    observer: StepObserver,
    times: StepTimes,
    wait_for_copy: Callable[[Callable[[], None]], float] = lambda _: 0.0,
) -> StepResult:
    """Train on the next batch; every rank of the world calls it.

    wait_for_copy: called before modules are updated, because a save may still copy them; calls its
        argument on progress. Returns seconds, excluded from the step's time.

    On a device the host runs ahead and waits once, when it reads the norm and the loss. A step
    lasts from asking for its batch until its update is queued; the device still works on the
    update, which counts for the next step.

    A loss or a norm that is not finite, which all ranks see, updates no module. The model is then
    as it was before the step.
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
    num_checked = {"always": math.inf, "first_steps": _CHECKED_STEPS, "never": 0}
    checks = step - batches.steps.start < num_checked[recipe.bridge.check]
    rank_losses = run_modules(model, batch, check=checks)
    del batch  # its memory, before another batch is copied to the device

    # ---- complete the gradients: sum over lanes, divide once by the tokens of the whole batch
    observer.at(step, "gradients")
    model.finish_gradients(plan.num_loss_tokens)
    observer.gradients_complete(step, model.modules)

    # ---- samples of a later step: the sum below carries which of them cannot be read
    observer.at(step, "data of a later step")
    with SPANS.span(RANK, "data"):
        batches.read_ahead()

    # ---- the one sum over all ranks: loss, norms, the last update's change, times
    observer.at(step, "norm and loss")
    train, rates = recipe.train, learning_rates(recipe, step)
    norms: dict[str, Tensor] = {}
    for name, module in model.modules.items():
        with SPANS.span(name, "gradients"):
            norms[name] = module.squared_norm()
    # On a GPU the period that begins here is reported two steps later.
    SPANS.end_period(measures=is_logged(train, step + 2))
    # Of the last update; what this step changes goes into the next sum.
    changes, model.squared_changes = model.squared_changes, {}
    waited, logged = batches.take_waited_seconds(), is_logged(train, step)
    terms = StepSums(
        losses=rank_losses,
        squared_norms={name: norms.get(name, 0.0) for name in rates},
        squared_changes={name: changes.get(name, 0.0) for name in rates},
        data_wait_seconds=times.mean_terms(waited),
        routers=model.router_sums() if logged else np.zeros(0),
        times=times.of_this_rank(model.bridge_bytes(plan)) if logged else {},
    )
    sum_started = time.perf_counter()
    with SPANS.span(RANK, "sync"):
        sums = batches.sum_over_world(terms)
    waited += time.perf_counter() - sum_started + model.take_waited_seconds()
    counts, grad_norms = plan.num_losses, _roots(sums.squared_norms)
    losses = {name: float(sums.losses[name]) / max(n, 1) for name, n in counts.items()}
    loss = total_loss(recipe, losses)
    norm = math.sqrt(sum(sums.squared_norms.values()))

    # ---- update: clip all modules by one factor; each has its own learning rate
    observer.at(step, "update")
    is_skipped = not (math.isfinite(loss) and math.isfinite(norm))
    if not is_skipped:
        started += wait_for_copy(partial(observer.at, step, "update"))  # the save's time
        clip, measured = train.clip_grad_norm, is_logged(train, step + 1)  # see `changes` above
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for name, module in model.modules.items():
            with SPANS.span(name, "update"):
                change = module.update(rates.get(name, 0.0), factor, measured)
                model.squared_changes[name] = change
        observer.updated(step, model.modules)

    # ---- metrics
    seconds = time.perf_counter() - started
    has_changes = logged and step > batches.steps.start
    update_norms = _roots(sums.squared_changes) if has_changes else dict.fromkeys(rates)
    metrics = {
        "loss": loss,
        **(_by_module("loss", losses) if recipe.generators else {}),
        "grad_norm": norm,
        **_by_module("grad_norm", grad_norms),
        **_by_module("update_norm", update_norms),
        "lr": max(rates.values()),
        **_by_module("lr", rates),
        "tokens": plan.num_tokens,
        "loss_tokens": plan.num_loss_tokens,
        "tokens_per_second": plan.num_tokens / seconds,
        "mfu": times.utilization(flops, seconds),
        **_by_module("flops", flops),
        "encoder_imbalance": plan.encoder_imbalance,
        "step_seconds": seconds,
        "data_wait_seconds": max(sums.data_wait_seconds.values()),
        "host_seconds": seconds - waited,
        **router_metrics(cast("np.ndarray", sums.routers), model.router_size),
        **times.figures(sums.times),
    }
    return StepResult(plan, loss, norm, grad_norms, is_skipped, metrics)


def run_modules(
    model: MimoModel, batch: RankBatch, forward_only: bool = False, check: bool = False
) -> dict[str, float | Tensor]:
    """Run forward, and backward, of this rank's modules; returns its parts of the summed losses.

    Every rank of the world calls it. check: compare plans over the bridge first. An error gets a
    note with the batch's name and the samples of its microbatch, or the one at fault.
    """
    # On a device a transfer may time out long after this call, so the model keeps the descriptions
    # until the next batch. They must not hold the batch itself.
    name, sample_keys, microbatches = batch.name, batch.sample_keys, batch.plan.microbatches

    def describe(microbatch: int | None) -> str:
        if microbatch is None:
            return f"in {name}"
        samples, keys = microbatches[microbatch].samples, sample_keys(microbatch, _SHOWN_SAMPLES)
        size = f"{samples.length.sum()} tokens, {samples.item_rows.sum()} rows"
        more = samples.num_samples - len(keys)
        shown = ", ".join(keys) + (f" and {more} more" if more else "")
        return f"in {name}, samples of microbatch {microbatch} ({size}): {shown}"

    def add_note(error: Exception) -> None:
        if not isinstance(error, BridgeError):
            error.add_note(describe(None if model.doing is None else model.doing[1]))
        elif error.microbatch is None or error.sample is None:
            error.add_note(describe(error.microbatch))
        else:
            key = sample_keys(error.microbatch)[error.sample]
            error.add_note(f"in {name}, sample {key} of microbatch {error.microbatch}")

    model.describe_batch = describe
    if model.watch is not None:
        model.watch.tell_where = add_note
    try:
        losses = model.run(batch.plan, batch.inputs, forward_only, check, batch.sample_keys)
    except Exception as error:
        add_note(error)
        raise
    return {name: losses.get(name, 0.0) for name in batch.plan.num_losses}


def total_loss(recipe: Recipe, losses: Mapping[str, float]) -> float:
    """Return the training loss: the text's plus the weighted losses of generators.

    losses: means, per token of the language model and per item of each generator.
    """
    weights = {name: generator.loss_weight for name, generator in recipe.generators.items()}
    return sum(weights.get(name, 1.0) * loss for name, loss in losses.items())


def _by_module[T](name: str, values: Mapping[str, T]) -> dict[str, T]:
    return {f"{name}_{module}": value for module, value in values.items()}


def _roots(squares: Mapping[str, float | Tensor]) -> dict[str, float]:
    return {name: math.sqrt(square) for name, square in squares.items()}
