"""Ranks with equal weights read each byte once between them, and have the same bits."""

from __future__ import annotations

import errno
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.checkpoint.resume import FromScratch, Resume, Start
from mimo.config.schema import Recipe
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.runtime.ranks import launch
from mimo.train.main import PRELOAD
from mimo.train.run_folder import make_run_dir
from tests import language_steps
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.language_steps import Job
from tests.mimo import tiny
from tests.mimo.checkpoint.manifests import small_checkpoint
from tests.mimo.model.test_fsdp_runs import make
from tests.mimo.runs import LAYOUT

SIZES = {"hidden_size": 128, "ffn_hidden_size": 512, "vocab_multiple": 4096}
SAVED = Job(optimizer="adam", settings=SIZES, learning_rate=0.01)
# Read by: what is equal on all replicas, as a share of what a rank holds.
READERS = {
    "plain dp4": (replace(SAVED, grid={"dp": 4}), 1.0),
    "dp2 cp2": (replace(SAVED, grid={"dp": 2, "cp": 2}), 1.0),
    "distributed dp4": (replace(SAVED, grid={"dp": 4}, distributed=True), 0.67),
    "tp2 dp2": (replace(SAVED, grid={"tp": 2, "dp": 2}), 1.0),
    "pp2 dp2 bf16": (replace(SAVED, grid={"pp": 2, "dp": 2}, dtype=torch.bfloat16), 1.0),
}


def read_both_ways(rank: int, job: Job, folder: Path) -> tuple[int, int]:
    """Bytes that this rank read of what it shares, and those that it would read alone."""
    from mimo.checkpoint import reading
    from mimo.checkpoint.load import pieces_to_resume
    from mimo.checkpoint.reading import read_pieces
    from mimo.checkpoint.tensors import read_index

    reading._TURN_BYTES = 1 << 14  # many rounds
    module = language_steps.Trainer(job).module()
    index = read_index(folder)
    pieces = pieces_to_resume(module.pieces("load", with_optimizer=True), index)
    alone = read_pieces(folder, index, pieces)
    expected = [piece.values.clone() for piece in pieces]
    for piece in pieces:
        piece.values.fill_(-7)
    together = reading.read_shared(folder, index, pieces, module.replicas)
    for piece, values in zip(pieces, expected, strict=True):
        assert torch.equal(piece.values, values), piece.key
    return together, alone


@pytest.mark.parametrize("case", quick_values(READERS, "distributed dp4"))
def test_replicas_read_an_equal_share_each_and_get_the_same_bits(
    run_ranks: RunRanks, tmp_path: Path, case: tuple[Job, float]
) -> None:
    job, common = case
    run_ranks(language_steps.train, 1, replace(SAVED, steps=2), tmp_path, 1)
    size = 4
    replicas = size // (job.grid.get("tp", 1) * job.grid.get("pp", 1))
    for together, alone in run_ranks(read_both_ways, size, job, tmp_path):
        assert alone > 2**20
        equal = common * alone
        assert together == pytest.approx(alone - equal + equal / replicas, rel=0.12)


def fails_in_the_middle(rank: int, folder: Path, lost: str) -> tuple[int, str]:
    """Exit code and words of a rank about a file that ends too early.

    lost: the function of os at which rank 0's disk fails instead, if it does.
    """
    from mimo.checkpoint.load import pieces_to_resume
    from mimo.checkpoint.reading import read_shared
    from mimo.checkpoint.tensors import read_index
    from mimo.errors import InputError

    module = language_steps.Trainer(replace(SAVED, grid={"dp": 2})).module()
    index = read_index(folder)
    pieces = pieces_to_resume(module.pieces("load", with_optimizer=True), index)
    torch.distributed.barrier()
    if rank == 0 and not lost:
        (file,) = folder.glob("tensors_0.safetensors")
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)
    torch.distributed.barrier()
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    sick = mock.patch.object(os, lost, side_effect=stale) if rank == 0 and lost else nullcontext()
    try:
        with sick:
            read_shared(folder, index, pieces, module.replicas)
    except InputError as error:
        return error.exit_code, str(error)
    return 0, ""


