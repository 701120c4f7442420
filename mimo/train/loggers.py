"""Where metrics go: metrics.jsonl, the console, TensorBoard, Weights & Biases, MLflow.

The last two are the user's own packages. Unless their environment variables say otherwise they
write to the run folder and use no network. A resumed run continues the same run of theirs.
"""

import errno
import json
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mimo.checkpoint.manifest import naming
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from mimo.runtime.run_files import METRICS
from mimo.train.metrics import is_logged

_RUN_IDS = "loggers.json"
"""The file in the run folder with the ids of the run in services, by logger."""
_PACKAGES = ("wandb", "mlflow")  # their names are those of the loggers


@dataclass(frozen=True)
class Logger:
    """Takes the metrics of a run, on the one rank that reports.

    write: takes metrics such as `train/loss` of a step, counted from 0. every_step: whether it
    takes all steps, or only those with a line on the console.
    """

    write: Callable[[Mapping[str, float], int], object]
    close: Callable[[], object]
    every_step: bool = False


def _tensorboard(run_dir: Path, first_step: int) -> Logger:
    from torch.utils.tensorboard import SummaryWriter

    events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def write(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            events.add_scalar(name, value, step)

    return Logger(write, events.close, every_step=True)


def _wandb(recipe: Recipe, run_dir: Path, ids: dict[str, str]) -> Logger:
    """Weights & Biases; it drops the steps that a resumed run repeats, which are the same."""
    run = import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT", "mimo"),
        name=recipe.name,
        id=ids.setdefault("wandb", uuid.uuid4().hex),
        resume="allow",
        dir=str(run_dir),
        config=recipe.model_dump(mode="json"),
        mode=os.environ.get("WANDB_MODE", "offline"),
    )
    return Logger(lambda metrics, step: run.log(dict(metrics), step=step), run.finish)


def _mlflow(recipe: Recipe, run_dir: Path, ids: dict[str, str]) -> Logger:
    mlflow: Any = import_module("mlflow")
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri((run_dir / "mlruns").resolve().as_uri())
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "mimo"))
    run = mlflow.start_run(run_id=ids.get("mlflow"), run_name=recipe.name)
    ids["mlflow"] = run.info.run_id
    mlflow.log_dict(recipe.model_dump(mode="json"), "recipe.json")
    return Logger(
        lambda metrics, step: mlflow.log_metrics(dict(metrics), step=step), mlflow.end_run
    )


class Loggers:
    """The loggers of `train.loggers`; one that fails is dropped with a warning."""

    def __init__(self, recipe: Recipe, run_dir: Path, first_step: int) -> None:
        self._open: dict[str, Logger] = {}
        path = run_dir / _RUN_IDS
        ids: dict[str, str] = {}
        with suppress(FileNotFoundError, ValueError):  # none yet, or it was killed while writing
            ids = json.loads(path.read_text())
        before = dict(ids)
        makers: dict[str, Callable[[], Logger]] = {
            "tensorboard": lambda: _tensorboard(run_dir, first_step),
            "wandb": lambda: _wandb(recipe, run_dir, ids),
            "mlflow": lambda: _mlflow(recipe, run_dir, ids),
        }
        for name in dict.fromkeys(recipe.train.loggers):
            with self._dropped_on_failure(name):
                self._open[name] = makers[name]()
        if ids != before:
            path.write_text(json.dumps(ids))

    def write(self, metrics: Mapping[str, float], step: int, logged: bool) -> None:
        """Write a step's metrics. logged: whether the step has a line on the console."""
        for name, logger in list(self._open.items()):
            if logged or logger.every_step:
                with self._dropped_on_failure(name):
                    logger.write(metrics, step)

    def close(self) -> None:
        for name, logger in list(self._open.items()):
            with self._dropped_on_failure(name):
                logger.close()

    @contextmanager
    def _dropped_on_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a package that we do not know, or of its service
            self._open.pop(name, None)
            print(f"warning: logger {name} is left out from now on: {error}", flush=True)


