"""Who builds what is missing of the indexes: processes of this machine, or one process."""

from __future__ import annotations

import functools
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from data.index.build import build_here
from data.index.shards import find_shards
from data.index.store import load_or_build_index
from mimo.check.workload import Sample, write_shard
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.model.dataset import item_processors, open_dataset, open_tokenizer
from mimo.model.indexing import build_in_processes, shares, tasks_of
from mimo.model.indexing import main as index_main
from mimo.model.recipe_checks import check_data, check_indexed_data
from mimo.report.doctor import main as doctor
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.runs import command
from tests.ranks import MarkedJob


@pytest.fixture
def recipe(tmp_path: Path, run_ranks: RunRanks) -> Path:
    """Of five shards, each of one sample more than the one before.

    The processes are forks of the server that `run_ranks` starts, so that all tests have the same.
    """
    for number in range(5):
        tiny.write_samples(tmp_path, images_per_sample=[1] * (3 + number), name=f"train-{number}")
    return tiny.write_recipe(tmp_path)


def _index_files(recipe: Path) -> list[str]:
    """Of all files below the folder of indexes."""
    return sorted(path.name for path in (recipe.parent / ".index").rglob("*") if path.is_file())


def test_processes_build_what_one_process_builds(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    chat, processors = open_tokenizer(loaded), item_processors(loaded)
    pattern = loaded.data.sources[0].path
    one = load_or_build_index(pattern, chat, processors)
    shutil.rmtree(recipe.parent / ".index")
    seen: list[tuple[int, int]] = []

    build = functools.partial(build_in_processes, workers=3)
    other = load_or_build_index(
        pattern, chat, processors, lambda *done: seen.append(done), build=build
    )
    assert other.catalog.identity == one.catalog.identity
    assert seen[-1] == (sum(shard.size for shard in find_shards(pattern)),) * 2


def test_shards_are_dealt_out_by_size(recipe: Path) -> None:
    tasks = tasks_of(load_recipe(recipe))
    dealt = shares(tasks, 2)
    assert [len(own) for own in dealt] == [3, 2]
    sizes = [[task.shard.size for task in own] for own in dealt]
    assert sorted(map(max, sizes)) == sorted(task.shard.size for task in tasks)[-2:]
    assert sorted(task.file for own in dealt for task in own) == [task.file for task in tasks]


def test_an_interrupted_build_leaves_whole_files_and_the_next_one_goes_on(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    chat, processors = open_tokenizer(loaded), item_processors(loaded)
    tasks = tasks_of(loaded)
    third = sum(task.shard.size for task in tasks[:2])

    def interrupt(done: int, total: int) -> None:
        if done > third:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_here(tasks, chat, processors, interrupt)
    assert _index_files(recipe) == [task.file.name for task in tasks[:2]]
    assert [task.file for task in tasks_of(loaded)] == [task.file for task in tasks[2:]]


def test_mimo_data_index_names_every_damaged_shard_and_indexes_the_others(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = [f"train-{number}-00000.tar" for number in (1, 3)]
    for name in damaged:
        (recipe.parent / name).write_bytes(b"no tar file")
    with pytest.raises(RecipeError, match="data.sources.0.path") as found:
        index_main(recipe, [], 2)
    for name in damaged:
        assert f"{name} is not a whole uncompressed tar" in str(found.value)
    assert len(_index_files(recipe)) == 3
    for number in (1, 3):
        tiny.write_samples(recipe.parent, images_per_sample=[0], name=f"train-{number}")
    assert index_main(recipe, [], 2) == 0
    expected = "5 shards, 17 samples, 15 items, 0 unusable samples left out"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("words", ["Is there anything to read ?", "read the digits"])
def test_index_doctor_check_and_train_warn_of_sources_with_unknown_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    tiny.write_samples(tmp_path)
    write_shard(tmp_path / "own.tar", [Sample((), words, "3 7")] * 8)
    own = f"data.sources=[{{path: {tmp_path}/train-*.tar}}, {{path: {tmp_path}/own.tar}}]"
    recipe = tiny.write_recipe(tmp_path)
    loaded, page = load_recipe(recipe, [own]), tmp_path / "page.html"
    expected = f"warning: {tmp_path}/own.tar: 21.4% of the tokens of its texts are unknown"
    for run in (
        lambda: index_main(recipe, [own], None),
        lambda: doctor(recipe, [own], None, page, None),
        lambda: print(*check_indexed_data(loaded), sep="\n"),
        lambda: check_data(loaded),
    ):
        run()
        warned = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
        assert len(warned) == ("Is" in words)
        assert all(line.startswith(expected) for line in warned)
    assert (expected in page.read_text()) == ("Is" in words)


MANY = 800


def test_ctrl_c_ends_all_processes_of_mimo_data_index_and_leaves_whole_files(recipe: Path) -> None:
    first = recipe.parent / "train-4-00000.tar"
    for number in range(10, 10 + MANY - 5):  # enough for seconds, however late the signal is
        shutil.copy(first, first.with_name(f"train-{number}-00000.tar"))
    job = MarkedJob()
    process = subprocess.Popen(
        command("data", "index", recipe, "--workers", 2),
        env=job.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A shell's background jobs ignore it, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 200
    while not any(recipe.parent.glob(".index/*/*.index")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) != 0
    assert job.leftovers() == []
    done = _index_files(recipe)
    assert 0 < len(done) < MANY
    loaded = load_recipe(recipe)
    left = tasks_of(loaded)  # reads the files, and would warn of damaged ones
    assert len(left) == MANY - len([name for name in done if name.endswith(".index")])


def test_a_data_set_of_a_recipe_builds_nothing_twice(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    chat, processors = open_tokenizer(loaded), item_processors(loaded)
    assert len(tasks_of(loaded)) == 5
    first = open_dataset(loaded, "sources", chat, processors)
    assert tasks_of(loaded) == []
    assert first is not None
    assert len(first.indexes[0]) == 25
