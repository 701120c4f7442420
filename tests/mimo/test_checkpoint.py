"""Which checkpoints stay, and where the data goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mimo.checkpoint_folder import drop_old
from tests.conftest import RunRanks
from tests.mimo import tiny


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_checkpoint_just_written_stays_whatever_steps_stand_beside_it(
    tmp_path: Path, keep: int
) -> None:
    for age, step in enumerate([1500, 300, 600]):  # resumed from an earlier step: 600 is newest
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        os.utime(folder, (1000 + age, 1000 + age))
    drop_old(tmp_path, keep, newest=tmp_path / "step_600")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == set(["step_600", "step_300", "step_1500"][:keep])


def positions_after_resume(rank: int, path: Path) -> tuple[int, int, int]:
    from mimo.dataset import item_processors, open_dataset, open_tokenizer
    from mimo.layout import build_layout
    from mimo.recipe import load_recipe
    from mimo.step_plan import StepPlanner

    recipe = load_recipe(path)
    chat = open_tokenizer(recipe)
    dataset = open_dataset(recipe, "sources", chat, item_processors(recipe))
    assert dataset is not None
    planner = StepPlanner(
        build_layout(recipe),
        {"vision": ("image",)},
        dataset.indexes,
        dataset.order,
        2,
        1,
        done=(5, 60),
    )
    first = planner.microbatches(5)[0].samples.sample[0]
    return planner.samples_before(5), planner.samples_before(6), int(first)


def test_another_batch_size_goes_on_with_the_sample_after_the_last_one(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    tiny.write_samples(tmp_path)
    # Five steps of 12 samples are done; the sixth has 2: samples 60 and 61 of the order.
    before, after, first = run_ranks(positions_after_resume, 1, tiny.write_recipe(tmp_path))[0]
    assert (before, after) == (60, 62)
    assert first == 60 % len(tiny.IMAGES_PER_SAMPLE)
