"""Training steps of an fsdp module on several ranks against plain transformers on one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import RunRanks
from tests.fsdp_job import LAYERS, Job, Outcome, microbatches, reference
from tests.fsdp_ranks import (
    Counted,
    assembled,
    build,
    make_topology,
    norm_of,
    outcome,
    sent,
    train,
    train_step,
    worst,
)

# transformers computes norms and rotations in fp32, whatever the weights are in.
TOLERANCE = 1e-5

TWO = [
    Job(shard=2),
    Job(tp=2),
    Job(shard=2, dtype=torch.float32, reshard_after_forward=False, tied=False),
    Job(shard=2, frozen=("embed_tokens.weight", "k_proj.weight", "layers.1.mlp.up_proj.weight")),
    Job(shard=2, tied=False, frozen=("embed_tokens", "layers.0.")),
    Job(shard=2, plant="average"),
    Job(tp=2, plant="no sum over tp"),
    Job(shard=2, plant="always reduce"),
]
FOUR = [Job(shard=2, tp=2), Job(replicate=2, shard=2)]


def trained(run_ranks: RunRanks, jobs: list[Job]) -> list[tuple[Outcome, list[int]]]:
    """Outcome of each job, and the number of gradient reductions in each step."""
    results = run_ranks(train, jobs[0].world, jobs)
    of_jobs = [[rank_results[number] for rank_results in results] for number in range(len(jobs))]
    return [(outcome(ranks), ranks[0]["reductions"]) for ranks in of_jobs]


def assert_equals_one_rank(job: Job, got: Outcome) -> None:
    expected = reference(job)
    assert worst(got.gradients, expected.gradients)[0] < TOLERANCE, job
    assert worst(got.weights, expected.weights)[0] < TOLERANCE, job
    assert got.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)


@pytest.mark.slow
def test_steps_on_two_ranks_equal_those_of_plain_transformers_on_one(run_ranks: RunRanks) -> None:
    results = trained(run_ranks, TWO)
    for job, (got, reductions) in zip(TWO, results, strict=True):
        # Once a step for every layer that learns and for the root, not once a microbatch.
        expected = LAYERS + 1 - job.frozen.count("layers.0.") if job.shard > 1 else 0
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


@pytest.mark.slow
def test_steps_on_four_ranks_equal_those_of_plain_transformers_on_one(run_ranks: RunRanks) -> None:
    for job, (got, reductions) in zip(FOUR, trained(run_ranks, FOUR), strict=True):
        assert reductions == [LAYERS + 1] * job.steps
        assert_equals_one_rank(job, got)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job(shard=2, steps=1, reduce_gradients="microbatch"), marks=pytest.mark.slow),
        Job(replicate=2, shard=2, steps=1, reduce_gradients="microbatch"),
    ],
    ids=["sharded", "hybrid"],
)
def test_gradients_that_every_microbatch_reduces_equal_those_of_one_rank(
    run_ranks: RunRanks, job: Job
) -> None:
    ((got, reductions),) = trained(run_ranks, [job])
    assert reductions == [job.microbatches * (LAYERS + 1)]
    assert_equals_one_rank(job, got)


# ---------------------------------------------------------------- what else a step has to do


def passes_through(rank: int, plain: bool) -> dict[str, Any]:
    """Gradients that leave a frozen model by its embeddings; losses around an update."""
    frozen = Job(shard=2, dtype=torch.float32, frozen=("weight", "bias"))
    learning = replace(frozen, frozen=())
    half = replace(learning, dtype=torch.bfloat16)
    topology = make_topology(frozen)
    results: dict[str, Any] = {}
    batch = microbatches(frozen, 0, rank)[0]
    for number in range(2):  # weights that are gathered are given up, and gathered again
        module = build(frozen, topology, plain=plain)
        rows = torch.zeros(*batch.ids.shape, 32, requires_grad=True)
        module.begin_step(forward_only=False)
        with Counted() as counted:
            losses = module.run_language(
                lambda _, chunk, rows=rows: chunk.run(
                    **batch.inputs, place=lambda text, _: text + rows
                ),
                [0],
                [(1, 1)],
                False,
            )
        module.finish_gradients(3)
        module.update(1e-2, 1.0)
        assert rows.grad is not None
        results[f"rows {number}"], results["reduced"] = rows.grad, counted.reductions
        results["norm"] = norm_of(module)
        assert not list(module.gradients())

    module = build(learning, topology, plain=plain)
    module.begin_step(forward_only=True)
    for name in ("before", "after"):
        with torch.no_grad():
            losses = module.run_language(
                lambda _, chunk: chunk.run(**batch.inputs), [0], [(1, 1)], True
            )
        results[name] = losses[0]
        if name == "before":
            lanes = 1 if plain else 2
            train_step(module, learning, 0, 0 if plain else rank, lanes)
            module.update(0.05, 0.5)
            module.begin_step(forward_only=True)

    if not plain:
        module = build(half, topology)
        train_step(module, half, 0, rank, 2)
        results["half"] = sent(module.gradients())
    topology.close()
    return results


def test_a_frozen_model_hands_gradients_on_and_an_evaluation_sees_updated_weights(
    run_ranks: RunRanks,
) -> None:
    got, expected = (run_ranks(passes_through, 2, plain) for plain in (False, True))
    for rank in range(2):
        own, one = got[rank], expected[rank]
        for number in range(2):
            torch.testing.assert_close(own[f"rows {number}"], one[f"rows {number}"])
        assert (own["reduced"], own["norm"]) == (0, 0.0)
        assert own["before"].item() == pytest.approx(one["before"].item(), rel=1e-5)
        assert own["after"].item() == pytest.approx(one["after"].item(), rel=1e-5)
        assert abs(own["after"].item() / own["before"].item() - 1) > 0.05
    # In bf16, summed in fp32: as near as bf16 is.
    half = assembled([own["half"] for own in got], once=False)
    assert {one.dtype for one in half.values()} == {torch.float32}
    full = reference(Job(shard=2, dtype=torch.float32, steps=1)).gradients
    named = {key.removeprefix("language."): one for key, one in half.items()}
    cosines = [
        torch.cosine_similarity(named[key].flatten(), one.flatten(), dim=0)
        for key, one in full.items()
        if not key.endswith("k_proj.bias")  # zero in theory
    ]
    assert min(cosines) > 0.98
