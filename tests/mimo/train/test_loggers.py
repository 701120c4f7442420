"""Loggers of other people's packages: stand-ins with the signatures of theirs record the calls."""

from __future__ import annotations

import importlib.machinery
import json
import sys
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
from tests.mimo.runs import LAYOUT, metrics, mimo, run

VARIABLES = (*("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"),)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What both packages are asked for, in order, by name of the function and its arguments."""
    found: list[tuple[str, dict[str, Any]]] = []

    class Run:
        def log(self, data, step=None, commit=None) -> None:
            found.append(("log", {"data": data, "step": step}))

        def finish(self, exit_code=None, quiet=None) -> None:
            found.append(("finish", {}))

    def init(
        entity=None, project=None, dir=None, id=None, name=None, config=None, mode=None, resume=None
    ) -> Run:
        given = {"project": project, "dir": dir, "id": id, "name": name, "mode": mode}
        found.append(("init", {**given, "config": config, "resume": resume}))
        return Run()

    def set_tracking_uri(uri) -> None:
        found.append(("set_tracking_uri", {"uri": uri}))

    def set_experiment(experiment_name=None, experiment_id=None) -> None:
        found.append(("set_experiment", {"name": experiment_name}))

    def start_run(run_id=None, experiment_id=None, run_name=None, nested=False) -> Any:
        found.append(("start_run", {"run_id": run_id, "run_name": run_name}))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "made by mlflow"))

    def log_metrics(metrics, step=None, synchronous=None) -> None:
        found.append(("log_metrics", {"metrics": metrics, "step": step}))

    def log_dict(dictionary, artifact_file, run_id=None) -> None:
        found.append(("log_dict", {"file": artifact_file}))

    def end_run(status="FINISHED") -> None:
        found.append(("end_run", {"status": status}))

    install(monkeypatch, "wandb", init)
    mlflow = (set_tracking_uri, set_experiment, start_run, log_metrics, log_dict, end_run)
    install(monkeypatch, "mlflow", *mlflow)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


def install(monkeypatch: pytest.MonkeyPatch, name: str, *functions: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for one in functions:
        setattr(module, one.__name__, one)
    monkeypatch.setitem(sys.modules, name, module)


def recipe_with(folder: Path, loggers: str) -> Recipe:
    path = tiny.write_recipe(folder)
    return load_recipe(path, [f"train.loggers={loggers}", "train.steps=4", "train.log_every=2"])


def steps(recipe: Recipe, run_dir: Path, first: int, stop: int) -> None:
    with MetricsWriter(recipe, run_dir, first) as writer:
        for step in range(first, stop):
            writer.step(
                {
                    "step": step,
                    **{"loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_second": 9.0},
                    "mfu": None,
                    "epochs": {0: 0.5},
                }
            )
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
    found = dict(reversed(first))  # the first call of each
    assert found["init"]["mode"] == "offline"
    assert found["init"]["dir"] == str(tmp_path)
    assert found["init"]["name"] == "tiny"
    assert found["init"]["config"]["train"]["steps"] == 4
    assert found["set_tracking_uri"]["uri"] == (tmp_path / "mlruns").as_uri()
    assert found["start_run"] == {"run_id": None, "run_name": "tiny"}
    expected = {"train/loss": 2.0, "train/grad_norm": 1.0, "train/lr": 0.1}
    expected |= {"train/tokens_per_second": 9.0, "train/epoch_0": 0.5}
    logged = [given for name, given in first if name == "log"]
    assert logged == [
        {"data": expected, "step": 1},
        {"data": {"validation/validation_loss": 1.5}, "step": 3},
    ]
    assert [given for name, given in first if name == "log_metrics"] == [
        {"metrics": one["data"], "step": one["step"]} for one in logged
    ]
    assert [name for name, _ in first[-2:]] == ["finish", "end_run"]
    again = dict(reversed(calls))
    assert again["init"]["id"] == found["init"]["id"]
    assert again["start_run"]["run_id"] == "made by mlflow"
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [
        *(0, 1, 2, 3, 4),
    ]


def test_variables_of_the_packages_choose_another_place(
    tmp_path: Path, calls: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(VARIABLES, ("online", "mine", "http://there", "other"), strict=True):
        monkeypatch.setenv(name, value)
    steps(recipe_with(tmp_path, "[wandb, mlflow]"), tmp_path, 0, 1)
    found = dict(calls)
    assert (found["init"]["mode"], found["init"]["project"]) == ("online", "mine")
    assert "set_tracking_uri" not in found
    assert found["set_experiment"] == {"name": "other"}


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
    said = capsys.readouterr().out
    assert said.count("warning: logger mlflow is left out from now on: no such host") == 1
    assert [given["step"] for name, given in calls if name == "log"] == [1, 3, 4]


WANDB = """
import json, os

def _keep(**given):
    with open(os.environ["STAND_IN"], "a") as file:
        file.write(json.dumps(given) + "\\n")

class Run:
    def log(self, data, step=None):
        _keep(step=step, names=sorted(data))

    def finish(self):
        _keep(finished=True)

def init(project=None, name=None, id=None, resume=None, dir=None, config=None, mode=None):
    _keep(id=id, mode=mode)
    return Run()
"""


@pytest.mark.slow
def test_a_whole_run_uses_the_package_on_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_samples(tmp_path)
    path = tiny.write_recipe(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "package"))
    monkeypatch.setenv("STAND_IN", str(tmp_path / "calls.jsonl"))
    done = mimo("train", path, "train.loggers=[wandb]", "train.log_every=2")
    assert done.returncode == 0, done.stderr
    first, *logged, last = map(json.loads, (tmp_path / "calls.jsonl").open())
    assert first["mode"] == "offline"
    assert [one["step"] for one in logged] == [1, 2]
    assert all("train/seconds_vision_encode" in one["names"] for one in logged)
    assert last == {"finished": True}
    assert not (tmp_path / "runs" / "tiny" / "tensorboard").exists()


def test_tensorboard_has_every_number_of_every_logged_step(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tiny.write_samples(tmp_path)
    recipe = tiny.write_recipe(tmp_path)
    run(run_ranks, recipe, *LAYOUT, "train.log_every=1")
    events = EventAccumulator(str(tmp_path / "runs" / "tiny" / "tensorboard"))
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


def test_a_package_that_is_not_there_is_bad_input_before_anything_starts(tmp_path: Path) -> None:
    tiny.write_samples(tmp_path)
    path = tiny.write_recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"train\.loggers: got mlflow.*pip install mlflow"):
        Request(path, ["train.loggers=[tensorboard, mlflow]"]).check(None)
    assert not (tmp_path / "runs").exists()
    check_loggers(load_recipe(path, []))


def test_steps_and_ranks_to_trace_must_be_there(tmp_path: Path) -> None:
    tiny.write_samples(tmp_path)
    path = tiny.write_recipe(tmp_path)
    with pytest.raises(RecipeError) as found:
        Request(path, ["train.profile={steps: [2, 3], ranks: [0, 2]}"]).check(None)
    assert (
        "train.profile.steps: got 3, but train.steps is 3, and steps count from 0; give at most 2"
        in str(found.value)
    )
    assert (
        "train.profile.ranks: got 2, but there are 2 ranks, and ranks count from 0; give at most 1"
        in str(found.value)
    )
    with pytest.raises(RecipeError, match=r"profile: steps: got \[2, 1\], but .* write \[1, 2\]"):
        load_recipe(path, ["train.profile={steps: [2, 1]}"])
