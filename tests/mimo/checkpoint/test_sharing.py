"""Ranks with equal weights read each byte once between them, and have the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import language_steps
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.language_steps import Job

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
    from mimo.checkpoint import sharing
    from mimo.checkpoint.contents import resumed
    from mimo.checkpoint.tensors import read_index, read_pieces

    sharing._TURN_BYTES = 1 << 14  # many rounds
    module = language_steps.Trainer(job).module()
    index = read_index(folder)
    pieces = resumed(module.pieces("load", with_optimizer=True), index, 1)
    alone = read_pieces(folder, index, pieces)
    expected = [piece.values.clone() for piece in pieces]
    for piece in pieces:
        piece.values.fill_(-7)
    together = sharing.read_shared(folder, index, pieces, module.replicas)
    for piece, values in zip(pieces, expected, strict=True):
        assert torch.equal(piece.values, values), piece.key
    return together, alone


@pytest.mark.parametrize("case", quick_values(READERS, "plain dp4", "distributed dp4"))
def test_replicas_read_an_equal_share_each_and_get_the_same_bits(
    run_ranks: RunRanks, tmp_path: Path, case: tuple[Job, float]
) -> None:
    job, common = case
    run_ranks(language_steps.save_and_go_on, 1, replace(SAVED, steps=2), tmp_path, 1)
    size = 4
    replicas = size // (job.grid.get("tp", 1) * job.grid.get("pp", 1))
    for together, alone in run_ranks(read_both_ways, size, job, tmp_path):
        assert alone > 2**20
        equal = common * alone
        assert together == pytest.approx(alone - equal + equal / replicas, rel=0.12)


def fails_in_the_middle(rank: int, folder: Path) -> str:
    """What a rank says of a file that is cut off where another rank reads it."""
    from mimo.checkpoint.contents import resumed
    from mimo.checkpoint.sharing import read_shared
    from mimo.checkpoint.tensors import read_index
    from mimo.errors import InputError

    module = language_steps.Trainer(replace(SAVED, grid={"dp": 2})).module()
    index = read_index(folder)
    pieces = resumed(module.pieces("load", with_optimizer=True), index, 1)
    torch.distributed.barrier()
    if rank == 0:
        (file,) = folder.glob("tensors_0.safetensors")
        with file.open("r+b") as cut:
            cut.truncate(file.stat().st_size // 2)
    torch.distributed.barrier()
    try:
        read_shared(folder, index, pieces, module.replicas)
    except InputError as error:
        return str(error)
    return ""


def test_a_file_that_ends_while_it_is_read_is_said_by_all_that_wait_for_it(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(language_steps.save_and_go_on, 1, replace(SAVED, steps=2), tmp_path, 1)
    for said in run_ranks(fails_in_the_middle, 2, tmp_path):
        assert "tensors_0.safetensors: the file is cut off" in said
