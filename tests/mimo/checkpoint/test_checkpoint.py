"""Which checkpoints stay, and where the data goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mimo.checkpoint.folder import Progress, drop_old, publish, read_progress, write_progress
from mimo.errors import InputError
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


def test_a_checkpoint_is_on_disk_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: events.append(Path(f"/proc/self/fd/{fd}").readlink().name)
    )
    rmtree = shutil.rmtree

    def remove(path: Path, ignore_errors: bool) -> None:
        events.append(f"removed {path.name}")
        rmtree(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove)
    for step in (1, 2):
        events.clear()
        partial = tmp_path / "checkpoints" / ".partial"
        partial.mkdir(parents=True)
        publish(partial, Progress(step, step), "name: x", keep=1)
    synced = events[: events.index("removed .step_1.removed")]
    assert {"progress.json", "recipe.yaml", ".latest", "checkpoints"} <= set(synced)
    assert synced.index("manifest.json") < synced.index(".partial") < synced.index(".latest")
    assert synced[-2:] == [".latest", "checkpoints"]


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 5, "samples": 2, "passed_over": ["x"]}',
        '{"step": 5, "samples": -2}',
        '{"step": 5, "samples": 2, "more": 1}',
        '{"step": 5, "sam',
        "[]",
    ],
)
def test_damaged_progress_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "progress.json").write_text(text)
    with pytest.raises(InputError, match=r"progress.json is damaged .*copy the checkpoint again"):
        read_progress(tmp_path)


def positions_after_resume(rank: int, path: Path) -> tuple[int, int, int]:
    from data.packing import Used
    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.model.dataset import item_processors, open_dataset, open_tokenizer
    from mimo.model.step_plan import StepPlanner
    from mimo.parallel.build import build_layout

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
        done=(5, Used(61)),
    )
    first = planner.microbatches(5)[0].samples.sample[0]
    return planner.used_before(5).samples, planner.used_before(6).samples, int(first)


def test_another_batch_size_goes_on_with_the_sample_after_the_last_one(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    tiny.write_samples(tmp_path)
    # 61 samples are done, which steps of 2 do not divide; the next has samples 61 and 62.
    before, after, first = run_ranks(positions_after_resume, 1, tiny.write_recipe(tmp_path))[0]
    assert (before, after) == (61, 63)
    assert first == 61 % len(tiny.IMAGES_PER_SAMPLE)


def test_a_count_of_skipped_samples_without_their_names_still_loads(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text('{"step": 5, "samples": 60, "skipped_samples": 3}')
    before = read_progress(tmp_path)
    assert before == Progress(step=5, samples=60, skipped_samples=3)
    after = before.with_skipped({(0, 7)}).with_skipped({(0, 7), (1, 7)})
    assert after.skipped_samples == 5
    write_progress(tmp_path, after)
    assert read_progress(tmp_path) == after
