"""Experts on several ranks: the same choices, metrics and bytes in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import language_steps
from tests.cases import quick
from tests.conftest import RunRanks
from tests.language_steps import Job, assert_same, outcome

SETTINGS = {"num_experts": 8, "experts_per_token": 3, "balance_loss": 0.3, "z_loss": 0.1}
ONE_RANK = Job(family="qwen3_moe", settings=SETTINGS)
GRIDS: dict[str, dict[str, Any]] = {
    "ep2": {"dp": 2, "ep": 2},
    "tp2 sp ep2": {"tp": 2, "sp": True, "ep": 2},
    "tp2 ep2": {"tp": 2, "ep": 2},
    "cp2 tp2 ep4": {"cp": 2, "tp": 2, "ep": 4},
    "tp2 etp2": {"tp": 2, "etp": 2},
    "pp2 ep2": {"pp": 2, "dp": 2, "ep": 2},
}
every_grid = pytest.mark.parametrize("grid", quick(GRIDS, "tp2 sp ep2"))
TOKENS = 64 * language_steps.NUM_LANES * language_steps.NUM_MICROBATCHES


def run(run_ranks: RunRanks, function: Any, job: Job, *args: Any) -> Any:
    from mimo.parallel.grids import LANGUAGE, GridSpec

    return run_ranks(function, GridSpec(LANGUAGE, **job.grid).size, job, *args)


# ------------------------------------------------------- functions that run inside ranks


def router_sums(rank: int, job: Job, equal: bool) -> torch.Tensor:
    """Return this rank's sums of a step. equal: whether all logits of a router are equal."""
    trainer = language_steps.Trainer(job)
    module = trainer.module()
    if equal:
        for chunk in trainer.raw:
            for name, param in chunk.named_parameters():
                if "router" in name:
                    param.data.zero_()
        module.follow_weights()
    trainer.step(0)
    total = torch.zeros(2, 8 + 4, dtype=torch.float64)
    module.add_router_sums(total)
    return total


def gradients_of_idle_experts(rank: int, job: Job) -> bool:
    """Return whether experts of this rank without tokens have gradients of zeros."""
    trainer = language_steps.Trainer(job)
    for chunk in trainer.raw:
        for name, param in chunk.named_parameters():
            if "router" in name:
                param.data.zero_()
    trainer.step(0)
    named = (n_p for chunk in trainer.raw for n_p in chunk.named_parameters())
    gradients: list[Any] = [p for n, p in named if "experts.linear_fc1" in n]
    per_expert = [p.main_grad.unflatten(0, (4, -1)).flatten(1) for p in gradients]
    # The first three of eight are chosen: three of rank 0's, none of rank 1's.
    busy = [bool(grads[:3].any()) for grads in per_expert]
    idle = [bool(grads[0 if rank else 3 :].any()) for grads in per_expert]
    return all(busy) == (rank == 0) and not any(idle)


def sent_rows(rank: int, job: Job) -> tuple[int, int]:
    """Rows that this rank sends to others in a step, and (token, other rank) pairs."""
    from mimo.engines.megatron import dispatch, experts

    trainer = language_steps.Trainer(job)
    sent, needed, exchanged = 0, 0, dispatch._exchanged
    of = dispatch.Route.of.__func__  # type: ignore[attr-defined]

    def count_rows(rows: Any, counts: dispatch.Counts, *others: Any) -> Any:
        nonlocal sent
        if rows.dim() == 2 and rows.is_floating_point():
            sent += len(rows) - counts.sent[dist.get_rank()]
        return exchanged(rows, counts, *others)

    def count_pairs(cls: Any, chosen: Any, *others: Any) -> Any:
        nonlocal needed
        needed += int((chosen // 4 != dist.get_rank()).any(1).sum())
        return of(cls, chosen, *others)

    dispatch._exchanged = count_rows
    experts.Route.of = classmethod(count_pairs)  # type: ignore[method-assign]
    trainer.step(0)
    dispatch._exchanged = exchanged
    experts.Route.of = classmethod(of)  # type: ignore[method-assign]
    return sent, needed


# ---------------------------------------------------------------------------- tests


@every_grid
def test_the_same_tokens_choose_the_same_experts(run_ranks: RunRanks, grid: str) -> None:
    (expected,) = run(run_ranks, router_sums, ONE_RANK, False)
    loads, others = expected.split([8, 4], dim=1)
    assert loads.sum(1).tolist() == [3 * TOKENS] * 2
    assert others[:, 0].tolist() == [TOKENS] * 2
    assert 0 < float(others[:, 1].max()) < TOKENS * torch.log(torch.tensor(8.0))
    parts = run(run_ranks, router_sums, replace(ONE_RANK, grid=GRIDS[grid]), False)
    total = torch.stack(parts).sum(0)
    assert torch.equal(total[:, :9], expected[:, :9])
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)


@every_grid
def test_with_equal_logits_the_first_experts_are_chosen(run_ranks: RunRanks, grid: str) -> None:
    parts = run(run_ranks, router_sums, replace(ONE_RANK, grid=GRIDS[grid]), True)
    loads = torch.stack(parts).sum(0)[:, :8]
    assert loads.tolist() == [[TOKENS] * 3 + [0] * 5] * 2


@pytest.mark.parametrize("grid", quick(GRIDS, "tp2 sp ep2", "cp2 tp2 ep4"))
@pytest.mark.parametrize("recompute", quick(["none", "full"], "full"))
def test_a_step_is_that_of_one_rank(run_ranks: RunRanks, grid: str, recompute: str) -> None:
    expected = outcome(run(run_ranks, language_steps.train, ONE_RANK))
    job = replace(ONE_RANK, grid=GRIDS[grid], recompute=recompute)
    assert_same(outcome(run(run_ranks, language_steps.train, job)), expected, 1e-5)


def test_experts_without_tokens_get_zeros(run_ranks: RunRanks) -> None:
    job = replace(ONE_RANK, grid={"dp": 2, "ep": 2}, overlap=True)
    assert all(run(run_ranks, gradients_of_idle_experts, job))


def test_a_token_goes_once_to_a_rank_with_several_of_its_experts(run_ranks: RunRanks) -> None:
    job = replace(ONE_RANK, grid={"dp": 2, "ep": 2})
    sent, needed = (sum(counts) for counts in zip(*run(run_ranks, sent_rows, job), strict=True))
    # There and back, and likewise the gradients.
    assert sent == 4 * needed > 0