def check_loggers(recipe: Recipe) -> None:
    """Raise RecipeError for loggers whose packages are not installed."""
    wanted = recipe.train.loggers
    if missing := [name for name in _PACKAGES if name in wanted and find_spec(name) is None]:
        message = f"got {', '.join(missing)}, not installed here; pip install {' '.join(missing)}"
        raise RecipeError(recipe.problem(("train", "loggers"), message))


# --------------------------------------------------------- metrics.jsonl and the console


class MetricsWriter:
    """Writes one JSON object per step; used by the one rank that reports.

    A resumed run continues the file: lines after the step it resumes from are dropped first.
    lacks_validation: whether the last line that is left is of a step, not of a validation.
    """

    def __init__(self, recipe: Recipe, run_dir: Path, first_step: int) -> None:
        self._train, self._path = recipe.train, run_dir / METRICS
        self.lacks_validation = _drop_lines_from(self._path, first_step)
        self._file = self._path.open("a", buffering=1)
        self._logged = (first_step, time.monotonic())
        self._loggers = Loggers(recipe, run_dir, first_step)
        console = Console(file=sys.stdout, soft_wrap=True)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}, {task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        total, none = recipe.train.steps, math.nan
        self._bar.add_task("training", total=total, completed=first_step, loss=none, rate=none)

    def __enter__(self) -> Self:
        self._bar.start()  # what is printed meanwhile appears above it
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        for file in (self._loggers, self._file):
            with suppress(OSError):  # a full disk ends the run by another write
                file.close()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Record one training step; ``metrics`` is a line of metrics.jsonl."""
        step = int(metrics["step"])
        done, total = step + 1, self._train.steps
        logged = is_logged(self._train, step)
        self._write(metrics, "train", logged)
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            print(
                f"step {done}/{total} loss {metrics['loss']:g} grad_norm "
                f"{metrics['grad_norm']:g}: not finite, so no module was updated",
                flush=True,
            )
        rate = metrics["tokens_per_second"]
        self._bar.update(self._bar.task_ids[0], completed=done, loss=metrics["loss"], rate=rate)
        if logged:
            epochs = [f"{epoch:.2f}" for epoch in sorted(metrics["epochs"].values())]
            shares = (metrics["mfu"], metrics.get("idle_fraction"))
            mfu, idle = ("-" if share is None else f"{share:.3f}" for share in shares)
            print(
                f"step {done}/{total} loss {metrics['loss']:.4f} "
                f"grad_norm {metrics['grad_norm']:.3f} lr {metrics['lr']:.3e} "
                f"tokens/s {rate:.0f} "
                f"epoch {'-'.join(dict.fromkeys((epochs[0], epochs[-1])))} "  # of all sources
                f"mfu {mfu} idle {idle} eta {self._time_left(done)}",
                flush=True,
            )

    def validation(self, metrics: Mapping[str, Any]) -> None:
        """Record a validation; its step is the number of updates before it."""
        self._write(metrics, "validation", True)
        losses = {name.removeprefix("validation_"): metrics[name] for name in metrics}
        text = " ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name != "step")
        print(f"validation after step {metrics['step']}: {text}", flush=True)

    def _time_left(self, done: int) -> timedelta:
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
        named = {f"{group}/{name}": n for name, n in numbers.items() if n is not None}
        self._loggers.write(named, step, logged)


# A whole line; a line that was cut off when a run was killed does not match.
_LINE = re.compile(rb'\{"step": (\d+), "(validation_loss)?.*\}\n')


def _drop_lines_from(path: Path, first_step: int) -> bool:
    """Cut the lines from a step on; return whether the last line left is of the step before."""
    if not path.exists():
        return False
    last, end = None, 0
    with path.open("r+b") as file:
        for line in file:
            match = _LINE.fullmatch(line)
            if not match or int(match[1]) >= first_step + bool(match[2]):
                break
            last, end = match, end + len(line)
        file.truncate(end)
    return last is not None and not last[2] and int(last[1]) == first_step - 1
