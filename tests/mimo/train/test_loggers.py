"""Loggers of other people's packages: stand-ins with the signatures of theirs record the calls."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from mimo.train.loggers import MetricsWriter, check_loggers
from mimo.train.main import Request
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.runs import LAYOUT, metrics, run

VARIABLES = ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What both packages are asked for, in order, by name of the function and its arguments."""
    recorded: list[tuple[str, dict[str, Any]]] = []

    def recorder(name: str, *parameters: str, returns: Callable[..., Any] = lambda _: None) -> Any:
        def call(*args: Any, **settings: Any) -> Any:
            arguments = dict(zip(parameters, args, strict=False)) | settings
            assert arguments.keys() <= {*parameters}
            recorded.append((name, arguments))
            return returns(arguments)

        return call

    def started(arguments: dict[str, Any]) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=arguments["run_id"] or "made by mlflow"))

    run = SimpleNamespace(log=recorder("log", "data", "step"), finish=recorder("finish"))
    names = ("project", "dir", "id", "name", "config", "mode", "resume")
    install(monkeypatch, "wandb", init=recorder("init", *names, returns=lambda _: run))
    install(
        monkeypatch,
        "mlflow",
        set_tracking_uri=recorder("set_tracking_uri", "uri"),
        set_experiment=recorder("set_experiment", "experiment_name"),
        start_run=recorder("start_run", "run_id", "run_name", returns=started),
        log_metrics=recorder("log_metrics", "metrics", "step"),
        log_dict=recorder("log_dict", "dictionary", "artifact_file"),
        end_run=recorder("end_run"),
    )
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return recorded


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module: Any = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def recipe_with(folder: Path, loggers: str) -> Recipe:
    path = tiny.write_recipe(folder)
    return load_recipe(path, [f"train.loggers={loggers}", "train.steps=4", "train.log_every=2"])


def steps(recipe: Recipe, run_dir: Path, first: int, stop: int) -> None:
    with MetricsWriter(recipe, run_dir, first) as writer:
        for step in range(first, stop):
            line = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_second": 9.0}
            writer.step({"step": step, **line, "mfu": None, "epochs": {0: 0.5}})
        writer.validation({"step": stop, "validation_loss": 1.5})


def test_both_get_logged_steps_and_a_resumed_run_goes_on_as_the_same_one(
    tmp_path: Path, calls: list
) -> None:
    recipe = recipe_with(tmp_path, "[wandb, mlflow]")
    steps(recipe, tmp_path, 0, 3)
    first, calls[:] = list(calls), []
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')
    steps(recipe, tmp_path, 2, 4)
    asked = dict(reversed(first))  # the first call of each
    assert asked["init"]["mode"] == "offline"
    assert asked["init"]["dir"] == str(tmp_path)
    assert asked["init"]["name"] == "tiny"
    assert asked["init"]["config"]["train"]["steps"] == 4
    assert asked["set_tracking_uri"]["uri"] == (tmp_path / "mlruns").as_uri()
    assert asked["start_run"] == {"run_id": None, "run_name": "tiny"}
    expected = {"train/loss": 2.0, "train/grad_norm": 1.0, "train/lr": 0.1}
    expected |= {"train/tokens_per_second": 9.0, "train/epoch_0": 0.5}
    logged = [arguments for name, arguments in first if name == "log"]
    assert logged == [
        {"data": expected, "step": 1},
        {"data": {"validation/validation_loss": 1.5}, "step": 3},
    ]
    assert [arguments for name, arguments in first if name == "log_metrics"] == [
        {"metrics": one["data"], "step": one["step"]} for one in logged
    ]
    assert [name for name, _ in first[-2:]] == ["finish", "end_run"]
    assert not (tmp_path / "tensorboard").exists()
    again = dict(reversed(calls))
    assert again["init"]["id"] == asked["init"]["id"]
    assert again["start_run"]["run_id"] == "made by mlflow"
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]


def test_variables_of_the_packages_choose_another_place(
    tmp_path: Path, calls: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(VARIABLES, ("online", "mine", "http://there", "other"), strict=True):
        monkeypatch.setenv(name, value)
    steps(recipe_with(tmp_path, "[wandb, mlflow]"), tmp_path, 0, 1)
    asked = dict(calls)
    assert (asked["init"]["mode"], asked["init"]["project"]) == ("online", "mine")
    assert "set_tracking_uri" not in asked
    assert asked["set_experiment"] == {"experiment_name": "other"}


def test_a_logger_that_fails_is_left_out_and_training_goes_on(
    tmp_path: Path,
    calls: list,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def log_metrics(metrics, step=None) -> None:
        raise ConnectionError("no such host")

    monkeypatch.setattr(sys.modules["mlflow"], "log_metrics", log_metrics)
    steps(recipe_with(tmp_path, "[mlflow, wandb]"), tmp_path, 0, 4)
    printed = capsys.readouterr().out
    assert printed.count("warning: logger mlflow is left out from now on: no such host") == 1
    assert [arguments["step"] for name, arguments in calls if name == "log"] == [1, 3, 4]


def test_tensorboard_has_every_number_of_every_logged_step(
    run_ranks: RunRanks, recipe: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(run_ranks, recipe, *LAYOUT, "train.log_every=1")
    events = EventAccumulator(str(recipe.parent / "runs" / "tiny" / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    logged = metrics(recipe)
    for name in ("seconds_vision_encode", "idle_fraction_language", "flops_vision"):
        assert name in logged[-1]
    assert [name for name in logged[-1] if name.startswith("bridge_wait_seconds_")]
    for line in logged:
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                (one,) = (x for x in events.Scalars(f"train/{name}") if x.step == line["step"])
                assert one.value == pytest.approx(value, rel=1e-6)
                tags.discard(f"train/{name}")
    assert tags == {"train/epoch_0"}, "the file has a list of them"


def test_a_package_that_is_not_there_is_bad_input_before_anything_starts(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.loggers: got mlflow.*pip install mlflow"):
        Request(recipe, ["train.loggers=[tensorboard, mlflow]"]).check(None)
    assert not (recipe.parent / "runs").exists()
    check_loggers(load_recipe(recipe, []))


def test_steps_and_ranks_to_trace_must_be_there(recipe: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        Request(recipe, ["train.profile={steps: [2, 3], ranks: [0, 2]}"]).check(None)
    for problem in (
        "train.profile.steps: got 3, but train.steps is 3, and steps count from 0; give at most 2",
        "train.profile.ranks: got 2, but there are 2 ranks, and ranks count from 0; give at most 1",
    ):
        assert problem in str(refused.value)
    with pytest.raises(RecipeError, match=r"profile: steps: got \[2, 1\]; write \[1, 2\]"):
        load_recipe(recipe, ["train.profile={steps: [2, 1]}"])
