from __future__ import annotations

from typing import Any

import torch

from mimo.engines.fsdp.context import DP_REPLICATE, DP_SHARD, TP, FsdpContext
from tests.conftest import RunRanks
from tests.mimo.engines.fsdp.language_cases import (
    LAYOUTS,
    build,
    config_of,
    error,
    errors,
    gradients,
    lane_of,
    plain_outcome,
    run_lane,
    shard,
)

NAMES = ("qwen3_vl", "qwen2_5_vl", "gemma3", "llama")
EXACT = 1e-5


def context(dp: int, tp: int, **changes: Any) -> FsdpContext:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, dp, tp), mesh_dim_names=(DP_REPLICATE, DP_SHARD, TP))
    return FsdpContext(mesh, torch.float32, **changes)


def worst(name: str, ctx: FsdpContext, changes: dict[str, Any], dp: int = 1) -> dict[str, float]:
    """Errors above what is exact, of all lanes, this rank's among them one after the other."""
    config = config_of(name, **changes)
    lanes = [lane_of(name, number) for number in range(len(LAYOUTS))]
    lanes = lanes[: len(lanes) // dp * dp]
    want = plain_outcome(name, config, lanes)
    model = build(config, ctx)
    first = 0
    if dp > 1:
        shard(model)
        assert ctx.mesh is not None
        first = ctx.mesh[DP_SHARD].get_local_rank()
    found: dict[str, float] = {}
    for number in range(first, len(lanes), dp):
        losses, rows = run_lane(model, lanes[number])
        found[f"losses of lane {number}"] = error(losses, want.losses[number])
        found[f"rows of lane {number}"] = error(rows, want.rows[number])
    found |= errors(gradients(model), want.gradients)
    return {key: value for key, value in found.items() if not value <= EXACT}


def test_without_a_mesh_it_is_the_plain_module_with_masks_of_segments() -> None:
    for name in NAMES:
        assert worst(name, FsdpContext(None, torch.float32), {}) == {}, name


def on_two_ranks(rank: int) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        for sequence_parallel in (False, True):
            ctx = context(1, 2, sequence_parallel=sequence_parallel)
            found[f"{name} tp2 sp {sequence_parallel}"] = worst(name, ctx, {})
    ctx = context(1, 2, sequence_parallel=True, recompute="full")
    found["full"] = worst("qwen3_vl", ctx, {"tie_word_embeddings": True})
    ctx = context(1, 2, recompute="selective")
    found["selective"] = worst("gemma3", ctx, {})
    return found


def test_tensor_and_sequence_parallel_ranks_give_the_plain_losses_and_gradients(
    run_ranks: RunRanks,
) -> None:
    for found in run_ranks(on_two_ranks, 2):
        assert not any(found.values()), found