def test_a_file_that_ends_early_is_an_error_of_all_replicas(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(language_steps.train, 1, replace(SAVED, steps=2), tmp_path, 1)
    for lost in ("open", "preadv"):
        for code, message in run_ranks(fails_in_the_middle, 2, tmp_path, lost):
            assert (
                "tensors_0.safetensors cannot be read: Stale file handle; that need not" in message
            )
            assert code == 1, "a batch script tries again"
    for code, message in run_ranks(fails_in_the_middle, 2, tmp_path, ""):
        assert "tensors_0.safetensors: the file is cut off" in message
        assert code == 2


# -------------------------------------------------------------------------- what rank 0 reads


class Unsendable(Exception):
    """Of an error that can be written, but not read again: its arguments are not what it takes."""

    def __init__(self, rank: int, *, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")


def hear(rank: int) -> list[str]:
    """What this rank hears of what rank 0 cannot send."""
    from mimo.checkpoint.reading import from_rank_0

    def fail() -> None:
        raise Unsendable(rank, why="so")

    messages = []
    for do in (lambda: hear, lambda: lambda: None, fail):
        try:
            assert from_rank_0(do) is hear
        except (AttributeError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def test_an_error_that_rank_0_cannot_send_ends_all_ranks(run_ranks: RunRanks) -> None:
    for value, error in run_ranks(hear, 2):
        assert "Can't pickle" in value
        assert "rank 0 failed:" in error
        assert "Unsendable: rank 0: so" in error


def train_noting_files(
    rank: int, recipe: Recipe, layout: Layout, run_dir: Path, start: Start
) -> tuple[set[str], list[str]]:
    """Train; the files opened of the folder in Hugging Face format, and those of the checkpoint."""
    from mimo.checkpoint.hf.weights_folder import WeightsFolder
    from mimo.train.rank import train_in_world

    initial, opened = set[str](), list[str]()
    reader = WeightsFolder._reader  # Python does not see what safetensors opens

    def noted(folder: WeightsFolder, file: Path) -> Any:
        initial.add(file.name)
        return reader(folder, file)

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(start, Resume):
            path = Path(str(args[0]))
            opened.extend([path.name] if path.parent == start.checkpoint else [])

    sys.addaudithook(look)
    with mock.patch.object(WeightsFolder, "_reader", noted):
        train_in_world(recipe, layout, run_dir, start)
    return initial, opened


@pytest.mark.slow
def test_ranks_open_only_files_with_their_weights_and_rank_0_alone_the_index(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = make(tmp_path, "qwen3_vl")
    write_tiny(TinyCheckpoint("qwen3_vl", shard_size="100KB"), tmp_path / "base")
    apart = "encoders.vision={placement: disjoint, grid: {dp: 1}}"
    of_runs = []
    for steps, start in ((1, FromScratch()), (2, Resume(tmp_path / "runs/run/checkpoints/step_1"))):
        recipe = load_recipe(path, [apart, f"train.steps={steps}"])
        layout, run_dir = check_recipe(recipe, None), make_run_dir(recipe, steps > 1)
        arguments = (recipe, layout, run_dir, start)
        of_runs.append(run_ranks(train_noting_files, layout.world_size, *arguments))
    scratch, resumed = of_runs
    every = {file.name for file in (tmp_path / "base").glob("*.safetensors")}
    first, *others = [initial for initial, _ in scratch]
    assert first == every
    assert all(initial and initial < every for initial in others)
    first, *others = [[name for name in opened if name.endswith(".json")] for _, opened in resumed]
    assert sorted(first) == ["manifest.json", "progress.json", "tensors.json"]
    assert others == [[], []]
    assert not any(initial for initial, _ in resumed)
    assert all(opened for _, opened in resumed), "tensors are read by all"


@pytest.mark.parametrize("name", ["tensors.json", "progress.json"])
def test_a_broken_file_that_rank_0_reads_ends_all_ranks_with_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    tiny.write_samples(tmp_path)
    recipe = load_recipe(tiny.write_recipe(tmp_path), LAYOUT)
    layout, run_dir = check_recipe(recipe, None), make_run_dir(recipe, resumes=False)
    checkpoint = small_checkpoint(tmp_path / "checkpoints", 1)
    (checkpoint / name).write_text("{")
    args = (recipe, layout, run_dir, Resume(checkpoint), run_dir, time.monotonic())
    assert launch("mimo.train.entry:run_rank", args, layout.world_size, PRELOAD, run_dir) == 2
    errors = capfd.readouterr().err
    assert errors.count("is damaged") == 1, errors
    assert name in errors
    errors = [path.read_text() for path in run_dir.glob("error_rank_*.txt")]
    assert errors
    assert all("is damaged" in error for error in errors), "no rank lost another"
