"""What each rank gets of a sequence, by content; rows in place; the way back of gradients.

Token number i of a sequence is worth i everywhere, so contents are positions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mimo.ops.segments import insert_embeddings, zigzag_indices
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.parallel.partition import PartitionAdapter
from tests.conftest import RunRanks
from tests.mimo import tiny

SEGMENTS = (8, 16)  # of one packed sequence
COLOCATED = ["encoders.vision.placement=colocated", "encoders.vision.grid={tp: 1}"]
# (cp, tp): what rank (cp rank, tp rank) holds of 24 positions.
CP_ONLY_BATCH = [[*range(6), *range(18, 24)], [*range(6, 18)]]
CP_ONLY_PACKED = [
    [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23],
    [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19],
]


def read_zigzag(lengths: tuple[int, ...], cp: int, rank: int) -> list[int]:
    """The rule, read token by token: who has chunk k of 2·cp is k from the nearer end."""
    held, start = [], 0
    for length in lengths:
        for place in range(length):
            chunk = place * 2 * cp // length
            if min(chunk, 2 * cp - 1 - chunk) == rank:
                held.append(start + place)
        start += length
    return held


@given(cp=st.integers(1, 5), chunks=st.lists(st.integers(0, 4), max_size=4), data=st.data())
def test_zigzag_is_the_rule_read_token_by_token(cp: int, chunks: list[int], data) -> None:
    lengths = tuple(2 * cp * chunk for chunk in chunks)
    rank = data.draw(st.integers(0, cp - 1))
    assert zigzag_indices(lengths, cp, rank).tolist() == read_zigzag(lengths, cp, rank)
    everything = torch.cat([zigzag_indices(lengths, cp, r) for r in range(cp)])
    assert everything.sort().values.tolist() == list(range(sum(lengths)))


def test_a_segment_that_does_not_divide_names_the_key_and_what_fits() -> None:
    message = "language.grid.cp = 2: a segment of 10 tokens is not a multiple of 2·cp = 4; pad it"
    with pytest.raises(ValueError, match=message):
        zigzag_indices((8, 10), 2, 0)


@pytest.mark.gpu
def test_zigzag_gives_the_indices_of_transformer_engine() -> None:
    pytest.importorskip("transformer_engine")
    import transformer_engine_torch as tex  # type: ignore[import-not-found]

    bounds = torch.tensor([0, 8, 24], dtype=torch.int32, device="cuda")
    for cp in (2, 4):
        for rank in range(cp):
            theirs = tex.thd_get_partitioned_indices(bounds, 24, cp, rank)
            assert zigzag_indices(SEGMENTS, cp, rank).tolist() == theirs.tolist()


def run_shard(rank: int, cp: int, tp: int, sp: bool, packed: bool, length: int = 24) -> dict:
    """This rank's part of two sequences (one if packed), and the gradient that comes back."""
    import torch.distributed as dist

    from mimo.engines.megatron.parallel import prepare_engine
    from mimo.ops.segments import PackedSegments
    from mimo.parallel.groups import build_topology

    prepare_engine(seed=0)
    grid = GridSpec(LANGUAGE, tp=tp, cp=cp, sp=sp)
    groups = build_topology(Layout(grid, {}, world_size=cp * tp)).modules[LANGUAGE]
    adapter = PartitionAdapter(groups.cp, groups.tp, sp)
    batch = 1 if packed else 2
    place = torch.arange(length, dtype=torch.float32)
    tokens = place.repeat(batch, 1) + 100 * torch.arange(batch)[:, None]  # (B, S)
    hidden = tokens.t()[:, :, None].repeat(1, 1, 3).requires_grad_()  # (S, B, 3)
    segments = PackedSegments.from_lengths(SEGMENTS, torch.device("cpu")) if packed else None
    try:
        part = adapter.shard_embeddings(hidden, segments)
    except ValueError as error:
        return {"error": str(error)}
    part.backward(part.detach() + 1)
    assert hidden.grad is not None
    total = hidden.grad.clone()
    if sp or cp > 1:
        # The scatter's backward gathers, so that tp ranks agree; cp ranks have disjoint parts.
        dist.all_reduce(total, group=adapter.cp)
    return {
        "part": part.detach()[..., 0].t().tolist(),
        "tokens": adapter.slice_tokens(tokens, segments).tolist(),
        "gradient": torch.equal(total, hidden.detach() + 1),
    }


