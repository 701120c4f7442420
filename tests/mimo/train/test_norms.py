"""Norms of every module in the metrics, and the moving average of the weights.

Runs of one model on one rank and on several, by either engine. What a checkpoint holds tells what
the metrics should say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.load import with_fallbacks
from mimo.checkpoint.resume import Resume
from mimo.checkpoint.tensors import averages
from mimo.engines.contract import Piece
from mimo.errors import InputError
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.mimo.model.test_fsdp_runs import FSDP, TP, make, read, trained

DECAY = 0.75
SETTINGS = [
    *("train.save_every=1", "train.log_every=1", "train.validate_every=null"),
    f"train.ema_decay={DECAY}",
    "encoders.vision.learning_rate=0.001",
]
ALONE = ["language.grid.dp=1", "encoders.vision.grid.dp=1"]
LAYOUTS = {
    "state shared out": ["train.distributed_optimizer=true"],
    "tp, sp": TP,
    "pp": ["language.grid={pp: 2, dp: 1}"],
    "sgd": ["train.optimizer=sgd"],
    "fsdp, tp": [*FSDP, *TP],
    "fsdp, copies": [*FSDP, "language.grid.dp_replicate=2", "encoders.vision.grid.dp_replicate=2"],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("norms"), "qwen3_vl")


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def of_module(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t.double() for k, t in tensors.items() if k.startswith(prefix)}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((one[key] - other[key]).square().sum()) for key in one))


def check_by_hand(run: Path) -> None:
    """Updates and averages are those that follow from the weights after every step."""
    states = [read(run / "checkpoints" / f"step_{step}") for step in range(1, 5)]
    lines = lines_of(run)
    for module in ("language", "vision"):
        weights = [of_module(state, f"{module}.") for state in states]
        means = [of_module(state, f"ema.{module}.") for state in states]
        assert weights[0].keys() == means[0].keys()
        # The first average tells the weights that the run began with.
        first = {k: (means[0][k] - (1 - DECAY) * weights[0][k]) / DECAY for k in means[0]}
        norms = [line[f"update_norm_{module}"] for line in lines]
        assert norms[0] is None
        assert norms[1] == pytest.approx(distance(weights[0], first), rel=1e-3)
        for step in (2, 3):
            expected = distance(weights[step - 1], weights[step - 2])
            assert norms[step] == pytest.approx(expected, rel=1e-4)
        for before, after, now in zip(means, means[1:], weights[1:], strict=False):
            for key, weight in now.items():
                expected = DECAY * before[key] + (1 - DECAY) * weight
                torch.testing.assert_close(after[key], expected, rtol=1e-6, atol=1e-7)
    for line in lines:
        parts = line["grad_norm_language"], line["grad_norm_vision"]
        assert math.hypot(*parts) == pytest.approx(line["grad_norm"], rel=1e-12)


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks, recipe: Path) -> Callable[[str], list[dict]]:
    """Metrics of the run of one rank with an optimizer; they are right by hand."""

    @cache
    def lines(optimizer: str) -> list[dict]:
        settings = [*SETTINGS, *ALONE, f"train.optimizer={optimizer}"]
        run = trained(run_ranks, recipe, f"alone_{optimizer}", *settings)
        check_by_hand(run)
        return lines_of(run)

    return lines


@pytest.mark.parametrize("layout", quick_values(LAYOUTS, "state shared out"))
def test_norms_and_averages_are_those_of_one_rank_in_every_layout_of_either_engine(
    run_ranks: RunRanks,
    recipe: Path,
    alone: Callable[[str], list[dict]],
    layout: list[str],
) -> None:
    name = "run_" + str(list(LAYOUTS.values()).index(layout))
    run = trained(run_ranks, recipe, name, *SETTINGS, *layout)
    check_by_hand(run)
    optimizer = load_recipe(recipe, layout).train.optimizer
    for line, expected in zip(lines_of(run), alone(optimizer), strict=True):
        for key in ("grad_norm_language", "grad_norm_vision"):
            assert line[key] == pytest.approx(expected[key], rel=1e-4), (line["step"], key)
        for key in ("update_norm_language", "update_norm_vision") if line["step"] else ():
            assert line[key] == pytest.approx(expected[key], rel=1e-3), (line["step"], key)


LAYOUTS_OF_EXPERTS = {
    "ep2, state shared out": [
        "language.grid={dp: 4, ep: 2}",
        "encoders.vision.grid.dp=4",
        "train.distributed_optimizer=true",
    ],
    "ep4": ["language.grid={tp: 2, sp: true, dp: 2, ep: 4}", "encoders.vision.grid.dp=4"],
    "tp2 etp2": ["language.grid={tp: 2, etp: 2, dp: 1}"],
}
LOSSES = ["language.model.balance_loss=0.01", "language.model.z_loss=0.001"]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("sparse"), "qwen3_vl_moe")


@pytest.fixture(scope="module")
def sparse_alone(run_ranks: RunRanks, sparse: Path) -> list[dict]:
    run = trained(run_ranks, sparse, "alone", *SETTINGS, *ALONE, *LOSSES)
    check_by_hand(run)
    return lines_of(run)


@pytest.mark.parametrize("layout", quick_values(LAYOUTS_OF_EXPERTS, "tp2 etp2"))
def test_every_expert_counts_once_in_norms_and_every_token_once_in_loads(
    run_ranks: RunRanks, sparse: Path, sparse_alone: list[dict], layout: list[str]
) -> None:
    name = "run_" + str(list(LAYOUTS_OF_EXPERTS.values()).index(layout))
    run = trained(run_ranks, sparse, name, *SETTINGS, *LOSSES, *layout)
    check_by_hand(run)
    for line, expected in zip(lines_of(run), sparse_alone, strict=True):
        for key in ("loss", "grad_norm_language", "router_entropy", "balance_loss", "z_loss"):
            assert line[key] == pytest.approx(expected[key], rel=1e-4), (line["step"], key)
        assert line["expert_tokens"] == expected["expert_tokens"] == line["tokens"] * 3 / 8
        tokens = [line[f"expert_tokens_{n}"] for n in range(8)]
        assert tokens == [expected[f"expert_tokens_{n}"] for n in range(8)]
        assert sum(tokens) == line["tokens"] * 3
        assert line["expert_tokens_min"] == expected["expert_tokens_min"] < line["expert_tokens"]
        assert 1 < line["expert_imbalance"] <= line["expert_imbalance_max"] <= 8 / 3
        assert 0 < line["router_entropy"] < math.log(8)
        assert line["balance_loss"] > 2, "at least k where loads are even, nearly so elsewhere"


@pytest.mark.slow
def test_only_router_losses_with_a_coefficient_are_reported(
    run_ranks: RunRanks, sparse: Path, sparse_alone: list[dict]
) -> None:
    settings = [*SETTINGS, *LAYOUTS_OF_EXPERTS["ep4"], LOSSES[1]]
    line, expected = lines_of(trained(run_ranks, sparse, "z", *settings))[0], sparse_alone[0]
    for key in ("router_entropy", "z_loss"):
        assert line[key] == pytest.approx(expected[key], rel=1e-4), key
    assert "balance_loss" not in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [["train.distributed_optimizer=true"], FSDP],
    ids=["bf16, state shared out", "bf16, fsdp"],
)
def test_an_average_is_in_fp32_and_goes_on_from_a_checkpoint_to_the_last_bit(
    run_ranks: RunRanks, recipe: Path, layout: list[str]
) -> None:
    name = f"bf16_{len(''.join(layout))}"
    settings = [*SETTINGS, *layout, "train.precision=bf16"]
    run = trained(run_ranks, recipe, name, *settings)
    expected = read(run / "checkpoints" / "step_4")
    means = [tensor for key, tensor in expected.items() if key.startswith("ema.")]
    assert {tensor.dtype for tensor in means} == {torch.float32}
    start = Resume(run / "checkpoints" / "step_2")
    again = trained(run_ranks, recipe, name, *settings, start=start)
    got = read(again / "checkpoints" / "step_4")
    assert got.keys() == expected.keys()
    for key, one in expected.items():
        assert torch.equal(got[key], one), key


@pytest.mark.slow
def test_an_update_is_measured_in_steps_that_are_logged_and_not_of_what_is_frozen(
    run_ranks: RunRanks, recipe: Path
) -> None:
    settings = ["train.log_every=2", "train.steps=6", "encoders.vision.freeze=true", *ALONE]
    lines = lines_of(trained(run_ranks, recipe, "logged", *settings, "train.validate_every=null"))
    assert [line["update_norm_language"] is not None for line in lines] == [False, True] * 3
    assert "grad_norm_vision" not in lines[0]
    assert lines[0]["grad_norm_language"] == lines[0]["grad_norm"]


def answering_weights(rank: int, run: Path) -> list[Piece]:
    """What a model that answers with the average has for weights."""
    from mimo.generate.answer import Generator

    modules = Generator(run, average=True).model.model.modules.values()
    pieces = [piece for module in modules for piece in module.pieces("load", with_optimizer=False)]
    return [replace(piece, values=piece.values.clone()) for piece in pieces]


@pytest.mark.slow
def test_the_average_answers_and_is_exported_in_place_of_the_weights(
    run_ranks: RunRanks, recipe: Path, tmp_path: Path
) -> None:
    settings = [*SETTINGS, "encoders.vision.freeze=true", "train.steps=2"]
    run = trained(run_ranks, recipe, "exported", *settings)
    stored = read(run / "checkpoints" / "step_2")
    average = {k.removeprefix("ema."): one for k, one in stored.items() if k.startswith("ema.")}
    assert {key.partition(".")[0] for key in average} == {"language"}
    (pieces,) = run_ranks(answering_weights, 1, run)
    for piece in pieces:
        rows, columns = piece.values.shape
        whole = average.get(piece.key, stored[piece.key]).view(piece.shape[0], -1)
        expected = whole[piece.row : piece.row + rows, piece.column : piece.column + columns]
        assert torch.equal(piece.values, expected), piece.key
    convert_to_hf(run, tmp_path / "out", 10**9, average=True)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    known = torch.cat([one.flatten() for one in average.values()]).unique()
    for key, values in exported.items():
        nearest = known[torch.searchsorted(known, values).clamp(max=len(known) - 1)]
        assert torch.equal(nearest, values) == ("visual" not in key), key


def test_an_average_that_a_run_has_not_kept_is_no_export() -> None:
    with pytest.raises(InputError, match="train with train.ema_decay"):
        averages(["language.a", "optimizer.exp_avg.language.a"])


def test_an_average_that_a_checkpoint_lacks_begins_with_its_most_exact_weights() -> None:
    wanted = ["language.a", "ema.language.a", "ema.language.b", "optimizer.fp32_param.language.b"]
    pieces = [Piece(key, (1,), 0, 0, torch.zeros(1, 1)) for key in wanted]
    stored = ["language.a", "language.b", "optimizer.fp32_param.language.a"]
    keys = [piece.key for piece in with_fallbacks(pieces, stored)]
    assert keys == ["language.a", "optimizer.fp32_param.language.a", "language.b", "language.b"]
    kept = [piece.key for piece in with_fallbacks(pieces, [*stored, *wanted])]
    assert kept == wanted
