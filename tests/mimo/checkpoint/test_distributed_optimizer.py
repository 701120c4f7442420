"""Adam's state shared out over data-parallel ranks: same steps, checkpoints for any layout.

The reference is plain Adam on one rank. The epsilon is 1e-4: Adam's first steps turn rounding
noise of gradients that are zero in theory into steps of the learning rate otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mimo.checkpoint.reading import read
from tests import language_steps
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.language_steps import Job, assert_same, outcome

TOLERANCE = 1e-5
ADAM = Job(optimizer="adam", learning_rate=0.003, steps=2)

GRIDS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
    "dp2 cp2": {"dp": 2, "cp": 2},
    "dp2 tp2 sp": {"dp": 2, "tp": 2, "sp": True},
    "dp2 pp2": {"dp": 2, "pp": 2},
}


def run(run_ranks: RunRanks, job: Job, function: Any = language_steps.train, *args: Any) -> Any:
    grid = job.grid
    size = int(np.prod([grid.get(axis, 1) for axis in ("tp", "cp", "pp", "dp")]))
    return run_ranks(function, size, job, *args)


@pytest.fixture(scope="module")
def plain_adam(run_ranks: RunRanks) -> language_steps.Outcome:
    return outcome(run(run_ranks, ADAM))


@pytest.mark.parametrize(
    "overlap", quick_values({"at once": False, "overlapped": True}, "overlapped")
)
@pytest.mark.parametrize("grid", quick_values(GRIDS, "dp2 tp2 sp"))
def test_two_steps_equal_plain_adam_on_one_rank(
    run_ranks: RunRanks, plain_adam: language_steps.Outcome, grid: dict[str, Any], overlap: bool
) -> None:
    job = replace(ADAM, grid=grid, distributed=True, overlap=overlap)
    got = outcome(run(run_ranks, job), gradients=False)
    assert_same(got, plain_adam, TOLERANCE)


@pytest.mark.slow
def test_interleaved_stages_and_recomputation_change_nothing(run_ranks: RunRanks) -> None:
    job = replace(ADAM, settings={"num_layers": 4}, steps=2)
    expected = outcome(run(run_ranks, job))
    grid = {"pp": 2, "vpp": 2, "dp": 2}
    job = replace(job, grid=grid, distributed=True, overlap=True, recompute="full")
    assert_same(outcome(run(run_ranks, job), gradients=False), expected, TOLERANCE)


EXPERTS = replace(
    ADAM,
    family="qwen3_moe",
    settings={"num_experts": 8, "experts_per_token": 2, "balance_loss": 0.1},
)
GRIDS_OF_EXPERTS = {
    "ep2 dp2": {"ep": 2, "dp": 2},
    "ep2 dp2 tp2 sp": {"ep": 2, "dp": 2, "tp": 2, "sp": True},
    "ep2 cp2 dp2": {"ep": 2, "cp": 2, "dp": 2},
}


@pytest.mark.parametrize("grid", quick_values(GRIDS_OF_EXPERTS, "ep2 dp2"))
@pytest.mark.parametrize("overlap", quick_values({"at once": False, "late": True}, "at once"))
def test_with_experts_two_steps_equal_plain_adam_on_one_rank(
    run_ranks: RunRanks, grid: dict[str, Any], overlap: bool
) -> None:
    expected = outcome(run(run_ranks, EXPERTS))
    job = replace(EXPERTS, grid=grid, distributed=True, overlap=overlap, late=overlap)
    assert_same(outcome(run(run_ranks, job), gradients=False), expected, TOLERANCE)


def test_each_rank_keeps_only_its_share_of_the_state_of_experts(run_ranks: RunRanks) -> None:
    (whole,) = run(run_ranks, EXPERTS, language_steps.state_sizes)
    # Without sequence parallelism tensor-parallel ranks have equal norms.
    job = replace(EXPERTS, grid={"ep": 2, "dp": 2, "tp": 2}, distributed=True)
    shares = run(run_ranks, job, language_steps.state_sizes)
    assert whole <= sum(shares) < 1.05 * whole
    assert max(shares) < 0.3 * whole


@pytest.mark.parametrize(
    "grid", quick_values({k: GRIDS[k] for k in ("dp2", "dp2 tp2 sp", "dp2 pp2")}, "dp2")
)
def test_gathering_weights_during_the_next_step_changes_nothing(
    run_ranks: RunRanks, grid: dict[str, Any]
) -> None:
    job = replace(ADAM, grid=grid, distributed=True, overlap=True, steps=3)
    expected = outcome(run(run_ranks, job), gradients=False)
    got = outcome(run(run_ranks, replace(job, late=True)), gradients=False)
    assert got.losses == expected.losses
    assert got.norms == expected.norms
    for name, values in expected.parameters.items():
        np.testing.assert_array_equal(got.parameters[name]["weight"], values["weight"], name)


def test_a_forward_and_a_save_wait_for_the_weights_in_flight(
    run_ranks: RunRanks,
) -> None:
    job = replace(ADAM, grid={"dp": 2}, distributed=True, overlap=True, late=True)
    for after_step, in_checkpoint, next_step, after_forward in run(
        run_ranks, job, language_steps.late_gathers
    ):
        assert after_step > 0
        assert next_step > 0
        assert in_checkpoint == after_forward == 0


@pytest.mark.slow
def test_each_rank_keeps_only_its_share_of_the_state(run_ranks: RunRanks) -> None:
    (whole,) = run(run_ranks, ADAM, language_steps.state_sizes)
    shares = run(
        run_ranks, replace(ADAM, grid={"dp": 2}, distributed=True), language_steps.state_sizes
    )
    assert sum(shares) == whole
    assert max(shares) < 0.6 * whole


@pytest.mark.parametrize(
    "dtype", quick_values({"fp32": torch.float32, "bf16": torch.bfloat16}, "bf16")
)
@pytest.mark.parametrize(
    "grid",
    quick_values(
        {"dp2 tp2 sp": {"dp": 2, "tp": 2, "sp": True}, "dp2 pp2": {"dp": 2, "pp": 2}}, "dp2 tp2 sp"
    ),
)
def test_a_resumed_run_continues_bit_for_bit(
    run_ranks: RunRanks, tmp_path: Path, grid: dict[str, Any], dtype: torch.dtype
) -> None:
    job = replace(ADAM, grid=grid, distributed=True, steps=3, dtype=dtype)
    through = outcome(run(run_ranks, job, language_steps.train, tmp_path, 1), False)
    resumed = outcome(run(run_ranks, job, language_steps.resume, tmp_path, 1), False)
    assert resumed.losses == through.losses[1:]
    assert resumed.norms == through.norms[1:]
    for name, values in through.parameters.items():
        np.testing.assert_array_equal(resumed.parameters[name]["weight"], values["weight"], name)


def masters_and_weights(rank: int, job: Job, directory: Path) -> list[tuple[str, torch.Tensor]]:
    """By parameter, the fp32 numbers that a fresh 16-bit model has after loading."""
    trainer = language_steps.Trainer(job)
    language_steps.load(trainer, directory)
    pieces = trainer.module().pieces("load", with_optimizer=True)
    beginning = "optimizer.fp32_param."
    return [
        (p.key.removeprefix(beginning), p.values) for p in pieces if p.key.startswith(beginning)
    ]


def test_a_bf16_run_resumes_every_bit_of_an_fp32_run(run_ranks: RunRanks, tmp_path: Path) -> None:
    run(run_ranks, replace(ADAM, grid={"dp": 2}), language_steps.train, tmp_path, 1)
    stored = {k: v for k, v in read(tmp_path).items() if not k.startswith("optimizer.")}
    job = replace(ADAM, dtype=torch.bfloat16)
    (masters,) = run(run_ranks, job, masters_and_weights, tmp_path)
    assert {key for key, _ in masters} == stored.keys()
    for key, values in masters:
        assert torch.equal(values.flatten(), stored[key].flatten()), key


def test_bf16_steps_follow_plain_bf16_adam(run_ranks: RunRanks) -> None:
    job = replace(ADAM, grid={"dp": 2}, dtype=torch.bfloat16)
    plain = outcome(run(run_ranks, job), gradients=False)
    shared = outcome(run(run_ranks, replace(job, distributed=True)), gradients=False)
    # Same sums in the same order, so even the roundings are the same.
    assert shared.losses == plain.losses
    for name, values in plain.parameters.items():
        np.testing.assert_array_equal(shared.parameters[name]["weight"], values["weight"], name)
