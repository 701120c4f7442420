"""Attention inside items equals dense attention with transformers' mask, whoever holds the rows."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.lone_module import noise

HEADS, GROUPS, SIZE = 4, 2, 8
SCALE = 0.3
# Both are fp64 and differ by rounding (2e-16) alone: sums of up to 96 terms, some of about 10, in
# another order.
ROUNDING = 1e-12
# Items at the beginning, at the end, touching, alone in a segment, cut by every chunk's border.
LENGTHS = (24, 16, 8, 48)
ITEMS = ((0, 7), (9, 5), (19, 5), (40, 8), (49, 4), (53, 4), (61, 30))


def visible(
    lengths: tuple[int, ...], items: tuple[tuple[int, int], ...], window: int | None
) -> Tensor:
    """(T, T) bool: same segment AND window AND (causal OR same item)."""
    total = sum(lengths)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    item = torch.arange(total) - total  # unlike each other
    for number, (start, length) in enumerate(items):
        item[start : start + length] = number
    query, key = torch.arange(total)[:, None], torch.arange(total)
    seen = (key <= query) | (item[:, None] == item)
    if window is not None:
        seen &= key > query - window
    return seen & (segment[:, None] == segment)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q (T, N, D), k and v (T, G, D), mask (T, T) -> (T, N, D)."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q, k) * SCALE
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("nqk,knd->qnd", weights, v)


def inputs(total: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, out_gradient = (noise(seed, total, HEADS, SIZE).double() for seed in (0, 3))
    k, v = (noise(seed, total, GROUPS, SIZE).double() for seed in (1, 2))
    return q, k, v, out_gradient


@st.composite
def packed_lanes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], int]:
    cp = draw(st.integers(1, 3))
    lengths = tuple(2 * cp * n for n in draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    items, start = [], 0
    for length in lengths:
        at = start
        for gap, size in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)))):
            if at + gap + size <= start + length:
                items.append((at + gap, size))
                at += gap + size
        start += length
    return lengths, tuple(items), cp


@given(packed_lanes(), st.none() | st.integers(1, 12))
def test_the_blocks_of_all_ranks_are_the_mask(lane: Any, window: int | None) -> None:
    from mimo.ops.attention_plan import cat_rows, item_calls
    from mimo.ops.segments import zigzag_indices

    lengths, items, cp = lane
    mask = visible(lengths, items, window)
    for rank in range(cp):
        mine = zigzag_indices(lengths, cp, rank) if cp > 1 else torch.arange(sum(lengths))
        text, parts, back = item_calls(lengths, items, window, cp, rank)
        calls = [(call.blocks, cat_rows(call.rows)) for call in (text, parts)]
        # The keys that each query of both calls sees, by the definition of blocks and windows.
        seen = []
        for blocks, rows in calls:
            assert len(rows) == sum(blocks.queries)
            for count, (first, end) in zip(blocks.queries, blocks.keys, strict=True):
                query, key = torch.arange(end - count, end)[:, None], torch.arange(sum(lengths))
                sees = (key >= first) & (key < end)
                if blocks.causal:
                    sees = sees & (key <= query)
                if blocks.window is not None:
                    sees = sees & (key > query - blocks.window)
                seen.append(sees.expand(count, -1))
        rows = torch.cat([rows for _, rows in calls])
        assert torch.equal(rows[back], torch.arange(len(mine)))
        assert torch.equal(torch.cat(seen)[back], mask[mine])
