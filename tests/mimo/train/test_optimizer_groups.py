"""What optimizers do with their parameter groups, by hand: rates, decay, clipping.

Each rank has one module: rank 0 the encoder, the others the language model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo.check.compare import RankSteps, Shard
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.model.recipe_checks import check_recipe
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.runs import open_trainer

PEAKS = {"language": 0.004, "vision": 0.0005}
WARMUP = {"language": 3, "vision": 2}
STEPS, MINIMUM = 8, 0.25
SETTINGS = [
    f"train.learning_rate={PEAKS['language']}",
    f"encoders.vision.learning_rate={PEAKS['vision']}",
    f"train.warmup_steps={WARMUP['language']}",
    f"encoders.vision.warmup_steps={WARMUP['vision']}",
    f"train.min_learning_rate_ratio={MINIMUM}",
    f"train.steps={STEPS}",
    "train.optimizer=adam",
    "train.global_batch_size=4",
]


def expected_rate(step: int, module: str) -> float:
    """Up in a line to the peak, then down along half a cosine to a quarter of it."""
    peak, warmup = PEAKS[module], WARMUP[module]
    cosine = math.cos(math.pi * (step - warmup) / (STEPS - warmup))
    falls = MINIMUM + (1 - MINIMUM) * (1 + cosine) / 2
    return peak * ((step + 1) / warmup if step < warmup else falls)


# ------------------------------------------------------------- weights after every step

DECAY, BETAS, EPS, CLIP = 0.1, (0.9, 0.95), 1e-4, 0.05
UPDATES = 2  # the second one has moments, and biases that are not zero any more
BY_HAND = [
    *SETTINGS,
    f"train.weight_decay={DECAY}",
    f"train.adam_beta1={BETAS[0]}",
    f"train.adam_beta2={BETAS[1]}",
    f"train.adam_eps={EPS}",
    f"train.clip_grad_norm={CLIP}",
]
OPTIMIZERS: dict[str, tuple[list[str], float]] = {
    "adam": (["train.precision=fp64"], 1e-13),
    "sgd": (["train.precision=fp64", "train.optimizer=sgd"], 1e-13),
    "adam, its state shared out": (
        ["train.distributed_optimizer=true", "language.grid.dp=2", "train.micro_batch_size=2"],
        # Rounding of weights around 1 in fp32; a step of decay moves them by 1e-4 or more.
        5e-7,
    ),
}


def steps_from_first_weights(rank: int, path: Path, overrides: list[str]) -> RankSteps:
    """Some steps of one rank, each tensor's weights before the first one included."""
    from mimo.check.steps import WatchedSteps

    trainer, dataset = open_trainer(load_recipe(path, overrides))
    modules: Any = trainer.model.modules
    watched = WatchedSteps(modules, rank)
    watched.note_weights()
    steps = trainer.train(dataset, None, watched)
    metrics_of_steps = [next(steps) for _ in range(UPDATES)]
    steps.close()
    return RankSteps(metrics_of_steps, watched.shards)


def module_of(shard: Shard) -> str:
    return shard.name.partition(".")[0]


def by_hand(shard: Shard, factors: list[float], is_sgd: bool) -> list[np.ndarray]:
    """The weights of a tensor after each step: from its first ones, and clipped gradients."""
    weight, first, second = shard.weights[0], np.zeros(()), np.zeros(())
    decay = DECAY if len(shard.shape) > 1 else 0.0
    weights = []
    for step, (gradient, factor) in enumerate(zip(shard.gradients, factors, strict=True)):
        rate, gradient = expected_rate(step, module_of(shard)), factor * gradient
        if is_sgd:
            weight = weight - rate * (gradient + decay * weight)
        else:
            first = BETAS[0] * first + (1 - BETAS[0]) * gradient
            second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
            mean = first / (1 - BETAS[0] ** (step + 1))
            deviation = np.sqrt(second / (1 - BETAS[1] ** (step + 1)))
            weight = weight - rate * decay * weight - rate * mean / (deviation + EPS)
        weights.append(weight)
    return weights


@pytest.mark.parametrize("name", quick(OPTIMIZERS, "adam"))
def test_every_weight_moves_as_computed_by_hand_and_vectors_do_not_decay(
    run_ranks: RunRanks, recipe: Path, name: str
) -> None:
    overrides, tolerance = [*BY_HAND, *OPTIMIZERS[name][0]], OPTIMIZERS[name][1]
    ranks = check_recipe(load_recipe(recipe, overrides), None).world_size
    results = run_ranks(steps_from_first_weights, ranks, recipe, overrides)
    shards = [shard for result in results for shard in result.shards]
    whole = [shard for shard in shards if "lane 0" in shard.where]
    factors = []
    for step in range(UPDATES):
        norm = math.sqrt(sum(float((one.gradients[step] ** 2).sum()) for one in whole))
        assert norm > 2 * CLIP
        factors.append(CLIP / (norm + 1e-6))
    kinds = {(module_of(shard), len(shard.shape) > 1) for shard in shards}
    assert len(kinds) == 4, "matrices and vectors of both modules"
    for shard in shards:
        expected = by_hand(shard, factors, is_sgd=name == "sgd")
        for step, weight in enumerate(expected):
            error = np.abs(shard.weights[step + 1] - weight).max()
            assert error <= tolerance, (shard.name, step, error)
