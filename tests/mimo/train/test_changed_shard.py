"""A shard that is written under a run ends it, with the reason and the exit code of bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.resume import FromScratch
from mimo.config.schema import Recipe
from mimo.errors import InputError
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.train.run_folder import make_run_dir
from tests.conftest import RunRanks
from tests.mimo import tiny


def _train_and_change(rank: int, recipe: Recipe, layout: Layout, run_dir: Path) -> tuple[str, int]:
    import mimo.train.rank

    opened = mimo.train.rank.dataset_of
    shard = Path(recipe.data.sources[0].path.replace("*", "00000"))

    def open_and_change(*given: Any) -> Any:
        dataset = opened(*given)
        shard.write_bytes(shard.read_bytes() + bytes(512))
        return dataset

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mimo.train.rank, "dataset_of", open_and_change)
        with pytest.raises(InputError) as error:
            mimo.train.rank.train_in_world(recipe, layout, run_dir, FromScratch())
    return str(error.value), error.value.exit_code


def test_a_shard_that_is_written_under_the_run_ends_it_with_exit_code_2(
    tmp_path: Path, run_ranks: RunRanks
) -> None:
    tiny.write_samples(tmp_path)
    recipe = load_recipe(tiny.write_recipe(tmp_path), ["encoders.vision.placement=colocated"])
    layout = check_recipe(recipe, None)
    run_dir = make_run_dir(recipe, resumes=False)
    ((message, code),) = run_ranks(_train_and_change, layout.world_size, recipe, layout, run_dir)
    assert "train-00000.tar has changed since it was indexed" in message
    assert "`mimo data index`" in message
    assert code == 2
