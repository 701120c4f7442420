"""Saving on several ranks: what is written, and what stays when it fails or is killed."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import pytest
import torch

from mimo.checkpoint import folder as folder_of_checkpoints
from mimo.checkpoint import tensors
from mimo.checkpoint.folder import Progress, latest_checkpoint, publish
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.reading import read_pieces
from mimo.checkpoint.save import CheckpointFailed, Saver
from mimo.checkpoint.tensors import read_index
from mimo.config.schema import Recipe
from mimo.engines.contract import Piece
from mimo.runtime.processes import RanksFailed
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.runs import save

ROWS, COLUMNS = 512, 1000
ASYNC = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])


class Half:
    """A module whose rows two ranks share; row r is full of the value plus r."""

    def __init__(self, rank: int, first_rows: int = ROWS // 2) -> None:
        self.row, self.end = (0, first_rows) if rank == 0 else (first_rows, ROWS)
        self.weight = torch.empty(self.end - self.row, COLUMNS)
        self.bias = torch.zeros(3, dtype=torch.bfloat16)  # not as long as the next one begins
        self.rank = rank

    def set(self, value: float) -> None:
        self.weight.copy_(value + torch.arange(self.row, self.end).unsqueeze(1))

    def wait_param_gather(self) -> None:
        pass

    def pieces(self, purpose: str, with_optimizer: bool) -> Iterator[Piece]:
        if self.rank == 0:
            yield Piece("m.bias", (3,), 0, 0, self.bias.view(3, 1))
        yield Piece("m.weight", (ROWS, COLUMNS), self.row, 0, self.weight)


def saver_of(module: Half, folder: Path, recipe: Recipe) -> Saver:
    """Return a saver of a model with this only module."""
    return Saver({"m": cast("Any", module)}, folder, recipe)


def recipe_of(folder: Path, overlap: bool, *settings: str) -> Recipe:
    options = [f"train.async_save={str(overlap).lower()}", "train.keep_checkpoints=9", *settings]
    return load_recipe(tiny.write_recipe(folder), options)


def assert_intact(checkpoint: Path, value: float | None = None) -> None:
    """Assert that all files are those of the manifest, and the tensor that of `value`."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["format"] == "mimo checkpoint 1"
    files = {}
    for path in checkpoint.rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            content = path.read_bytes()
            name = path.relative_to(checkpoint).as_posix()
            files[name] = {"bytes": len(content), "crc32": f"{crc32(content):08x}"}
    assert manifest["files"] == files
    if value is not None:
        got = torch.empty(ROWS, COLUMNS)
        whole = Piece("m.weight", (ROWS, COLUMNS), 0, 0, got)
        read_pieces(checkpoint, read_index(checkpoint), [whole])
        assert torch.equal(got[:, 0], value + torch.arange(ROWS)), got[:, 0]
        assert torch.equal(got, got[:, :1].expand(ROWS, COLUMNS))


# ------------------------------------------------------------------- what is written


def copy_slowly(seconds: float) -> None:
    """Delay the copies of asynchronous saves."""
    staged = Saver._copy_to_host

    def late(self: Saver, save: Any) -> list[Piece]:
        time.sleep(seconds)
        return staged(self, save)

    Saver._copy_to_host = late


def save_thrice(rank: int, folder: Path, recipe: Recipe) -> list[int]:
    """Return the number of tensors whose pieces were checked, after each save."""
    checked, gap = 0, tensors._gap

    def count(tensor: Any) -> str | None:
        nonlocal checked
        checked += 1
        return gap(tensor)

    # Blocks training after the line of the step is written.
    folder_of_checkpoints.drop_old = lambda *_: time.sleep(0.3)
    tensors._gap = count
    copy_slowly(0.1)
    module, checks = Half(rank), []
    saver = saver_of(module, folder, recipe)
    for step in (1, 2, 3):
        if step == 3:
            module.__init__(rank, first_rows=100)
        module.set(10.0 * step)
        seconds = saver.begin(Progress(step, step))
        assert seconds > (0.3 if step > 1 and not recipe.train.async_save else 0.0)
        if rank == 0:
            assert not (folder / f"step_{step}").exists(), "it is not published yet"
        if recipe.train.async_save:
            saver.wait_for_copy()
            module.set(-1)  # trained on
        saver.publish()
        if recipe.train.async_save:
            saver.wait()
        checks.append(checked)
    return checks


