"""Core attention over zigzag shares of a sequence equals attention over the whole of it.

Ranks get their share of one drawn sequence; what they return is put together here and compared
with a softmax over all pairs of tokens in fp64.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conftest import RunRanks
from tests.mimo.engines.megatron.test_attention import (
    HEAD_SIZE,
    HEADS,
    TOLERANCE,
    core_attention,
    draw,
    naive_attention,
    value_and_gradients,
)

# Multiples of 2·cp in units of 2·cp: uneven, equal, and the smallest segment there is.
UNITS = [3, 1, 3, 7, 2]


def rows_of_rank(lengths: list[int], cp: int, rank: int) -> Tensor:
    """Positions in the packed sequence that a rank holds, written out from the definition."""
    rows, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * cp)
        rows += [chunks[rank], chunks[2 * cp - 1 - rank]]
        start += length
    return torch.cat(rows)


# ------------------------------------------------------- functions that run inside ranks


def attend_packed(
    rank: int, lengths: list[int], causal: bool, window: int | None, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """Each number of heads: this rank's output and gradients, by its rows of the sequence."""
    from mimo.ops.segments import PackedSegments

    cp = dist.group.WORLD
    assert cp is not None
    attention = core_attention(causal, window, cp=cp)
    segments = PackedSegments.from_lengths(lengths, torch.device("cpu"))
    rows = rows_of_rank(lengths, cp.size(), rank)
    shares = [[t[rows].to(dtype) for t in draw(sum(lengths), *heads)] for heads in HEADS]
    return [
        value_and_gradients(
            lambda q, k, v: attention(q, k, v, None, packed_seq_params=segments), share
        )
        for share in shares
    ]


def attend_dense(
    rank: int, batch: int, length: int, causal: bool, window: int | None
) -> dict[str, Tensor]:
    """(S/C, B, N, D) of four heads over two: output and gradients as rows of the whole batch."""
    cp = dist.group.WORLD
    assert cp is not None
    attention = core_attention(causal, window, cp=cp)
    rows = rows_of_rank([length] * batch, cp.size(), rank)
    share = [t[rows] for t in draw(batch * length, 4, 2)]

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = [x.unflatten(0, (batch, -1)).transpose(0, 1) for x in (q, k, v)]
        output = attention(*inputs, None)
        assert output.shape == (length // cp.size(), batch, 4 * HEAD_SIZE)
        return output.transpose(0, 1).flatten(0, 1).unflatten(-1, (4, HEAD_SIZE))

    return value_and_gradients(dense, share)


def refused_lengths(rank: int) -> list[str]:
    from mimo.ops.segments import PackedSegments

    cp = dist.group.WORLD
    assert cp is not None
    attention = core_attention(causal=True, cp=cp)
    q, k, v, _ = draw(7, 2, 2)
    with pytest.raises(ValueError, match="multiple of") as packed:
        attention(q, k, v, None, packed_seq_params=PackedSegments.from_lengths([4, 10], q.device))
    with pytest.raises(ValueError, match="multiple of") as dense:
        attention(*(x[:, None] for x in (q, k, v)), None)
    with pytest.raises(ValueError, match="pack segments"):
        attention(*(x[:, None] for x in (q, k, v)), torch.ones(7, 7, dtype=torch.bool))
    return [str(packed.value), str(dense.value)]


# ------------------------------------------------------------------------------- tests


def compare(
    shares: list[dict[str, Tensor]], expected: dict[str, Tensor], lengths: list[int], tol: float
) -> None:
    for rank, share in enumerate(shares):
        rows = rows_of_rank(lengths, len(shares), rank)
        for name, tensor in share.items():
            torch.testing.assert_close(
                tensor.double(),
                expected[name][rows],
                rtol=tol,
                atol=tol,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def compare_packed(
    results: list[list[dict[str, Tensor]]],
    lengths: list[int],
    causal: bool,
    window: int | None,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    for number, heads in enumerate(HEADS):
        expected = value_and_gradients(
            lambda q, k, v: naive_attention(q, k, v, lengths, causal, HEAD_SIZE**-0.5, window),
            [t.to(dtype).double() for t in draw(sum(lengths), *heads)],
        )
        compare([shares[number] for shares in results], expected, lengths, tolerance)


@pytest.mark.parametrize("cp", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, None), (False, None), (True, 1), (True, 7), (True, 1000)],
    ids=["causal", "full", "window of one", "window", "wide window"],
)
def test_shares_of_packed_segments_equal_the_whole(
    run_ranks: RunRanks, cp: int, causal: bool, window: int | None
) -> None:
    lengths = [2 * cp * n for n in UNITS]
    results = run_ranks(attend_packed, cp, lengths, causal, window, torch.float32)
    compare_packed(results, lengths, causal, window, torch.float32, TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 5e-2)], ids=["fp64", "bf16"]
)
def test_shares_keep_their_dtype(run_ranks: RunRanks, dtype: torch.dtype, tolerance: float) -> None:
    lengths = [4 * n for n in UNITS]
    results = run_ranks(attend_packed, 2, lengths, True, None, dtype)
    assert {t.dtype for shares in results for share in shares for t in share.values()} == {dtype}
    compare_packed(results, lengths, True, None, dtype, tolerance)


@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, None), (False, None), (True, 5)],
    ids=["causal", "full", "window"],
)
def test_shares_of_a_dense_batch_equal_the_whole(
    run_ranks: RunRanks, causal: bool, window: int | None
) -> None:
    batch, length, cp = 2, 24, 2
    shares = run_ranks(attend_dense, cp, batch, length, causal, window)
    expected = value_and_gradients(
        lambda q, k, v: naive_attention(q, k, v, [length] * batch, causal, HEAD_SIZE**-0.5, window),
        [t.double() for t in draw(batch * length, 4, 2)],
    )
    compare(shares, expected, [length] * batch, TOLERANCE)


def test_lengths_that_two_cp_does_not_divide_and_masks_are_refused(run_ranks: RunRanks) -> None:
    for packed, dense in run_ranks(refused_lengths, 2):
        assert "2·cp = 4" in packed
        assert "a segment of 10 tokens" in packed
        assert "2·cp = 4" in dense
        assert "14" in dense
