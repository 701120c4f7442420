"""What optimizers do with their parameter groups, by hand: rates, decay, clipping.

Each rank has one module: rank 0 the encoder, the others the language model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mimo.check.compare import RankSteps, Shard
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.resume import FromScratch, Resume, Start
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.build import build_layout
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.runs import metrics, open_trainer

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


# ------------------------------------------------------------- rates, also after a resume


def held_rates(rank: int, path: Path, overrides: list[str], start: Start) -> list[list[float]]:
    """A run of one rank: the rate of every parameter group at every update of its optimizer."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from mimo.train.rank import train_in_world

    updates = list[list[float]]()

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if updates and len(updates[-1]) == 1:  # an update that is measured goes group by group
            updates[-1] += rates
        else:
            updates.append(rates)

    recipe = load_recipe(path, overrides)
    recipe.run_dir.mkdir(parents=True, exist_ok=True)
    register_optimizer_step_pre_hook(note)
    train_in_world(recipe, build_layout(recipe), recipe.run_dir, start)
    return updates


def expected_rate(step: int, module: str) -> float:
    """Up in a line to the peak, then down along half a cosine to a quarter of it."""
    peak, warmup = PEAKS[module], WARMUP[module]
    cosine = math.cos(math.pi * (step - warmup) / (STEPS - warmup))
    falls = MINIMUM + (1 - MINIMUM) * (1 + cosine) / 2
    return peak * ((step + 1) / warmup if step < warmup else falls)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["whole", "shared out"])
def test_every_group_follows_the_schedule_also_across_a_resume(
    run_ranks: RunRanks, recipe: Path, state: str
) -> None:
    shared = f"train.distributed_optimizer={str(state == 'shared out').lower()}"
    overrides = [*SETTINGS, shared, "train.save_every=1", f"train.keep_checkpoints={STEPS}"]
    checkpoints = recipe.parent / "runs" / "tiny" / "checkpoints"
    # From the start, from within the warm-up, and from within the descent.
    for first in (0, 2, 6):
        start = Resume(checkpoints / f"step_{first}") if first else FromScratch()
        name = f"name={'resumed' if first else 'tiny'}"
        by_rank = run_ranks(held_rates, 2, recipe, [*overrides, name], start)
        for module, updates in zip(("vision", "language"), by_rank, strict=True):
            assert len(updates) == STEPS - first
            for step, rates in enumerate(updates, first):
                expected = expected_rate(step, module)
                assert len(rates) == 2, "matrices and vectors"
                assert rates == pytest.approx([expected] * 2, rel=1e-12), (module, first, step)
    for step, logged in enumerate(metrics(recipe)):
        for module in PEAKS:
            assert logged[f"lr_{module}"] == pytest.approx(expected_rate(step, module), rel=1e-12)


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
