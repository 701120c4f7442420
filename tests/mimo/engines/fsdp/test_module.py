"""Training steps of an fsdp module on several ranks against plain transformers on one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.conftest import RunRanks
from tests.fsdp_job import LAYERS, Job, Outcome, outcome, reference, train, worst

# transformers computes norms and rotations in fp32, whatever the weights are in.
TOLERANCE = 1e-5

TWO = [
    Job(shard=2),
    Job(tp=2),
    Job(shard=2, dtype=torch.float32, reshard_after_forward=False, tied=False),
    Job(shard=2, frozen=("embed_tokens.weight", "k_proj.weight", "layers.1.mlp.up_proj.weight")),
    Job(shard=2, plant="average"),
    Job(tp=2, plant="no sum over tp"),
    Job(shard=2, plant="always reduce"),
]
FOUR = [Job(shard=2, tp=2), Job(replicate=2, shard=2)]


def trained(run_ranks: RunRanks, jobs: list[Job]) -> list[tuple[Outcome, list[int]]]:
    """What each job gave, and how often a rank reduced gradients in each step."""
    results = run_ranks(train, jobs[0].world, jobs)
    of_jobs = [[own[number] for own in results] for number in range(len(jobs))]
    return [(outcome(ranks), ranks[0]["reductions"]) for ranks in of_jobs]


def assert_equals_one_rank(job: Job, got: Outcome) -> None:
    expected = reference(job)
    assert worst(got.gradients, expected.gradients)[0] < TOLERANCE, job
    assert worst(got.weights, expected.weights)[0] < TOLERANCE, job
    assert got.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)


def test_steps_on_two_ranks_equal_those_of_plain_transformers_on_one(run_ranks: RunRanks) -> None:
    found = trained(run_ranks, TWO)
    for job, (got, reductions) in zip(TWO, found, strict=True):
        # Once a step for every layer and for the root, not once a microbatch.
        expected = LAYERS + 1 if job.shard > 1 else 0
        if job.plant == "always reduce":
            assert reductions == [job.microbatches * expected] * job.steps
            continue
        assert reductions == [expected] * job.steps, (reductions, job)
        if not job.plant:
            assert_equals_one_rank(job, got)
            continue
        error, name = worst(got.gradients, reference(replace(job, plant="")).gradients)
        assert error > 0.1, job
        if job.plant == "no sum over tp":
            assert name.endswith("_norm.weight")


def test_steps_on_four_ranks_equal_those_of_plain_transformers_on_one(run_ranks: RunRanks) -> None:
    for job, (got, reductions) in zip(FOUR, trained(run_ranks, FOUR), strict=True):
        assert reductions == [LAYERS + 1] * job.steps
        assert_equals_one_rank(job, got)
