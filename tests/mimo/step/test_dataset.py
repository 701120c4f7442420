"""What a recipe says about the order of samples holds for the steps that are planned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mimo.hf.recipes import load_recipe
from mimo.layout.grids import build_layout
from mimo.step.dataset import item_processors, open_dataset, open_tokenizer
from mimo.step.plan import StepPlanner
from tests.mimo import tiny


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tiny.write_samples(tmp_path, images_per_sample=[0] * 6)
    tiny.write_samples(tmp_path, images_per_sample=[0] * 8, name="other")
    return tiny.write_recipe(tmp_path)


def drawn(path: Path, *overrides: str, steps: int = 25) -> np.ndarray:
    """(source, sample) of every sample of the first steps, (2, n)."""
    recipe = load_recipe(path, overrides)
    dataset = open_dataset(recipe, "sources", open_tokenizer(recipe), item_processors(recipe))
    assert dataset is not None
    media = {"vision": ("image",)}
    indexes, order = dataset.indexes, dataset.order
    planner = StepPlanner(build_layout(recipe), media, indexes, order, 80, 1)
    samples = [planner.microbatches(step)[0].samples for step in range(steps)]
    return np.concatenate([np.stack([one.source, one.sample]) for one in samples], axis=1)


def test_sources_are_drawn_by_their_weights_whatever_their_sizes(path: Path) -> None:
    folder, settings = path.parent, ["data.shuffle_block=1", "train.seed=1"]
    heavy = f'{{path: "{folder}/train-*.tar", weight: 3.0}}'
    light = f'{{path: "{folder}/other-*.tar", weight: 1.0}}'
    first = drawn(path, *settings, f"data.sources=[{heavy}, {light}]")
    second = drawn(path, *settings, f"data.sources=[{light}, {heavy}]")
    # 2,000 draws: a standard deviation is 0.01.
    assert np.bincount(first[0]) / 2000 == pytest.approx([0.75, 0.25], abs=0.05)
    assert np.bincount(second[0]) / 2000 == pytest.approx([0.25, 0.75], abs=0.05)


def test_the_seed_and_the_shuffle_block_of_the_recipe_change_the_order(path: Path) -> None:
    def epoch(seed: int, block: int) -> list[int]:
        settings = [f"train.seed={seed}", f"data.shuffle_block={block}"]
        return drawn(path, *settings, steps=1)[1, :6].tolist()

    assert epoch(1, 1) == epoch(1, 1) != epoch(2, 1)
    assert sorted(epoch(1, 1)) == sorted(epoch(2, 1)) == [0, 1, 2, 3, 4, 5]
    assert epoch(1, 6) == epoch(2, 6) == [0, 1, 2, 3, 4, 5] != epoch(1, 1)
