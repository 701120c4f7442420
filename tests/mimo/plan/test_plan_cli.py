"""`mimo plan` on the command line: refused input, printed tables, written files."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.cli.main import app
from mimo.model.recipe_checks import check_recipe
from mimo.plan.forecast import Forecast, forecast
from mimo.plan.rates import GPUS, rates_of_gpu
from tests.mimo import tiny
from tests.mimo.checkpoint.hf import folders


def plan(folder: Path, *words: str) -> tuple[int, str]:
    """Run `mimo plan` on two steps; return its exit code, and its output as one line."""
    recipe = folder / "tiny.yaml"
    words = tuple(word.replace("{folder}", str(folder)) for word in words)
    result = CliRunner().invoke(app, ["plan", str(recipe), "train.steps=2", *words])
    return result.exit_code, " ".join(result.output.split())


def forecast_of(folder: Path, *overrides: str) -> Forecast:
    recipe = load_recipe(folder / "tiny.yaml", ["train.steps=2", *overrides])
    dataset, rates = tiny.open_sources(recipe), rates_of_gpu(GPUS["h100"], 8)
    return forecast(recipe, check_recipe(recipe, None), dataset, rates)


REFUSED = {
    "no grid tiles": (
        "--gpus 7 --fix encoders.vision.placement=colocated --fix language.grid.cp=1",
        r"no grids tile 7 GPUs with train.global_batch_size 12 and 2 layers; give 6 GPUs",
    ),
    "nothing fits": (
        "--gpus 2 --gpu 0.001",
        r"no layout fits 1\.0 MiB .* the smallest needs \d+\.\d MiB \(\w.*\); give about \d+ GPUs",
    ),
    "all refused": (
        "--gpus 2 --fix language.grid.pp=1 --fix language.grid.vpp=2",
        "every layout is refused, the first because: .*interleaving needs pipeline stages",
    ),
    "an unknown key": (
        "--gpus 2 --fix language.grid.tpp=2",
        r"--fix language\.grid\.tpp=2: this key is not searched, .* did you mean 'language\.grid\.",
    ),
    "a bad size": ("--gpus 2 --fix language.grid.tp=0", r"language\.grid\.tp"),
    "words for a size": ("--gpus 2 --fix train.micro_batch_size=few", "few"),
    "an unknown gpu": (
        "--gpus 2 --gpu h10",
        r"--gpu: got 'h10'; give one of h100, h200, b200, a100-40, a100-80, or its memory in GiB",
    ),
    "a fix without a search": ("--fix language.grid.tp=1", "give --gpus as well"),
    "an empty experiment": ("--from {folder}", r"--from \S+: no run is in it; give the folder of"),
    "a run without steps": ("--calibrate {folder}", r": no step in metrics\.jsonl has its times"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_with_what_to_do(folder: Path, words: str, message: str) -> None:
    code, output = plan(folder, *words.split())
    assert code == 2, output
    assert re.search(message, output), output


def test_data_without_an_index_are_refused_with_the_command(recipe: Path) -> None:
    code, output = plan(recipe.parent)
    assert code == 2
    assert f"run: mimo data index {recipe}" in output


def test_a_forecast_is_printed_with_idle_shares_and_waits(folder: Path) -> None:
    code, output = plan(folder, "language.grid.pp=2")
    assert code == 0, output
    made = forecast_of(folder, "language.grid.pp=2")
    assert f"{made.percentile(50):.4g}" in output
    assert f"language 1 │ {100 * made.idle['language', 1]:.1f} %" in output
    ((who, whom), seconds) = max(made.waits.items(), key=lambda wait: wait[1])
    wait = f"{whom[0]} {whom[1]}, {100 * seconds / made.median_step.seconds:.1f} %"
    assert re.search(rf"{who[0]} {who[1]} │ [^│]*│ {wait}", output)


def test_a_timeline_is_written_as_a_trace_and_a_picture(folder: Path, tmp_path: Path) -> None:
    code, output = plan(folder, "language.grid.dp=3", "--timeline", str(tmp_path / "lines"))
    assert code == 0, output
    made = forecast_of(folder, "language.grid.dp=3").median_step.timeline
    events = json.loads((tmp_path / "lines" / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert names == [f"{w.module} stage {w.stage} lane {w.lane}" for w in made.workers]
    boxes = [e for e in events if e["ph"] == "X"]
    assert [(b["tid"], b["name"]) for b in boxes] == [(t.worker, str(t)) for t in made.tasks]
    np.testing.assert_allclose([b["ts"] for b in boxes], 1e6 * made.start)
    np.testing.assert_allclose([b["ts"] + b["dur"] for b in boxes], 1e6 * made.end)
    with Image.open(tmp_path / "lines" / "timeline.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 10


@pytest.mark.parametrize("num_gpus", [1, 3])
def test_the_written_overrides_give_the_layout_that_was_printed(
    folder: Path, tmp_path: Path, num_gpus: int
) -> None:
    file = tmp_path / "new" / "best.txt"
    code, output = plan(folder, "--gpus", str(num_gpus), "--write", str(file))
    assert code == 0, output
    lines = file.read_text().splitlines()
    assert f"overrides of the first: {' '.join(lines)}" in output
    recipe = load_recipe(folder / "tiny.yaml", lines)
    check_recipe(recipe, num_gpus)
    row = re.search(r"│ 1 │(.*?)│ 2 │", output)
    assert row is not None, output
    assert f"{forecast_of(folder, *lines).percentile(50):.4g}" in row[1]
    assert f"microbatch {recipe.train.micro_batch_size}" in row[1]


def test_a_model_of_transformers_is_forecast_and_searched(tmp_path: Path) -> None:
    write_tiny(TinyCheckpoint("qwen3_vl"), tmp_path / "model")
    tiny.write_samples(tmp_path)
    path = folders.write_recipe(tmp_path / "model", tmp_path / "tiny.yaml")
    module = "{family: transformers, engine: fsdp, grid: {}}"
    overrides = [f"language={module}", f"encoders.vision={module}", "bridge.delivery=replicated"]
    overrides += [f"data.sources=[{{path: '{tmp_path}/train-*.tar'}}]"]
    tiny.open_sources(load_recipe(path, overrides))
    for words in ([], ["--gpus", "2"]):
        code, output = plan(tmp_path, *overrides, *words)
        assert code == 0, output
        assert "tokens" in output
