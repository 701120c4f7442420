"""Asynchronous saving: the copy has the state of its step however late it is made."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.checkpoint import save as saving
from mimo.checkpoint.folder import Progress
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.reading import read
from mimo.checkpoint.resume import FromScratch
from mimo.checkpoint.save import CheckpointFailed, Saver
from mimo.config.schema import Recipe
from mimo.engines.contract import Piece
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.train.run_folder import make_run_dir
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.mimo.checkpoint.test_saving import Half, assert_intact, copy_slowly, recipe_of, saver_of
from tests.mimo.model.test_fsdp_runs import FSDP, make
from tests.mimo.runs import ADAM, LAYOUT, save


def train_with_slow_copies(rank: int, recipe: Recipe, layout: Layout) -> None:
    from mimo.train.rank import train_in_world

    copy_slowly(0.5)
    train_in_world(recipe, layout, recipe.run_dir, FromScratch())


BESIDE = {
    "plain": [],
    "distributed": ["train.distributed_optimizer=true", "train.ema_decay=0.5"],
    "gathered during the next pass": [
        "train.distributed_optimizer=true",
        "train.overlap_param_gather=true",
    ],
    "fsdp": FSDP,
}


@pytest.mark.parametrize("settings", quick_values(BESIDE, "distributed"))
def test_updates_wait_until_the_state_has_been_copied(
    run_ranks: RunRanks, tmp_path: Path, settings: list[str]
) -> None:
    path, folders = make(tmp_path, "qwen3_vl"), []
    settings = [*settings, *LAYOUT, *ADAM, "train.save_every=1", "train.steps=3"]
    for overlap in ("false", "true"):
        options = [f"train.async_save={overlap}", f"name=overlap_{overlap}"]
        recipe = load_recipe(path, [*settings, *options, "train.keep_checkpoints=9"])
        layout = check_recipe(recipe, None)
        make_run_dir(recipe, resumes=False)
        run_ranks(train_with_slow_copies, layout.world_size, recipe, layout)
        folders.append(recipe.run_dir / "checkpoints")
    for step in (1, 2, 3):
        expected, got = (read(folder / f"step_{step}") for folder in folders)
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), (step, name)


def wait_for_a_copy_in_parts(rank: int, folder: Path, recipe: Recipe) -> tuple[int, float, float]:
    """Return the progress calls of a wait for the copy, its seconds, and those of the save."""
    calls = list[str]()

    def in_parts(self: Saver, save: Any) -> list[Piece]:
        for _ in range(3):
            time.sleep(0.7)
            save.num_copied += 1
        return save.pieces

    saving._EXCHANGE_SECONDS = 0.1
    Saver._copy_to_host = in_parts
    saver = saver_of(Half(rank), folder, recipe)
    saver.begin(Progress(1, 1))
    seconds = saver.wait_for_copy(lambda: calls.append("on"))
    saver.publish()
    saver.wait()
    return len(calls), seconds, saver._blocked_seconds


def test_a_wait_for_a_copy_reports_progress_and_counts_for_the_save(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    for calls, seconds, late in run_ranks(
        wait_for_a_copy_in_parts, 2, tmp_path / "c", recipe_of(tmp_path, True)
    ):
        assert calls >= 2
        assert 1.5 < seconds <= late


def save_where_a_copy_fails(rank: int, folder: Path, recipe: Recipe) -> str:
    """Return the error of the save after one whose copy failed on rank 1."""
    staged = Saver._copy_to_host

    def failing(self: Saver, save: Any) -> list[Piece]:
        if rank == 1 and save.progress.step == 2:
            raise MemoryError("no pages")
        return staged(self, save)

    Saver._copy_to_host = failing
    module = Half(rank)
    module.set(1)
    saver = saver_of(module, folder, recipe)
    save(saver, Progress(1, 1))
    saver.begin(Progress(2, 2))
    saver.wait_for_copy()
    saver.publish()
    with pytest.raises(CheckpointFailed) as failed:
        saver.begin(Progress(3, 3))
    return str(failed.value)


def test_a_failed_copy_is_an_error_of_all_ranks_and_harms_no_checkpoint(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    message, other = run_ranks(save_where_a_copy_fails, 2, folder, recipe_of(tmp_path, True))
    assert message == other
    assert "rank 1: MemoryError: no pages; the last good checkpoint is " in message
    assert_intact(folder / "step_1", 1)
    assert {path.name for path in folder.iterdir()} == {"step_1", "latest"}


def fail_while_a_copy_is_made(rank: int, folder: Path, recipe: Recipe) -> None:
    copy_slowly(0.5)
    module = Half(rank)
    module.set(1)
    saver = saver_of(module, folder, recipe)
    with suppress(ZeroDivisionError), saver:
        saver.begin(Progress(1, 1))
        _ = 1 / 0


def test_a_copy_is_finished_when_training_fails_beside_it(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(fail_while_a_copy_is_made, 2, tmp_path / "c", recipe_of(tmp_path, True))
    assert_intact(tmp_path / "c" / "step_1", 1)