@ASYNC
def test_a_save_has_the_state_of_its_step_and_a_manifest_and_is_checked_once(
    run_ranks: RunRanks, tmp_path: Path, overlap: bool
) -> None:
    checks = run_ranks(save_thrice, 2, tmp_path / "c", recipe_of(tmp_path, overlap))
    assert checks == [[2, 2, 4], [0, 0, 0]], "once, and again where the cut is another"
    assert (tmp_path / "c" / "latest").read_text() == "step_3"
    assert {path.name for path in (tmp_path / "c").iterdir()} == {
        *("step_1", "step_2", "step_3", "latest")
    }
    for step in (1, 2, 3):
        checkpoint = tmp_path / "c" / f"step_{step}"
        assert_intact(checkpoint, 10.0 * step)
        names = {path.name for path in checkpoint.iterdir()}
        assert names >= {"recipe.yaml", "progress.json", "tensors.json", "manifest.json"}
        assert not any(name.startswith("rank_") for name in names)


def save_between_steps(rank: int, folder: Path, recipe: Recipe) -> int:
    """Return the number of staging buffers; saves of one size share one."""
    module, memories = Half(rank), set()
    saver = saver_of(module, folder, recipe)
    for step in (1, 2):
        module.set(step)
        saver.begin(Progress(step, step))  # waits for the one before
        saver.publish()
        saver.wait_for_copy()
        memories.add(saver._memory.data_ptr())
    with saver:
        pass  # the run ends
    return len(memories)


