"""Fitted rates equal those that simulated the runs, and forecast layouts that did not run."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import InputError
from mimo.model.recipe_checks import check_recipe
from mimo.plan import calibrate as calibration
from mimo.plan.calibrate import MeasuredRun, calibrate, measure_here, read_run
from mimo.plan.forecast import Forecast, forecast
from mimo.plan.rates import Rates
from mimo.plan.work import StepWork
from tests.mimo import drawings, tiny

FORWARD = {"vision": 3e-9, "language": 2e-9, "image": 4e-9}
BACKWARD = {"vision": 4e-9, "language": 5e-9, "image": 3e-9}
TRUE = Rates("true", FORWARD, BACKWARD, call=2e-3, call_back=5e-3, element=1e-6, step=0.05)
UNKNOWN = Rates("assumed", {}, {})
LINKS = {"node": 2e6, "network": 1e6, "latency": 1e-4, "peak": 1e9, "ranks_per_node": 2}
DIRECT = ["encoders.vision.grid.dp=1", "train.micro_batch_size=4"]
LANES = ["language.grid.dp=2", "train.micro_batch_size=2"]
STAGES = ["language.grid={pp: 2, dp: 2}", "encoders.vision.grid={dp: 2}", *LANES[1:]]
SPLIT = ["language.grid={tp: 2, sp: true, dp: 3}", "train.micro_batch_size=1"]


def run_of(
    folder: Path, overrides: Sequence[str], rates: Rates, cores: float = math.inf
) -> tuple[MeasuredRun, Forecast]:
    """Simulate a run with these rates; return its metrics, named as in a log, and forecast."""
    recipe = load_recipe(folder / "tiny.yaml", overrides)
    layout, dataset = check_recipe(recipe, None), tiny.open_sources(recipe)
    rates = replace(rates, cores=cores)
    made = forecast(recipe, layout, dataset, rates, 3)
    metrics = {"step_seconds": float(np.mean([step.seconds for step in made.steps]))}
    for step in made.steps:
        for (module, kind), seconds in step.timeline.busy().items():
            key = f"seconds_{module}_{kind}"
            metrics[key] = metrics.get(key, 0.0) + seconds / len(made.steps)
    shared = max(1.0, layout.world_size / cores)
    for name, (_, updated) in StepWork(recipe, layout, dataset, rates).elements.items():
        metrics[f"seconds_{name}_gradients"] = 0.25 * updated * rates.element * shared
        metrics[f"seconds_{name}_update"] = 0.75 * updated * rates.element * shared
    return MeasuredRun("run", recipe, layout, dataset, metrics, cores), made


def check_rates(fitted: Rates, modules: Sequence[str]) -> None:
    for name in modules:
        assert fitted.forward[name] == pytest.approx(FORWARD[name], rel=0.02), name
        assert fitted.backward[name] == pytest.approx(BACKWARD[name], rel=0.02), name
    assert fitted.call == pytest.approx(TRUE.call, rel=0.02)
    assert fitted.call_back == pytest.approx(TRUE.call_back, rel=0.02)


@pytest.mark.parametrize("cores", [math.inf, 2.0])
@pytest.mark.parametrize("third", [STAGES, SPLIT], ids=["stages", "split"])
def test_rates_fitted_to_two_layouts_are_the_true_ones_and_forecast_a_third(
    folder: Path, cores: float, third: list[str]
) -> None:
    runs = [run_of(folder, overrides, TRUE, cores)[0] for overrides in (DIRECT, LANES)]
    fitted = calibrate(runs, UNKNOWN)
    check_rates(fitted, ["vision", "language"])
    assert fitted.element == pytest.approx(TRUE.element, rel=0.02)
    assert fitted.step == pytest.approx(TRUE.step, rel=0.05)
    expected, _ = run_of(folder, third, TRUE, cores)
    _, made = run_of(folder, third, fitted, cores)
    seconds = np.mean([step.seconds for step in made.steps])
    assert seconds == pytest.approx(expected.metrics["step_seconds"], rel=0.02)


def test_time_of_assumed_messages_is_not_taken_for_work(folder: Path) -> None:
    linked = replace(TRUE, **LINKS)
    tp = ["language.grid={tp: 2, dp: 1}", "train.micro_batch_size=3"]
    runs = [run_of(folder, overrides, linked)[0] for overrides in (tp, SPLIT)]
    check_rates(fitted := calibrate(runs, linked), ["vision", "language"])
    assert fitted.step == pytest.approx(TRUE.step, rel=0.05)


@pytest.mark.parametrize("placement", ["disjoint", "colocated"])
@pytest.mark.parametrize("cores", [math.inf, 2.0])
def test_a_generator_gets_rates_of_its_own(folder: Path, placement: str, cores: float) -> None:
    place = [drawings.GENERATOR, f"generators.image.placement={placement}"]
    place += ["generators.image.grid={}"] * (placement == "colocated")
    layouts = [*place, *DIRECT], [*place, *LANES]
    runs = [run_of(folder / "drawn", overrides, TRUE, cores)[0] for overrides in layouts]
    assert {"seconds_image_forward", "seconds_image_backward"} <= runs[0].metrics.keys()
    fitted = calibrate(runs, UNKNOWN)
    check_rates(fitted, [*FORWARD])


# --------------------------------------------------------------------------- run folders


def write_run(folder: Path, recipe: Path, lines: Sequence[dict[str, float]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe.read_text())
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "environment.json").write_text('[{"device": "CPU", "cores": 2, "ranks": 2}]')
    return folder


def test_a_run_needs_times_and_an_index_and_its_first_steps_are_ignored(recipe: Path) -> None:
    untimed = write_run(recipe.parent / "untimed", recipe, [{"step": 1, "loss": 3.0}])
    with pytest.raises(InputError, match=r"untimed: no step in metrics.jsonl .*logged step"):
        read_run(untimed)
    timed = [{"step": n, "step_seconds": 1.0 + n, "idle_fraction": 0.5} for n in range(8)]
    folder = write_run(recipe.parent / "run", recipe, timed)
    with pytest.raises(
        InputError,
        match=r"run/recipe\.yaml: its data are not indexed; run: mimo data index \S+run/recipe",
    ):
        read_run(folder)
    tiny.open_sources(load_recipe(recipe))
    run = read_run(folder)
    assert run.metrics["step_seconds"] == 1.0 + np.median(range(calibration._WARMUP + 1, 8))
    assert (run.cores, run.layout.world_size) == (2, 2)


@pytest.mark.slow
def test_a_short_run_on_this_machine_gives_rates_of_every_module(folder: Path) -> None:
    recipe = load_recipe(folder / "tiny.yaml", [*STAGES, "language.model.num_layers=8"])
    run = measure_here(recipe)
    assert run.layout.world_size == 1
    assert run.recipe.language.model["num_layers"] == 1
    assert run.recipe.language.model["hidden_size"] == recipe.language.model["hidden_size"]
    rates = calibrate([run], UNKNOWN)
    for name in ("language", "vision"):
        assert min(rates.seconds_per_flop(name)) > 0
    assert rates.source == "fitted to this_machine"


@pytest.mark.slow
def test_a_run_on_this_machine_that_fails_is_reported_with_its_error(folder: Path) -> None:
    recipe = load_recipe(folder / "tiny.yaml", ["train.precision=bf16", "data.tokenizer=missing"])
    with pytest.raises(InputError, match="--calibrate here: training on one rank failed: "):
        measure_here(recipe)
