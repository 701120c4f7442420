"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

The last two are the user's own packages. Unless their environment variables say otherwise they
write to the run folder and use no network. A resumed run continues the same run of theirs.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mimo.config.schema import Recipe
from mimo.errors import RecipeError

RUN_IDS = "loggers.json"
"""The file in the run folder with the ids of the run in services, by logger."""
_PACKAGES = ("wandb", "mlflow")  # their names are those of the loggers


class Logger(Protocol):
    """Takes the metrics of a run, on the one rank that speaks for it.

    every_step: whether it wants all steps, or only those with a line on the console.
    """

    every_step: bool

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics such as `train/loss` after a step, counted from 0."""
        ...

    def close(self) -> None:
        """No more follow."""
        ...


class _TensorBoard:
    every_step = True

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()


class _Wandb:
    """Steps that a resumed run repeats are the same, and it drops those that it has."""

    every_step = False

    def __init__(self, recipe: Recipe, run_dir: Path, ids: dict[str, str]) -> None:
        self._run = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "mimo"),
            name=recipe.name,
            id=ids.setdefault("wandb", uuid.uuid4().hex),
            resume="allow",
            dir=str(run_dir),
            config=recipe.model_dump(mode="json"),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    every_step = False

    def __init__(self, recipe: Recipe, run_dir: Path, ids: dict[str, str]) -> None:
        self._mlflow: Any = import_module("mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            self._mlflow.set_tracking_uri((run_dir / "mlruns").resolve().as_uri())
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "mimo"))
        run = self._mlflow.start_run(run_id=ids.get("mlflow"), run_name=recipe.name)
        ids["mlflow"] = run.info.run_id
        self._mlflow.log_dict(recipe.model_dump(mode="json"), "recipe.json")

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Loggers:
    """All loggers of a run. One that fails is left out from then on: training goes on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: dict[str, Logger] = {}

    def add(self, name: str, make: Callable[[], Logger]) -> None:
        """Open one more."""

        def open_it() -> None:
            self._open[name] = make()

        self._try(name, open_it)

    def write(self, metrics: Mapping[str, float], step: int, logged: bool) -> None:
        """logged: whether the step has a line on the console."""
        for name, one in list(self._open.items()):
            if logged or one.every_step:
                self._try(name, lambda one=one: one.write(metrics, step))

    def close(self) -> None:
        """No more metrics follow."""
        for name, one in list(self._open.items()):
            self._try(name, one.close)

    def _try(self, name: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # of a package that we do not know, or of its service
            self._open.pop(name, None)
            self._say(f"warning: logger {name} is left out from now on: {error}")


def open_loggers(
    recipe: Recipe, run_dir: Path, first_step: int, say: Callable[[str], None]
) -> Loggers:
    """Those of `train.loggers`; one process calls it. say: takes a warning."""
    path, opened = run_dir / RUN_IDS, Loggers(say)
    ids = _ids_in(path)
    before = dict(ids)
    makers: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: _TensorBoard(run_dir, first_step),
        "wandb": lambda: _Wandb(recipe, run_dir, ids),
        "mlflow": lambda: _Mlflow(recipe, run_dir, ids),
    }
    for name in dict.fromkeys(recipe.train.loggers):
        opened.add(name, makers[name])
    if ids != before:
        path.write_text(json.dumps(ids))
    return opened


def _ids_in(path: Path) -> dict[str, str]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # the first start, or it was killed while writing
        return {}


def check_loggers(recipe: Recipe) -> None:
    """Raise RecipeError for loggers whose packages are not installed."""
    wanted = [name for name in _PACKAGES if name in recipe.train.loggers]
    if missing := [name for name in wanted if find_spec(name) is None]:
        message = f"got {', '.join(missing)}, not installed here; pip install {' '.join(missing)}"
        raise RecipeError(recipe.problem(("train", "loggers"), message))