def test_the_next_save_and_the_end_of_the_run_wait_for_the_save_before(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    addresses = run_ranks(save_between_steps, 2, tmp_path / "c", recipe_of(tmp_path, True))
    assert addresses == [1, 1]
    for step in (1, 2):
        assert_intact(tmp_path / "c" / f"step_{step}", step)


# ----------------------------------------------------------------------- what fails


def save_with_limit(
    rank: int, folder: Path, recipe: Recipe, limited: int, limit: int
) -> tuple[str, float]:
    """Return error and seconds of a save while files of a rank may have `limit` bytes."""
    module = Half(rank)
    saver = saver_of(module, folder, recipe)
    module.set(1)
    save(saver, Progress(1, 1))
    if rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    module.set(2)
    started = time.monotonic()
    if recipe.train.async_save:
        saver.begin(Progress(2, 2))
        saver.publish()
    with pytest.raises(CheckpointFailed) as failed:
        saver.begin(Progress(3 if recipe.train.async_save else 2, 3))
    return str(failed.value), time.monotonic() - started


FAULTS = {
    "tensors of rank 1": (1, 100_000, "rank 1: .*tensors_1.safetensors"),
    "tensors of rank 0": (0, 100_000, "rank 0: .*tensors_0.safetensors"),
    "all of rank 1": (1, 0, "rank 1: .*tensors_1.safetensors"),
}


@ASYNC
@pytest.mark.parametrize("fault", quick_values(FAULTS, "tensors of rank 1"))
def test_a_full_disk_is_an_error_of_all_ranks_that_names_file_reason_and_the_good_checkpoint(
    run_ranks: RunRanks, tmp_path: Path, overlap: bool, fault: tuple[int, int, str]
) -> None:
    limited, limit, file = fault
    folder, recipe = tmp_path / "c", recipe_of(tmp_path, overlap)
    (message, seconds), other = run_ranks(save_with_limit, 2, folder, recipe, limited, limit)
    assert other[0] == message
    assert max(seconds, other[1]) < 20, "no rank waits for one that has failed"
    start = f"the checkpoint of step 2 in {folder} was not written: {file}"
    assert re.match(start, message), message
    assert "File too large" in message
    assert message.endswith(f"the last good checkpoint is {folder / 'step_1'}")
    assert {path.name for path in folder.iterdir()} == {"step_1", "latest"}
    assert_intact(folder / "step_1", 1)


def save_where_no_folder_can_be_made(rank: int, folder: Path, recipe: Recipe) -> str:
    module = Half(rank)
    saver = saver_of(module, folder, recipe)
    with pytest.raises(CheckpointFailed) as failed:
        save(saver, Progress(1, 1))
    return str(failed.value)


def test_a_folder_that_cannot_be_made_is_an_error_of_all_ranks(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    (tmp_path / "c").write_text("")
    messages = run_ranks(
        save_where_no_folder_can_be_made, 2, tmp_path / "c", recipe_of(tmp_path, True)
    )
    assert messages[0] == messages[1]
    assert "Not a directory" in messages[0]
    assert messages[0].endswith("there is no good one before it")


# --------------------------------------------------------------------- what is killed

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def die_at(number: int, inside: Path) -> Callable[[], int]:
    """SIGKILL this process at its n-th step in a folder; returns a count of them."""
    count = 0

    def look(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and str(inside) in str(args[0]):
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait()  # until the signal is there
            count += 1

    sys.addaudithook(look)
    return lambda: count


def write_partial(checkpoints: Path, step: int) -> Path:
    partial = checkpoints / f".step_{step}.partial"
    (partial / "assets").mkdir(parents=True)
    (partial / "assets" / "tokenizer.json").write_text(f"of {step}")
    return partial


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("steps", quick_values({"next": (2, 4), "replaced": (2, 4, 4)}, "replaced"))
def test_a_kill_at_any_point_of_publishing_leaves_only_intact_checkpoints(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
    number, was_killed, latest = 0, True, set()
    while was_killed:
        checkpoints = tmp_path / str(number)
        *before, last = steps
        for step in before:
            publish(write_partial(checkpoints, step), Progress(step, 1), "name: x", keep=2)
        partial = write_partial(checkpoints, last)
        child = os.fork()
        if child == 0:
            die_at(number, checkpoints)
            publish(partial, Progress(last, 9), "name: y", keep=1)
            os._exit(0)
        was_killed = os.waitpid(child, 0)[1] == signal.SIGKILL
        newest = latest_checkpoint(checkpoints)
        assert newest is not None
        latest.add((newest.name, (newest / "recipe.yaml").read_text()))
        for checkpoint in checkpoints.glob("step_*"):
            assert_intact(checkpoint)
        publish(write_partial(checkpoints, 6), Progress(6, 6), "name: z", keep=1)
        assert {path.name for path in checkpoints.iterdir()} == {"step_6", "latest"}
        number += 1
    assert number > 15, "so many points were tried"
    assert {("step_2", "name: x"), ("step_4", "name: y")} <= latest


def save_and_die(rank: int, folder: Path, recipe: Recipe, killed: int, number: int) -> int:
    module = Half(rank)
    saver = saver_of(module, folder, recipe)
    module.set(1)
    save(saver, Progress(1, 1))
    count = die_at(number if rank == killed else -1, folder)
    module.set(2)
    save(saver, Progress(2, 2))
    return count()


# A rank, and before which of its steps in the checkpoints' folder it is killed.
KILLED = [(0, number) for number in range(0, 24, 4)] + [(1, number) for number in range(3)]
KILLS = {f"rank {rank}, {number}": (rank, number) for rank, number in KILLED}


@ASYNC
@pytest.mark.parametrize("kill", quick_values(KILLS, "rank 0, 8", "rank 1, 1"))
def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before_it(
    run_ranks: RunRanks, tmp_path: Path, overlap: bool, kill: tuple[int, int]
) -> None:
    folder = tmp_path / "c"
    with pytest.raises(RanksFailed, match=f"rank {kill[0]} was killed by SIGKILL"):
        run_ranks(save_and_die, 2, folder, recipe_of(tmp_path, overlap), *kill)
    latest = latest_checkpoint(folder)
    assert latest is not None
    assert_intact(latest, int(latest.name.removeprefix("step_")))
    assert_intact(folder / "step_1", 1)
