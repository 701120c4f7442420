"""Queries and keys turn by frequencies that are cut beforehand exactly as by Megatron's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests import language_steps
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.language_steps import Job

JOBS = {
    "packed": Job(),
    "packed, cp2": Job(grid={"cp": 2}),
    "packed, cp2 tp2 with sp, recomputed": Job(
        grid={"cp": 2, "tp": 2, "sp": True}, recompute="full"
    ),
}


@pytest.mark.parametrize("job", quick_values(JOBS, "packed, cp2"))
def test_cut_frequencies_equal_those_that_megatron_picks(run_ranks: RunRanks, job: Job) -> None:
    """Packed segments with positions of images, forward and backward, bit for bit."""
    by_rank = run_ranks(train_with_both, math.prod(int(n) for n in job.grid.values()), job)
    for ours, megatrons, fuses in by_rank:
        assert ours["metrics"] == megatrons["metrics"]
        for shard, other in zip(ours["shards"], megatrons["shards"], strict=True):
            assert (shard.gradients[0] == other.gradients[0]).all(), shard.name
        assert not fuses, "the packed kernel starts each segment's positions from 0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squared_norm_stays_on_the_device_and_is_exact(
    run_ranks: RunRanks, dtype: torch.dtype
) -> None:
    ((got, expected),) = run_ranks(norms, 1, Job(dtype=dtype))
    assert got.shape == ()
    assert got.dtype == torch.float64
    assert math.isclose(got, expected, rel_tol=1e-6 if dtype == torch.float32 else 1e-14)


# ------------------------------------------------------- functions that run inside ranks


def train_with_both(rank: int, job: Job) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Metrics and shards with our self-attention and Megatron's; whether kernels are fused."""
    from megatron.core.transformer.attention import SelfAttention

    from mimo.engines.megatron import stack

    ours = language_steps.train(rank, job)
    patched: Any = stack
    patched.SelfAttention = SelfAttention  # which picks each segment's frequencies itself
    patched = language_steps
    patched.share_of_positions = lambda whole, *unused: whole
    trainer = language_steps.Trainer(job)
    megatrons = {"metrics": [trainer.step(0)], "shards": trainer.shards()}
    return ours, megatrons, trainer.raw[0].config.apply_rope_fusion


def norms(rank: int, job: Job) -> tuple[torch.Tensor, float]:
    """The squared norm of a step's gradient, and the same from fp64 copies."""
    trainer = language_steps.Trainer(job)
    trainer.step(0)
    got = trainer.module().squared_norm()
    grads = trainer.optimizers[0].get_grads_for_grad_norm()
    return got, math.fsum(float(grad.double().square().sum()) for grad in grads)
