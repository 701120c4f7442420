"""Language models of transformers as fsdp modules: built on meta, loaded by slices, one step."""

from __future__ import annotations

from functools import partial
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

    from mimo.engines.fsdp.language import LanguageModel
    from mimo.engines.fsdp.module import FsdpModule
    from mimo.engines.fsdp.sharding import load, shard
    from mimo.ops.segments import insert_embeddings
    from tests.fsdp_job import OPTIMIZER
    from tests.fsdp_ranks import Asked, norm_of, same_names, sent
    from tests.mimo.engines.fsdp.language_cases import (
        Lane,
        config_of,
        lane_of,
        plain_model,
    )

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=(DP_REPLICATE, DP_SHARD, TP))
    found = []
    for name, recompute, reduce in cases:
        ctx: Any = FsdpContext(
            mesh,
            torch.float32,
            sequence_parallel=True,
            recompute=recompute,
            reduce_gradients=reduce,
        )
        config = config_of(name)
        weights = {key: one.detach() for key, one in plain_model(config).named_parameters()}
        model = LanguageModel(config, ctx)
        shard(model, ctx)
        load(model, ctx, torch.device("cpu"), Asked(weights))
        same = same_names({key: tuple(one.shape) for key, one in weights.items()})
        groups: Any = None
        module = FsdpModule("language", groups, model, ctx, same, OPTIMIZER, 1e-2)
        lane: Lane = lane_of(name, rank // 2)
        segments = lane.segments
        segments.prepare(module.attention_forms())
        part = len(lane.ids) // 2
        mine = lane.places // part == rank % 2
        rows, places = lane.rows[:, mine], lane.places[mine] % part

        def forward(
            number: int,
            chunk: Any,
            lane: Any = lane,
            rows: Any = rows,
            places: Any = places,
            segments: Any = segments,
        ) -> torch.Tensor:
            losses = chunk.run(
                input_ids=lane.ids[None],
                position_ids=lane.positions[:, None],
                place=partial(insert_embeddings, embeddings=rows[0], positions=places),
                levels=(rows[1:], places) if len(rows) > 1 else None,
                labels=lane.labels,
                loss_at=lane.sequence_first,
                packed_seq_params=segments,
            )
            return losses * lane.factors / 2

        # The last norm, and embedding and head where one matrix is both, are in the root.
        alone = [one for one in model.modules() if isinstance(one, FSDPModule)]
        ends = 0 if config.get_text_config().tie_word_embeddings else 2
        assert len(alone) == len(model.units) + ends + 1, name
        module.begin_step(forward_only=False)
        module.run_language(forward, range(2), [(1, 1)] * 2, False)
        module.finish_gradients(NUM_TOKENS)
        found.append((norm_of(module), sent(module.gradients())))
    dist.barrier()
    return found


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
        expected = {f"language.{key}": one / NUM_TOKENS for key, one in want.gradients.items()}
        got = assembled([own[number][1] for own in ranks], once=False)
        assert worst(got, expected)[0] < 1e-5, (name, recompute)
        norm = torch.stack([one.double().norm() for one in expected.values()]).norm()
        assert ranks[0][number][0] == pytest.approx(norm.item(), rel=1e-5)
