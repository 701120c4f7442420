"""Language models of transformers as fsdp modules: built on meta, loaded by slices, one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mimo.engines.fsdp.context import DP_REPLICATE, DP_SHARD, TP, FsdpContext
from tests.conftest import RunRanks

CASES: Any = (
    ("qwen3_vl", "none", "step"),
    ("qwen3_vl", "full", "step"),
    ("gemma3", "selective", "step"),
)
REDUCED_EACH_TIME: Any = (("qwen3_vl", "full", "microbatch"),)
NUM_TOKENS = 26


def step(rank: int, cases: Any) -> list[Any]:
    """Two lanes on dp2·tp2 with sequence parallelism, each in two microbatches of the same."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule

    from mimo.engines.fsdp.module import FsdpModule
    from tests.fsdp_job import OPTIMIZER
    from tests.fsdp_ranks import norm_of, same_names, sent
    from tests.mimo.engines.fsdp.language_cases import (
        build,
        config_of,
        inputs_of,
        lane_of,
        plain_model,
    )

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=(DP_REPLICATE, DP_SHARD, TP))
    results = []
    for name, recompute, reduce in cases:
        options: Any = {"recompute": recompute, "reduce_gradients": reduce}
        ctx = FsdpContext(mesh, torch.float32, sequence_parallel=True, **options)
        config, lane = config_of(name), lane_of(name, rank // 2)
        model = build(config, ctx, sharded=True)
        weights = plain_model(config).named_parameters()
        names = same_names({key: tuple(weight.shape) for key, weight in weights})
        groups: Any = None
        module = FsdpModule("language", groups, model, ctx, names, OPTIMIZER, 1e-2)
        inputs = inputs_of(model, lane)[2]
        inputs["packed_seq_params"].prepare(module.attention_forms())

        def forward(
            number: int, chunk: Any, inputs: Any = inputs, factors: Any = lane.factors
        ) -> torch.Tensor:
            return chunk.run(**inputs) * factors / 2

        # The last norm, and embedding and head where one matrix is both, are in the root.
        wrapped = [part for part in model.modules() if isinstance(part, FSDPModule)]
        ends = 0 if config.get_text_config().tie_word_embeddings else 2
        assert len(wrapped) == len(model.units) + ends + 1, name
        module.begin_step(forward_only=False)
        module.run_language(forward, range(2), [(1, 1)] * 2, False)
        module.finish_gradients(NUM_TOKENS)
        results.append((norm_of(module), sent(module.gradients())))
    dist.barrier()
    return results


@pytest.mark.parametrize(
    "cases",
    [pytest.param(CASES, marks=pytest.mark.slow, id="once a step"), REDUCED_EACH_TIME],
)
def test_a_step_of_language_models_equals_plain_transformers(
    run_ranks: RunRanks, cases: Any
) -> None:
    from tests.fsdp_ranks import assembled, worst
    from tests.mimo.engines.fsdp.language_cases import config_of, lane_of, plain_outcome

    ranks = run_ranks(step, 4, cases)
    for number, (name, recompute, _) in enumerate(cases):
        want = plain_outcome(name, config_of(name), [lane_of(name, 0), lane_of(name, 1)])
        expected = {f"language.{key}": g / NUM_TOKENS for key, g in want.gradients.items()}
        got = assembled([results[number][1] for results in ranks], once=False)
        assert worst(got, expected)[0] < 1e-5, (name, recompute)
        norm = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
        assert ranks[0][number][0] == pytest.approx(norm.item(), rel=1e-5)
