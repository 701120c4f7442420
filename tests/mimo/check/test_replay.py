"""`mimo replay`: the batch of a step on one rank, and what its layers compute."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.check.replay import Replay, Statistics
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import InputError
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.mimo.checkpoint.manifests import write_manifest
from tests.mimo.model.test_fsdp_runs import FSDP, TP, make, trained

LAYOUTS = {
    "megatron, pp": ["language.grid={pp: 2, dp: 1}"],
    "megatron, packed by tokens": [
        *("data.tokens_per_microbatch=256", "data.packing_window=5", "train.global_batch_size=2")
    ],
    "fsdp, tp": [*FSDP, *TP],
}

ALONE = ["language.grid.dp=1", "encoders.vision.grid.dp=1"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("replay"), "qwen3_vl")


def replay_steps(rank: int, run: Path, steps: list[int]) -> list[Any]:
    """Replay each step; the message of a step that is refused."""
    from mimo.check.replay import replay

    def result(step: int) -> Replay | str:
        try:
            return replay(run, step)
        except InputError as error:
            return str(error)

    return [*map(result, steps)]


def logged(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.parametrize("layout", quick_values(LAYOUTS, "megatron, pp"))
def test_a_replay_with_the_first_weights_repeats_loss_and_gradient_norm(
    run_ranks: RunRanks, recipe: Path, layout: list[str]
) -> None:
    name = f"run_{list(LAYOUTS.values()).index(layout)}"
    run = trained(run_ranks, recipe, name, *layout)
    ((first, exact, later, beyond),) = run_ranks(replay_steps, 1, run, [0, 2, 3, 4])
    lines = logged(run)
    for repeated in (first, exact):
        line = lines[repeated.step]
        assert repeated.updates_before == 0
        assert repeated.loss == pytest.approx(line["loss"], rel=1e-5)
        assert repeated.grad_norm == pytest.approx(line["grad_norm"], rel=1e-4)
        assert repeated.logged == line
    assert first.weights is None
    assert Path(exact.weights).name == Path(later.weights).name == "step_2"
    assert later.updates_before == 1
    assert later.loss != pytest.approx(lines[3]["loss"], rel=1e-5)
    assert {s["key"] for s in exact.samples} != {s["key"] for s in later.samples}
    assert beyond == "--step 4: the run has steps 0 to 3"

    squares = [numbers["norm"] ** 2 for numbers in exact.gradients.values()]
    assert math.sqrt(sum(squares)) == pytest.approx(exact.grad_norm, rel=1e-5)
    layers = [key for key in exact.activations if ".layers." in key]
    owners = {key.partition(".layers.")[0] for key in layers}
    assert owners == {"language.decoder", "vision.blocks"}
    for key in layers:
        numbers = exact.activations[key]
        assert 0 < numbers["rms"] < numbers["max"]
        assert numbers["non_finite"] == 0
        assert any(name.startswith(f"{key}.") for name in exact.gradients)


def write(rank: int, run: Path) -> str:
    import io
    from contextlib import redirect_stdout

    from mimo.check.replay import main

    with redirect_stdout(io.StringIO()) as printed:
        assert main(run, 1) == 0
    return printed.getvalue()


@pytest.mark.slow
def test_a_replay_is_written_and_samples_that_have_changed_are_refused(
    run_ranks: RunRanks, recipe: Path
) -> None:
    run = trained(run_ranks, recipe, "alone", *ALONE, "train.validate_every=null")
    (printed,) = run_ranks(write, 1, run)
    assert "weights: those that the run began with, 1 updates before this step" in printed
    assert "language.decoder.layers.0" in printed
    kept = json.loads((run / "replays" / "step_1.json").read_text())
    assert kept["samples"]
    assert kept["gradients"]["language.decoder.final_layernorm.weight"]["non_finite"] == 0

    (run / "batches").mkdir()
    batch = {"samples": [*kept["samples"][1:], {"key": "another"}]}
    (run / "batches" / "step_1.json").write_text(json.dumps(batch))
    for checkpoint in (run / "checkpoints").glob("step_*"):
        path = checkpoint / "recipe.yaml"
        path.write_text(path.read_text().replace("seed: 1", "seed: 2"))
        write_manifest(checkpoint)
    (messages,) = run_ranks(replay_steps, 1, run, [1, 2])
    assert "sample another" in messages[0]
    assert all("samples are not those of the run any more" in message for message in messages)
    assert load_recipe(run / "recipe.yaml").train.seed == 1


def test_statistics_cover_finite_elements_and_count_the_others() -> None:
    statistics = Statistics()
    statistics.add(torch.tensor([[3.0, -4.0], [torch.nan, torch.inf]]))
    statistics.add(torch.tensor([12.0, 0.0], dtype=torch.bfloat16))
    statistics.add(torch.zeros(0, 5))
    assert statistics.result() == {
        "elements": 6,
        "norm": 13.0,
        "rms": pytest.approx(6.5),
        "max": 12.0,
        "non_finite": 2,
    }
    assert Statistics().result()["elements"] == 0
