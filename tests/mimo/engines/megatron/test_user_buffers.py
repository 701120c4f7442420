"""`train.tp_comm_overlap`: what it needs is checked, and what it changes is exact."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.model.recipe_checks import check_device, check_recipe
from mimo.ops.acceleration import TRANSFORMER_ENGINE, Machine, overlap_problem
from mimo.parallel.build import build_layout
from mimo.parallel.grids import fixed_tokens
from tests.conftest import RunRanks
from tests.mimo import tiny

TOKENS = 160
BUDGET = [f"data.tokens_per_microbatch={TOKENS}", "train.micro_batch_size=1"]
COLOCATED = [
    *("encoders.vision.placement=colocated", "encoders.vision.grid={tp: 1, dp: 2}"),
    "language.grid={tp: 2, sp: true, dp: 1}",
]
FITTING = ["train.tp_comm_overlap=true", "train.precision=bf16", *BUDGET, *COLOCATED]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("overlap")
    tiny.write_samples(directory)
    return tiny.write_recipe(directory)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (["train.precision=fp32"], "bf16, but train.precision is fp32"),
        (["train.fp8=current"], "linears in 16 bits, but train.fp8 is current"),
        (["language.lora={rank: 4}"], "linears without adapters"),
        (["data.tokens_per_microbatch=null"], "set data.tokens_per_microbatch"),
        (["language.grid.sp=false"], "tp above 1 with sp and no cp"),
        (["encoders.vision.placement=disjoint"], "all 4 ranks, but it has 2; colocate encoders"),
    ],
)
def test_what_user_buffers_cannot_do_is_refused(
    path: Path, changed: list[str], reason: str
) -> None:
    check_recipe(load_recipe(path, FITTING), None)
    with pytest.raises(RecipeError, match=r"train\.tp_comm_overlap: got true, which needs ") as e:
        check_recipe(load_recipe(path, [*FITTING, *changed]), None)
    assert reason in str(e.value)


def test_a_machine_without_gpus_or_transformer_engine_is_refused(path: Path) -> None:
    assert "needs GPUs" in str(overlap_problem(Machine(None)))
    assert "install transformer-engine[pytorch]" in str(overlap_problem(Machine((9, 0))))
    assert overlap_problem(Machine((9, 0), frozenset({TRANSFORMER_ENGINE}))) is None
    if not torch.cuda.is_available():
        with pytest.raises(RecipeError, match="needs GPUs, but this machine has none"):
            check_device(load_recipe(path, FITTING))


def test_buffers_are_made_anew_for_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    from mimo.ops.acceleration import make_user_buffers

    calls: list[Any] = []
    base = SimpleNamespace(
        destroy_ub=lambda: calls.append("destroyed"),
        initialize_ub=lambda **given: calls.append(given),
        UserBufferQuantizationMode=SimpleNamespace(NONE="none"),
    )
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", base)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "nccl")
    make_user_buffers(TOKENS, 64, 2, torch.bfloat16)
    first, then = calls
    assert first == "destroyed"
    assert (then["shape"], then["tp_size"], then["dtype"]) == ([TOKENS, 64], 2, torch.bfloat16)


@pytest.mark.slow
def test_sequences_of_one_length_give_the_steps_of_one_rank(
    run_ranks: RunRanks, path: Path
) -> None:
    overrides = [*BUDGET, *COLOCATED]
    padded = run_ranks(padded_steps, 2, path, overrides)
    assert {length for result in padded for length in result["tokens"]} == {TOKENS}
    plain = run_ranks(tiny.run_layout_steps, 2, path, overrides)
    expected = {
        "gradient": tiny.assemble(plain, "gradient"),
        "weight": tiny.assemble(plain, "weight"),
    }
    reference = {
        name: {what: expected[what][name] for what in expected} for name in expected["weight"]
    }
    for what in expected:
        found = tiny.errors(tiny.assemble(padded, what), reference, what)
        assert max(found.values()) < 1e-5, found


def padded_steps(rank: int, path: Path, overrides: list[str]) -> dict[str, Any]:
    """Inside a rank: train on sequences padded as for the overlap; all lanes' tokens, too."""
    from mimo.model import planner
    from mimo.model.step_plan import StepPlanner

    tokens: list[int] = []
    finish = StepPlanner.finish

    def watched(self: StepPlanner, *args: Any) -> Any:
        plan = finish(self, *args)
        tokens.extend(np.concatenate([m.samples.lane_tokens for m in plan.microbatches]).tolist())
        return plan

    StepPlanner.finish = watched  # type: ignore[method-assign]
    planner.fixed_tokens = lambda recipe, layout: TOKENS
    return tiny.run_layout_steps(rank, path, overrides) | {"tokens": tokens}


def test_the_length_is_a_multiple_for_all_ranks(path: Path) -> None:
    recipe = load_recipe(path, [*FITTING, "data.tokens_per_microbatch=161"])
    assert fixed_tokens(recipe, build_layout(recipe)) == 162
    without = load_recipe(path, ["train.tp_comm_overlap=false"])
    assert fixed_tokens(without, build_layout(without)) is None


@pytest.mark.gpu
def test_a_model_with_overlapped_messages_learns_like_one_without(
    run_ranks_on_gpu: RunRanks, path: Path
) -> None:
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    losses = [
        [one["loss"] for one in run_ranks_on_gpu(tiny.run_layout_steps, 2, path, own)[0]["metrics"]]
        for own in (FITTING, [*FITTING, "train.tp_comm_overlap=false"])
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-2)
