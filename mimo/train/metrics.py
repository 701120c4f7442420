"""What a run reports: the figures of each step in metrics.jsonl, TensorBoard and on the console."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mimo.device import has_gpu, peak_flops
from mimo.layout.grids import Layout
from mimo.step.plan import StepPlan
from mimo.train.run_folder import naming


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


def step_metrics(done: StepResult, layout: Layout, skipped_samples: int) -> dict[str, float | None]:
    """The line of a step in metrics.jsonl, without its number.

    skipped_samples: since the run began.
    mfu is the share of the peak of all ranks of the job together, those of encoders included; None
    if the device's peak is unknown.
    """
    plan, seconds = done.plan, done.step_seconds
    waiting = _ranks_that_wait(layout)
    peak = peak_flops()
    return {
        "loss": done.loss / max(plan.num_loss_tokens, 1),
        "grad_norm": done.grad_norm,
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
        "step_seconds": seconds,
        "data_wait_seconds": done.data_wait_seconds,
        "host_seconds": done.host_seconds,
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
    """

    def __init__(self, run_dir: Path, total_steps: int, first_step: int, log_every: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.log_every = log_every
        self.total_steps = total_steps
        self._path = run_dir / "metrics.jsonl"
        _drop_lines_from(self._path, first_step)
        self._file = self._path.open("a", buffering=1)
        self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)
        self.console = Console(file=sys.stdout, soft_wrap=True)
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
            "training", total=total_steps, completed=first_step, loss="-", rate="-"
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        for file in (self._events, self._file):
            with suppress(OSError):  # of a full disk, which ends the run by another write
                file.close()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Record one training step; ``metrics`` is a line of metrics.jsonl."""
        self._write(metrics, "train")
        step = int(metrics["step"] or 0)
        done = step + 1
        self._bar.update(
            self._task,
            completed=done,
            loss=f"{metrics['loss']:.4f}",
            rate=f"{metrics['tokens_per_second']:,.0f}",
        )
        if done % self.log_every == 0 or done == self.total_steps:
            epochs = [f"{epoch:.2f}" for epoch in sorted(metrics["epochs"].values())]
            self.say(
                f"step {done}/{self.total_steps} loss {metrics['loss']:.4f} "
                f"grad_norm {metrics['grad_norm']:.3f} lr {metrics['lr']:.3e} "
                f"tokens/s {metrics['tokens_per_second']:.0f} "
                f"epoch {'-'.join(dict.fromkeys((epochs[0], epochs[-1])))}"  # of all sources
            )

    def validation(self, step: int, loss: float) -> None:
        """Record a validation after ``step`` updates."""
        self._write({"step": step, "validation_loss": loss}, "validation")
        self.say(f"validation after step {step}: loss {loss:.4f}")

    def say(self, line: str) -> None:
        """Print one line above the bar."""
        self.console.print(line, highlight=False, markup=False)

    def _write(self, metrics: Mapping[str, Any], group: str) -> None:
        with naming(self._path):
            self._file.write(json.dumps(dict(metrics)) + "\n")
            if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                raise FileNotFoundError(errno.ENOENT, "the run folder was replaced")
        numbers = dict(metrics)
        for source, epoch in numbers.pop("epochs", {}).items():
            numbers[f"epoch_{source}"] = epoch
        for name, value in numbers.items():
            if name != "step" and value is not None:
                self._events.add_scalar(f"{group}/{name}", value, int(metrics["step"] or 0))


def _drop_lines_from(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed while writing
        limit = first_step + (1 if "validation_loss" in record else 0)
        if record["step"] < limit:
            kept.append(line + "\n")
    path.write_text("".join(kept))
