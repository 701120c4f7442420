"""The fsdp language model on a GPU in bf16, with NCCL and the kernels that are installed there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.mimo.engines.fsdp import language_cases as cases

TOLERANCE = 0.05  # of bf16 with three layers, relative to the largest loss or gradient


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_losses_and_gradients_in_bf16_are_near_those_of_the_plain_module(name: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    from mimo.device import initialize_distributed, local_device
    from mimo.engines.fsdp.context import FsdpContext
    from mimo.engines.fsdp.language import LanguageModel
    from mimo.engines.fsdp.sharding import load, shard

    if not dist.is_initialized():
        initialize_distributed(0, 1, dist.HashStore(), timeout_seconds=60)  # type: ignore[attr-defined]
    device = local_device()
    axes = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=axes)
    config = cases.config_of(name)
    plain = cases.plain_model(config)
    weights = dict(plain.named_parameters())

    def read(key: str, rows: slice, columns: slice) -> Any:
        whole = weights[key].detach()
        return whole[rows] if whole.dim() < 2 else whole[rows, columns]

    ctx = FsdpContext(mesh, torch.bfloat16)
    model = LanguageModel(config, ctx)
    shard(model, ctx)
    load(model, ctx, device, read)
    lane = cases.lane_of("llama", 0)  # of text alone
    expected = cases.plain_outcome("llama", config, [lane])
    segments = cases.PackedSegments.from_lengths(lane.lengths, device)
    losses = model(
        lane.ids[None].to(device),
        lane.positions[:, None].to(device),
        labels=lane.labels.to(device),
        loss_at=lane.sequence_first.to(device),
        packed_seq_params=segments,
    )
    (losses * lane.factors.to(device)).sum().backward()
    assert cases.error(losses.detach().cpu(), expected.losses[0]) < TOLERANCE
    for own, parameter in model.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor), own
        wanted = expected.gradients[model.hf_names[own]]
        assert cases.error(gradient.full_tensor().cpu(), wanted) < TOLERANCE, own
