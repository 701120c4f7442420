"""Whole runs in bf16 on a GPU with NCCL, next to the same runs on the CPU with gloo.

Ranks share the GPU where there are fewer GPUs than ranks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mimo.ops.acceleration import FP8_RECIPES
from tests.conftest import RunRanks
from tests.mimo.model.test_fsdp_runs import FSDP, TP, make, measured, read, trained

BF16 = ["train.precision=bf16"]
# Relative, of losses and norms; a step in bf16 rounds to 3 digits, in 8 bits to one.
BF16_TOLERANCE, FP8_TOLERANCE = 3e-2, 0.1
DISJOINT = [
    "encoders.vision={placement: disjoint, grid: {tp: 1, dp: 1}}",
    "language.grid={tp: 1, dp: 1}",
]
LAYOUTS = {
    "disjoint": DISJOINT,
    "two lanes, tower apart": ["encoders.vision={placement: disjoint, grid: {tp: 1, dp: 1}}"],
    "tp2 sp": [*TP, "encoders.vision.grid={tp: 1, dp: 2}"],
    "cp2": ["language.grid={cp: 2, dp: 1}"],
    "pp2": ["language.grid={pp: 2, dp: 1}"],
    "pp2 vpp2": ["language.grid={pp: 2, vpp: 2, dp: 1}", "train.micro_batch_size=1"],
    "colocated in groups": ["encoders.vision.encode_group=1"],
    "distributed optimizer": ["train.distributed_optimizer=true"],
    "lora": ["language.lora={rank: 4}"],
    "fsdp": FSDP,
    "fsdp tp2": [*FSDP, "language.grid={tp: 2, dp: 1}"],
}


def compare(gpu: Path, cpu: Path, tolerance: float) -> None:
    """Losses, norms and validation losses of two runs, line by line."""
    lines = measured(gpu), measured(cpu)
    assert [len(line) for line in lines[0]] == [len(line) for line in lines[1]]
    for on_gpu, on_cpu in zip(*lines, strict=True):
        np.testing.assert_allclose(on_gpu, on_cpu, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_on_the_gpu_has_the_losses_of_one_on_the_cpu(
    run_ranks_on_gpu: RunRanks, run_ranks: RunRanks, tmp_path: Path, layout: str
) -> None:
    path = make(tmp_path, "qwen3_vl")
    overrides = [*LAYOUTS[layout], *BF16]
    on_gpu = trained(run_ranks_on_gpu, path, "gpu", *overrides)
    compare(on_gpu, trained(run_ranks, path, "cpu", *overrides), BF16_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["one rank", "colocated in groups"])
def test_8_bit_linears_of_every_group_learn_like_those_in_bf16(
    run_ranks_on_gpu: RunRanks, tmp_path: Path, layout: str
) -> None:
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    capability = torch.cuda.get_device_capability()
    current = FP8_RECIPES["current"]
    if not current.lowest <= capability < current.below:
        pytest.skip(f"needs {current.devices}")
    path = make(tmp_path, "qwen3_vl")
    grids = ["language.grid={dp: 1}", "encoders.vision.grid={dp: 1}"]
    overrides = [*BF16, *grids, f"encoders.vision.encode_group={2 - (layout == 'one rank')}"]
    in_8_bits = trained(run_ranks_on_gpu, path, "fp8", *overrides, "train.fp8=current")
    compare(in_8_bits, trained(run_ranks_on_gpu, path, "bf16", *overrides), FP8_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_checkpoints_saved_beside_training_on_the_gpu_equal_those_of_a_run_that_waits(
    run_ranks_on_gpu: RunRanks, tmp_path: Path, engine: str
) -> None:
    path = make(tmp_path, "qwen3_vl")
    overrides = [*BF16, *(FSDP if engine == "fsdp" else ["train.distributed_optimizer=true"])]
    waits, beside = (
        trained(run_ranks_on_gpu, path, f"async_{value}", *overrides, f"train.async_save={value}")
        for value in ("false", "true")
    )
    for step in (2, 4):
        expected, got = (read(run / "checkpoints" / f"step_{step}") for run in (waits, beside))
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), (step, name)
