"""Checkpoints of whole runs: they continue exactly, also in another layout."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mimo.checkpoint.folder import Progress, read_progress
from mimo.checkpoint.reading import read
from mimo.runtime.processes import RanksFailed
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.mimo import drawings, tiny
from tests.mimo.runs import ADAM, LAYOUT, bad_samples, corrupt, metrics, run, shards


def test_resumed_run_continues_the_loss_curve_to_the_last_bit(
    run_ranks: RunRanks, recipe: Path
) -> None:
    # Both sources are in every step, and each begins new epochs before and after the checkpoint.
    tiny.write_samples(recipe.parent, (1, 0, 2, 0, 1), name="other")
    sources = [shards(recipe, "train", "other"), "data.shuffle_block=1"]
    settings = [*LAYOUT, *ADAM, *sources, "train.steps=6", "train.save_every=3"]
    run(run_ranks, recipe, *settings, "name=whole")
    # The interrupted run: same recipe, ended after its checkpoint at step 3.
    folder = recipe.parent / "runs" / "part"
    shutil.copytree(recipe.parent / "runs" / "whole", folder)
    checkpoint = folder / "checkpoints" / "step_3"
    run(run_ranks, recipe, *settings, "name=part", resume_from=checkpoint)
    expected, got = metrics(recipe, "whole"), metrics(recipe, "part")
    assert [m["step"] for m in got] == [0, 1, 2, 3, 4, 5]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [m[key] for m in got] == [m[key] for m in expected], key


DRAWS = {
    "disjoint, saved while training goes on": [
        "generators.image.grid.dp=2",
        "language.grid.dp=2",
        "train.async_save=true",
    ],
    "colocated": ["generators.image.placement=colocated", "generators.image.grid={}"],
    "conditioned on the prompt, bf16": [
        "generators.image.condition=prompt",
        "train.precision=bf16",
    ],
    "adapters": [
        "generators.image.lora={rank: 2, targets: ['*.to_q', '*.img_mlp.net.2']}",
        "language.lora={rank: 2}",
        "generators.image.query_learning_rate=0.01",
    ],
}


@pytest.mark.parametrize("overrides", quick_values(DRAWS, "disjoint, saved while training goes on"))
def test_a_run_that_draws_resumes_to_the_last_bit(
    run_ranks: RunRanks, tmp_path: Path, overrides: list[str]
) -> None:
    """Times, noise and dropped conditions go on too, and averages of all weights."""
    recipe = drawings.write_recipe(tmp_path)
    settings = [*ADAM, drawings.GENERATOR, "generators.image.condition_dropout=0.3"]
    settings += ["train.global_batch_size=4", "train.micro_batch_size=1", "train.ema_decay=0.9"]
    settings += ["train.steps=4", "train.save_every=2", *overrides]
    run(run_ranks, recipe, *settings, "name=whole")
    runs = tmp_path / "runs"
    checkpoint = shutil.copytree(runs / "whole", runs / "part") / "checkpoints" / "step_2"
    run(run_ranks, recipe, *settings, "name=part", resume_from=checkpoint)
    expected, got = metrics(recipe, "whole"), metrics(recipe, "part")
    assert [m["step"] for m in got] == [0, 1, 2, 3]
    for key in ("loss", "loss_language", "loss_image", "grad_norm", "lr", "tokens"):
        assert [m[key] for m in got] == [m[key] for m in expected], key
    assert all(m["loss"] == m["loss_language"] + m["loss_image"] for m in expected)
    ours, theirs = (read(runs / name / "checkpoints" / "step_4") for name in ("part", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert any(name.startswith("optimizer.exp_avg.image.") for name in theirs)
    has_queries = "generators.image.condition=prompt" not in overrides
    assert ("optimizer.exp_avg.language.queries.image" in theirs) == has_queries
    assert ("ema.language.queries.image" in theirs) == has_queries
    before = read(checkpoint)
    moved = {name for name in before if not torch.equal(before[name], theirs[name])}
    assert any(name.startswith("image.") for name in moved)
    assert any(name.startswith("ema.image.") for name in moved)
    assert ("language.queries.image" in moved) == has_queries


@pytest.mark.slow
def test_a_bf16_run_resumes_in_another_layout(run_ranks: RunRanks, recipe: Path) -> None:
    settings = [*ADAM, "train.steps=4", "train.save_every=2", "train.precision=bf16"]
    run(run_ranks, recipe, *LAYOUT, *settings)
    whole = metrics(recipe)
    checkpoint = recipe.parent / "runs" / "tiny" / "checkpoints" / "step_2"
    other = ["language.grid.tp=2", "language.grid.sp=true", "encoders.vision.grid.dp=2"]
    run(run_ranks, recipe, *other, *settings, "name=other", resume_from=checkpoint)
    # Layouts add in another order: of 8 bits of mantissa the first ones differ.
    for got, expected in zip(metrics(recipe, "other"), whole[2:], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=2e-2)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-1)


@pytest.mark.slow
def test_sample_that_stays_unreadable_counts_once_over_all_resumes(
    run_ranks: RunRanks, recipe: Path
) -> None:
    corrupt(recipe)  # sample 0 of 12
    fours = [*LAYOUT, *ADAM, "train.global_batch_size=4", "train.save_every=2"]
    sixes = [*ADAM, "train.global_batch_size=6", "train.micro_batch_size=2"]
    checkpoints = recipe.parent / "runs" / "tiny" / "checkpoints"

    run(run_ranks, recipe, *fours, "train.steps=2")  # samples 0-3, 4-7
    # 8-11, and in the next epoch 0-3.
    run(run_ranks, recipe, *fours, "train.steps=4", resume_from=checkpoints / "step_2")
    # In another layout, by sixes, which do not divide the 16 samples that are done: 4-9, 10-3.
    other = ["encoders.vision.grid.dp=2", "train.steps=6"]
    run(run_ranks, recipe, *sixes, *other, resume_from=checkpoints / "step_4")
    assert [m["step"] for m in metrics(recipe)] == [0, 1, 2, 3, 4, 5]
    assert [m["skipped_samples"] for m in metrics(recipe)] == [1] * 6
    assert [(bad["key"], bad["step"]) for bad in bad_samples(recipe)] == [("sample0000", 0)]
    done = read_progress(checkpoints / "step_6")
    expected = Progress(step=6, samples=28, skipped_samples=1, skipped=frozenset({(0, 0)}))
    assert replace(done, mixtures=()) == expected
    assert [mixture.first for mixture in done.mixtures] == [0]


@pytest.mark.parametrize(
    ("before", "after"), [(64, 128), pytest.param(128, 64, marks=pytest.mark.slow)]
)
def test_a_checkpoint_with_another_number_of_vocabulary_rows_is_refused(
    run_ranks: RunRanks, recipe: Path, before: int, after: int
) -> None:
    """Megatron would leave rows as they were drawn, or rows of the checkpoint out."""
    key = "language.model.vocab_multiple"
    run(run_ranks, recipe, *LAYOUT, "train.steps=1", f"{key}={before}")
    checkpoint = recipe.parent / "runs" / "tiny" / "checkpoints" / "step_1"
    settings = [*LAYOUT, "train.steps=2", f"{key}={after}"]
    expected = (
        rf"embeddings\.weight is \[{before}, .*, but the model's is \[{after}, .*vocab_multiple"
    )
    with pytest.raises(RanksFailed, match=expected):
        run(run_ranks, recipe, *settings, resume_from=checkpoint)
