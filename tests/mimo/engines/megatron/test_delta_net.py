"""Layers with linear attention: packed samples do not see each other, whatever the layout.

A hybrid model alone on a grid. The losses of one step are computed twice; in between one packed
sample gets other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.language_steps import (
    LENGTHS,
    NUM_TOKENS,
    Job,
    Microbatch,
    Trainer,
    assert_same,
    microbatches,
    outcome,
    share,
    train,
)
from tests.mimo.families.languages.references import HYBRID

EXPERTS = {"num_experts": 8, "experts_per_token": 3, "shared_expert_size": 40}
GRIDS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2 sp": {"tp": 2, "sp": True},
    "cp2": {"cp": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "pp2": {"pp": 2},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    **{name: (grid, {}) for name, grid in GRIDS.items()},
    "experts, one rank": ({}, EXPERTS),
    "experts, dp2 ep2": ({"dp": 2, "ep": 2}, EXPERTS),
    "experts, tp2 sp ep2": ({"tp": 2, "sp": True, "ep": 2}, EXPERTS),
    "experts, cp2 ep2": ({"cp": 2, "ep": 2}, EXPERTS),
    "experts, tp2 etp2": ({"tp": 2, "etp": 2}, EXPERTS),
}
CHANGED = 1  # the number of the packed sample


def size(grid: dict[str, Any]) -> int:
    return grid.get("tp", 1) * grid.get("cp", 1) * grid.get("pp", 1) * grid.get("dp", 1)


def with_other_tokens(batch: Microbatch) -> Microbatch:
    parts = list(batch.ids.split(LENGTHS, dim=1))
    parts[CHANGED] = (parts[CHANGED] + 7) % NUM_TOKENS
    return Microbatch(**{**vars(batch), "ids": torch.cat(parts, dim=1)})


def losses_of_samples(
    rank: int, grid: dict[str, Any], experts: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Losses (tokens here,) by packed sample: before and after one of them changes."""
    from mimo.engines.megatron.schedule import hidden_shapes, run_schedule, sum_losses
    from mimo.ops.segments import PackedSegments

    family = "qwen3_5_moe" if experts else "qwen3_5"
    trainer = Trainer(Job(grid=grid, settings={**HYBRID, **experts}, family=family))
    groups, config = trainer.groups, trainer.raw[0].config
    of_microbatches: list[Tensor] = []

    def forward_step(batches: Iterator[Microbatch], chunk: Any) -> tuple[Any, Any]:
        batch, cp = next(batches), groups.cp
        positions = share(batch.positions.flatten(0, 1), LENGTHS, cp).unflatten(0, (3, 1))
        losses = chunk(
            input_ids=share(batch.ids, LENGTHS, cp),
            position_ids=positions,
            labels=share(batch.labels, LENGTHS, cp),
            packed_seq_params=PackedSegments.from_lengths(LENGTHS, batch.ids.device),
        )
        if trainer.raw[0].post_process:
            of_microbatches.append(losses.flatten().clone())
        return losses, sum_losses

    batch = next(microbatches(0, 0, dense=False))
    both = [batch, with_other_tokens(batch)]
    length = sum(LENGTHS) // groups.cp.size()
    shapes = [hidden_shapes(config, groups, length, 1)] * 2
    run_schedule(forward_step, both, trainer.chunks, groups, shapes, True)
    lengths = [n // groups.cp.size() for n in LENGTHS]
    return list(zip(*(losses.split(lengths) for losses in of_microbatches), strict=True))


@pytest.mark.parametrize(
    "case", quick_values(CASES, "one rank", "tp2 cp2", "pp2", "experts, tp2 sp ep2")
)
def test_a_neighbours_tokens_change_no_bit_of_a_packed_samples_losses(
    run_ranks: RunRanks, case: tuple[dict[str, Any], dict[str, int]]
) -> None:
    grid, seen = case[0], 0
    for samples in run_ranks(losses_of_samples, size(grid), *case):
        for number, (before, after) in enumerate(samples):
            assert torch.equal(before, after) == (number != CHANGED), f"sample {number}"
            seen += len(before)
    assert seen == sum(LENGTHS) * grid.get("tp", 1) * grid.get("dp", 1)


@pytest.mark.parametrize(
    ("grid", "dense"),
    [
        ({"tp": 2}, False),
        ({"cp": 4}, False),
        pytest.param({"cp": 4}, True, marks=pytest.mark.slow),
    ],
    ids=["tp2", "cp4", "cp4, dense"],
)
def test_ranks_that_share_heads_take_the_steps_of_one(
    run_ranks: RunRanks, grid: dict[str, int], dense: bool
) -> None:
    results = [
        outcome(run_ranks(train, size(axes), job))
        for axes in ({}, grid)
        for job in [
            Job(grid=axes, settings=HYBRID, family="qwen3_5", dense=dense, dtype=torch.float64)
        ]
    ]
    assert_same(results[1], results[0], 1e-10)


def initial_weights(rank: int, grid: dict[str, Any]) -> dict[str, Any]:
    return {"shards": Trainer(Job(grid=grid, settings=HYBRID, family="qwen3_5")).shards()}


def test_decays_and_convolutions_start_alike_in_every_layout(run_ranks: RunRanks) -> None:
    from tests.mimo import tiny

    alone, cut = (
        tiny.assemble(run_ranks(initial_weights, size(grid), grid), "weight")
        for grid in ({}, GRIDS["tp2 sp"])
    )
    prefix = "language.decoder.layers.0.self_attention"
    for name in ("a_log", "dt_bias", "conv_weight", "norm_weight", "linear_qkv.weight"):
        assert (alone[f"{prefix}.{name}"] == cut[f"{prefix}.{name}"]).all(), name
    rates: Any = alone[f"{prefix}.a_log"]
    assert -4.7 < rates.min() < rates.max() < 2.8, "logarithms of rates between 0.01 and 16"
    assert len({*rates.tolist()}) == HYBRID["linear_num_value_heads"]
    assert (alone[f"{prefix}.dt_bias"] == 1).all()
