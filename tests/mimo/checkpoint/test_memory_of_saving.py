"""A rank writes its state from where it is, and reads it to where it belongs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from tests import language_steps
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.language_steps import Job
from tests.mimo import tiny
from tests.mimo.runs import save

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)

# About 8 M parameters: in fp32 4 bytes of weight and 8 of Adam's moments for each.
SIZES = {
    "hidden_size": 256,
    "ffn_hidden_size": 1024,
    "num_layers": 4,
    "vocab_multiple": 16384,
}
JOBS = {
    "plain": Job(optimizer="adam", settings=SIZES, grid={"dp": 2}),
    "distributed": Job(optimizer="adam", settings=SIZES, grid={"dp": 2}, distributed=True),
    "distributed tp2 bf16": Job(
        optimizer="adam",
        settings=SIZES,
        grid={"dp": 2, "tp": 2},
        distributed=True,
        dtype=torch.bfloat16,
    ),
}


def give_back_at_once() -> None:
    """Let what is freed leave this process, so that its peak is of what was held at a time.

    By itself, malloc keeps some of it: how much depends on which thread was first.
    """
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in ((_M_MMAP_THRESHOLD, 1 << 16), (_M_TRIM_THRESHOLD, 1 << 16)):
        assert mallopt(parameter, value) == 1


def peak_growth(action: Callable[[], Any]) -> int:
    """Return the largest growth of the process during `action`, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = memory_status("VmRSS")
    action()
    return memory_status("VmHWM") - before


def memory_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def save_and_load(rank: int, job: Job, directory: Path) -> dict[str, int]:
    """Bytes of what this rank holds and has written, and the growth while saving and loading."""
    from mimo.checkpoint.tensors import read_index

    give_back_at_once()
    trainer = language_steps.Trainer(job)
    module = trainer.module()
    held = list(module.pieces("load", with_optimizer=True))
    for piece in held:
        # Replicas hold the same.
        seed = crc32(f"{piece.key} {piece.row} {piece.column}".encode())
        piece.values.normal_(generator=torch.Generator().manual_seed(seed))
    sums = [piece.values.double().sum().item() for piece in held]
    saving = peak_growth(lambda: language_steps.save(trainer, directory))
    written = sum(p.values.numel() * p.values.element_size() for p in module.pieces("save", True))
    for piece in held:
        piece.values.zero_()
    # What the first exchange of replicas takes once, whatever they exchange.
    replicas = module.replicas
    dist.all_gather_object([None] * replicas.size(), rank, group=replicas)
    one = torch.zeros(1 << 20)
    dist.all_gather_into_tensor(one.repeat(replicas.size()), one, group=replicas)
    del one
    time.sleep(0.1)  # gloo's thread lets go of it a little later
    loading = peak_growth(lambda: language_steps.load(trainer, directory))
    assert [piece.values.double().sum().item() for piece in held] == sums
    whole = sum(
        tensor.matrix[0] * tensor.matrix[1] * tensor.dtype.itemsize
        for tensor in read_index(directory).values()
    )
    return {
        "held": sum(p.values.numel() * p.values.element_size() for p in held),
        "written": written,
        "whole": whole,
        "saving": saving,
        "loading": loading,
    }


def save_while_training(rank: int, job: Job, directory: Path, recipe: Recipe) -> dict[str, int]:
    """Bytes of what this rank holds and writes, and the growth in each of two saves."""
    from mimo.checkpoint.folder import Progress
    from mimo.checkpoint.save import Saver

    give_back_at_once()
    module = language_steps.Trainer(job).module()
    held, written = (
        sum(p.values.numel() * p.values.element_size() for p in module.pieces(purpose, True))
        for purpose in ("load", "save")
    )
    saver = Saver({"language": module}, directory, recipe)
    first, following = (peak_growth(lambda n=n: save(saver, Progress(n, n))) for n in (1, 2))
    return {"held": held, "written": written, "first": first, "next": following}


@pytest.mark.parametrize("job", quick_values(JOBS, "distributed"))
def test_async_saving_needs_one_copy_of_the_state_and_reuses_it(
    run_ranks: RunRanks, tmp_path: Path, job: Job
) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), ["train.async_save=true"])
    num_ranks = job.grid["dp"] * job.grid.get("tp", 1)
    for measured in run_ranks(save_while_training, num_ranks, job, tmp_path / "c", recipe):
        assert 0.95 * measured["written"] <= measured["first"] <= 1.2 * measured["held"]
        assert measured["first"] <= measured["written"] + 0.2 * measured["held"]
        assert measured["next"] <= 0.2 * measured["held"], "the copy's memory is used again"


@pytest.mark.parametrize("job", quick_values(JOBS, "distributed"))
def test_saving_and_loading_need_at_most_a_fifth_of_the_state_on_top(
    run_ranks: RunRanks, tmp_path: Path, job: Job
) -> None:
    results = run_ranks(save_and_load, job.grid["dp"] * job.grid.get("tp", 1), job, tmp_path)
    for measured in results:
        assert measured["held"] > 25 * 2**20
        assert measured["saving"] <= 0.2 * measured["held"]
        assert measured["loading"] <= 0.2 * measured["held"]
        # Everybody writes an equal share of the whole.
        assert measured["written"] == pytest.approx(measured["whole"] / len(results), rel=0.1)
    assert sum(measured["written"] for measured in results) == results[0]["whole"]