@pytest.mark.parametrize(
    ("cp", "tp", "sp", "packed"),
    [
        (2, 2, True, True),
        (2, 2, False, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((2, 2, True, False), (2, 2, False, True)),
                *((1, 2, True, packed) for packed in (True, False)),
                *((2, 1, False, packed) for packed in (True, False)),
            )
        ),
    ],
)
def test_every_rank_gets_its_slice_of_embeddings_and_of_tokens(
    run_ranks: RunRanks, cp: int, tp: int, sp: bool, packed: bool
) -> None:
    of_cp = {1: [list(range(24))], 2: CP_ONLY_PACKED if packed else CP_ONLY_BATCH}[cp]
    batch = 1 if packed else 2
    for rank, found in enumerate(run_ranks(run_shard, cp * tp, cp, tp, sp, packed)):
        whole = of_cp[rank // tp]
        part = len(whole) // tp
        mine = whole[rank % tp * part : (rank % tp + 1) * part] if sp else whole
        for row in range(batch):
            assert found["part"][row] == [place + 100 * row for place in mine]
            assert found["tokens"][row] == [place + 100 * row for place in whole]
        assert found["gradient"]


def test_a_sequence_that_sp_cannot_cut_names_the_key_and_the_multiple(run_ranks: RunRanks) -> None:
    # 8 tokens divide into 2·cp chunks, and a rank's 4 into tp 4, but not a chunk of 2.
    for found in run_ranks(run_shard, 8, 2, 4, True, False, 8):
        assert found["error"] == (
            "language.grid.sp: a sequence of 8 tokens is not a multiple of 16 "
            "(language.grid.tp 4, cp 2); pad it"
        )


def has_partition(rank: int, path: Path, overrides: list[str]) -> bool:
    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.model.build import build_model
    from mimo.parallel.build import build_layout
    from mimo.parallel.groups import build_topology

    recipe = load_recipe(path, overrides)
    return build_model(recipe, build_topology(build_layout(recipe)), 64).partition is not None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["encoders.vision.grid.dp=2", "language.grid={cp: 2}"], [False, False, True, True]),
        ([*COLOCATED, "language.grid={pp: 2}"], [True, True]),
        ([*COLOCATED, tiny.SECOND_ENCODER, "language.grid={tp: 2}"], [False, True, True]),
    ],
    ids=["disjoint", "colocated", "mixed"],
)
def test_only_ranks_of_the_language_model_cut_sequences(
    run_ranks: RunRanks, tmp_path: Path, overrides: list[str], expected: list[bool]
) -> None:
    path = tiny.write_recipe(tmp_path)
    assert run_ranks(has_partition, len(expected), path, overrides) == expected


def test_rows_of_a_batch_stand_sequence_after_sequence() -> None:
    text = torch.zeros(4, 2, 1, requires_grad=True)
    rows = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    placed = insert_embeddings(text, rows, torch.tensor([1, 3, 6]))
    assert placed[:, :, 0].t().tolist() == [[0, 1, 0, 2], [0, 0, 3, 0]]
    placed.backward(torch.arange(8.0).view(2, 4).t()[:, :, None])
    assert isinstance(text.grad, Tensor)
    assert isinstance(rows.grad, Tensor)
    assert rows.grad[:, 0].tolist() == [1, 3, 6]
    assert text.grad[:, :, 0].t().tolist() == [[0, 0, 2, 0], [4, 5, 0, 7]]


def test_rows_without_a_position_are_refused() -> None:
    with pytest.raises(ValueError, match="2 embeddings arrived for 1 positions"):
        insert_embeddings(torch.zeros(4, 1, 1), torch.zeros(2, 1), torch.tensor([0]))
