"""What a run reports: the figures of each step in metrics.jsonl, TensorBoard and on the console."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mimo.checkpoint.manifest import naming
from mimo.config.schema import Recipe, Train
from mimo.device import has_gpu, peak_flops
from mimo.model.step_plan import StepPlan
from mimo.parallel.grids import Layout
from mimo.train.loggers import open_loggers
from mimo.train.run_files import METRICS


@dataclass(frozen=True)
class StepResult:
    """The outcome of one training step, over the whole world.

    flops: by module, over all ranks; counted on the rank that reports. loss: summed over the global
    batch. grad_norm: before clipping. rates: learning rate of each module that trains.
    idle_seconds: summed over the ranks of disjoint encoders, which wait for gradients.
    step_seconds: from asking for the batch until the update is queued.
    data_wait_seconds: waiting for batches, or for samples to be read: the mean over the ranks of
    the module where it is largest.
    host_seconds: of this rank, the rest of the step: without its waits for data, for transfers of
    bridges, and for the sum over all ranks, which on a device is also the wait for the device. On a
    device that is the time to launch its work; on a CPU it is the work itself.
    is_skipped: loss or gradient norm are not finite, so no module was updated. grad_norms: of each
    module that trains. update_norms: how much the update before this step changed the weights of
    each, as a norm; None where it was not measured.
    times: of `mimo.train.times`, in logged steps.
    """

    plan: StepPlan
    flops: Mapping[str, float]
    loss: float
    grad_norm: float
    rates: Mapping[str, float]
    idle_seconds: float
    step_seconds: float
    data_wait_seconds: float
    host_seconds: float
    is_skipped: bool
    grad_norms: Mapping[str, float]
    update_norms: Mapping[str, float | None]
    times: Mapping[str, float] = field(default_factory=dict)


def is_logged(train: Train, step: int) -> bool:
    """Whether a step, counted from 0, gets a line on the console."""
    return (step + 1) % train.log_every == 0 or step + 1 == train.steps


def step_metrics(
    done: StepResult, layout: Layout, skipped_samples: int, skipped_steps: int
) -> dict[str, float | None]:
    """The line of a step in metrics.jsonl, without its number.

    skipped_samples, skipped_steps: since the run began.
    mfu is the share of the peak of all ranks of the job together, those of encoders included; None
    if the device's peak is unknown.
    """
    plan, seconds = done.plan, done.step_seconds
    waiting = _ranks_that_wait(layout)
    peak = peak_flops()
    return {
        "loss": done.loss / max(plan.num_loss_tokens, 1),
        "grad_norm": done.grad_norm,
        **{f"grad_norm_{name}": norm for name, norm in done.grad_norms.items()},
        **{f"update_norm_{name}": norm for name, norm in done.update_norms.items()},
        "lr": max(done.rates.values()),
        **{f"lr_{name}": rate for name, rate in done.rates.items()},
        "tokens": plan.num_tokens,
        "loss_tokens": plan.num_loss_tokens,
        "tokens_per_second": plan.num_tokens / seconds,
        "mfu": sum(done.flops.values()) / (seconds * peak * layout.world_size) if peak else None,
        **{f"flops_{name}": count for name, count in done.flops.items()},
        "encoder_idle_fraction": done.idle_seconds / (waiting * seconds) if waiting else None,
        "encoder_imbalance": plan.encoder_imbalance,
        "skipped_samples": skipped_samples,
        "skipped_steps": skipped_steps,
        "step_seconds": seconds,
        "data_wait_seconds": done.data_wait_seconds,
        "host_seconds": done.host_seconds,
        **done.times,
    }


def _ranks_that_wait(layout: Layout) -> int:
    """How many ranks send rows and then wait; on a GPU waiting does not block the host."""
    if has_gpu():
        return 0
    disjoint = [grid for name, grid in layout.encoders.items() if name not in layout.colocated]
    return sum(grid.dp * grid.tp for grid in disjoint)


class MetricsWriter:
    """Writes one JSON object per step; used by the one rank that speaks for the run.

    A resumed run continues the file: lines after the step it resumes from are dropped first.
    lacks_validation: there is then no validation after the last step of the file.
    """

    def __init__(self, recipe: Recipe, run_dir: Path, first_step: int) -> None:
        self._train, self._path = recipe.train, run_dir / METRICS
        self.lacks_validation = _drop_lines_from(self._path, first_step)
        self._file = self._path.open("a", buffering=1)
        self._logged = (first_step, time.monotonic())
        self.console = Console(file=sys.stdout, soft_wrap=True)
        self._loggers = open_loggers(recipe, run_dir, first_step, self.say)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(
            "training", total=recipe.train.steps, completed=first_step, loss="-", rate="-"
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        for file in (self._loggers, self._file):
            with suppress(OSError):  # of a full disk, which ends the run by another write
                file.close()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Record one training step; ``metrics`` is a line of metrics.jsonl."""
        step = int(metrics["step"])
        done, total = step + 1, self._train.steps
        logged = is_logged(self._train, step)
        self._write(metrics, "train", logged)
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            self.say(
                f"step {done}/{total} loss {metrics['loss']:g} grad_norm "
                f"{metrics['grad_norm']:g}: not finite, so no module was updated"
            )
        self._bar.update(
            self._task,
            completed=done,
            loss=f"{metrics['loss']:.4f}",
            rate=f"{metrics['tokens_per_second']:,.0f}",
        )
        if logged:
            epochs = [f"{epoch:.2f}" for epoch in sorted(metrics["epochs"].values())]
            self.say(
                f"step {done}/{total} loss {metrics['loss']:.4f} "
                f"grad_norm {metrics['grad_norm']:.3f} lr {metrics['lr']:.3e} "
                f"tokens/s {metrics['tokens_per_second']:.0f} "
                f"epoch {'-'.join(dict.fromkeys((epochs[0], epochs[-1])))} "  # of all sources
                f"mfu {_share(metrics['mfu'])} idle {_share(metrics.get('idle_fraction'))} "
                f"eta {self._left(done)}"
            )

    def validation(self, metrics: Mapping[str, Any]) -> None:
        """Record a validation; its step is the number of updates before it."""
        self._write(metrics, "validation", True)
        losses = {name.removeprefix("validation_"): metrics[name] for name in metrics}
        told = " ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name != "step")
        self.say(f"validation after step {metrics['step']}: {told}")

    def say(self, line: str) -> None:
        """Print one line above the bar."""
        self.console.print(line, highlight=False, markup=False)

    def _left(self, done: int) -> timedelta:
        """How long the rest takes at the pace since the last line, whatever the time went to."""
        (before, then), self._logged = self._logged, (done, time.monotonic())
        pace = (self._logged[1] - then) / (done - before)
        return timedelta(seconds=round((self._train.steps - done) * pace))

    def _write(self, metrics: Mapping[str, Any], group: str, logged: bool) -> None:
        # JSON has no NaN, and a curve neither.
        numbers: dict[str, Any] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        with naming(self._path):
            self._file.write(json.dumps(numbers) + "\n")
            if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                raise FileNotFoundError(errno.ENOENT, "the run folder was replaced")
        step = int(numbers.pop("step"))
        for source, epoch in numbers.pop("epochs", {}).items():
            numbers[f"epoch_{source}"] = epoch
        found = {f"{group}/{name}": one for name, one in numbers.items() if one is not None}
        self._loggers.write(found, step, logged)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# A whole line: one that was cut off when a run was killed is none.
_LINE = re.compile(rb'\{"step": (\d+), "(validation_loss)?.*\}\n')


def _drop_lines_from(path: Path, first_step: int) -> bool:
    """Keep the lines of earlier steps, without parsing what may be a million of them.

    Returns whether the last one is of the step before.
    """
    if not path.exists():
        return False
    last: re.Match[bytes] | None = None
    partial = path.with_name(f".{path.name}")
    with path.open("rb") as lines, partial.open("wb") as kept:
        for line in lines:
            found = _LINE.fullmatch(line)
            if found and int(found[1]) < first_step + bool(found[2]):
                kept.write(line)
                last = found
    os.replace(partial, path)
    return last is not None and not last[2] and int(last[1]) == first_step - 1
