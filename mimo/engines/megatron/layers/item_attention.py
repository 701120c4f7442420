"""Causal attention in which the tokens of an item see each other in both directions (Gemma-3).

A query outside items sees what is before it; one inside an item also sees the rest of the item. A
sliding window bounds how far back a query sees, even inside its item, but never how far ahead.
Source: transformers `create_masks_for_vision_model`: sliding AND (causal OR same item).

Items are cut out of a rank's queries. What is left are causal blocks; the parts of items are blocks
without causality. Every kernel takes each of the two in one call, whatever the number of items. So
a key is read only by queries that see it, and a batch without items costs nothing extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mimo.engines.megatron.segments import AttentionBlocks, check_divisible


@dataclass(frozen=True)
class ItemBlocks:
    """What one rank computes, in two calls; Q are its query rows. Host tensors.

    text: causal blocks of the queries outside items. text_rows: (n,) int64, which of this rank's
    rows they are.
    parts: for each item and chunk of this rank that meet, a block of the queries there against all
    keys that they see, up to the item's end. Not causal. part_rows: (m,) int64, as text_rows. With
    a window a block's queries reach the item's end too, because windows are counted from there;
    where another rank has those, the last of this rank's own is repeated.
    back: (Q,) int64, brings the text rows followed by the parts' rows into order.
    """

    text: AttentionBlocks
    text_rows: Tensor
    parts: AttentionBlocks
    part_rows: Tensor
    back: Tensor


def item_blocks(
    lengths: tuple[int, ...],
    items: tuple[tuple[int, int], ...],
    window: int | None,
    cp_size: int,
    cp_rank: int,
) -> ItemBlocks:
    """What rank ``cp_rank`` of ``cp_size`` computes for segments of these padded ``lengths``.

    items: (start, length) in the lane, ascending, each inside one segment. window: keys that a
    query sees, up to its own; None for all.
    Raises ValueError for a segment that 2·cp does not divide.
    """
    check_divisible(lengths, cp_size)
    text, parts = _Call(), _Call()
    start = row = 0
    for length in lengths:
        own = [(a, n) for a, n in items if start <= a < start + length]
        assert all(a + n <= start + length for a, n in own), "an item sticks out of its segment"
        chunk = length if cp_size == 1 else length // (2 * cp_size)
        for which in (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank):
            chunk_start = start + which * chunk
            for first, end, item_end in _stretches(chunk_start, chunk_start + chunk, own):
                oldest = start if window is None else max(start, first - window + 1)
                count = end - first
                if item_end is None:
                    text.add(row, count, count, (oldest, end))
                else:
                    reaching = count if window is None else item_end - first
                    parts.add(row, count, reaching, (oldest, item_end))
                row += count
        start += length
    back = torch.empty(row, dtype=torch.int64)
    back[text.real()] = text.places()
    back[parts.real()] = parts.places() + text.num_rows
    return ItemBlocks(
        text=AttentionBlocks(tuple(text.queries), tuple(text.keys), True, window),
        text_rows=_joined(text.rows),
        parts=AttentionBlocks(tuple(parts.queries), tuple(parts.keys), False, window),
        part_rows=_joined(parts.rows),
        back=back,
    )


class _Call:
    """The blocks of one call as they are found. rows: of this rank, one for each query."""

    def __init__(self) -> None:
        self.queries: list[int] = []
        self.keys: list[tuple[int, int]] = []
        self.rows: list[Tensor] = []
        self.counts: list[int] = []

    def add(self, row: int, count: int, padded: int, keys: tuple[int, int]) -> None:
        """``count`` rows from ``row`` on, the last of them repeated up to ``padded``."""
        self.rows.append(torch.arange(row, row + padded).clamp_(max=row + count - 1))
        self.counts.append(count)
        self.queries.append(padded)
        self.keys.append(keys)

    @property
    def num_rows(self) -> int:
        """Queries of the call, repeated ones included."""
        return sum(self.queries)

    def real(self) -> Tensor:
        """The rows without repetitions."""
        return _joined([rows[:n] for rows, n in zip(self.rows, self.counts, strict=True)])

    def places(self) -> Tensor:
        """Where these stand among the queries of the call."""
        starts = accumulate(self.queries, initial=0)
        return _joined([torch.arange(a, a + n) for a, n in zip(starts, self.counts, strict=False)])


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def _stretches(
    first: int, end: int, items: list[tuple[int, int]]
) -> Iterator[tuple[int, int, int | None]]:
    """[first, end) of a lane cut at items: (first, end, the item's end or None outside)."""
    at = first
    for item_start, length in items:
        item_end = item_start + length
        inside = max(item_start, first), min(item_end, end)
        if inside[0] >= inside[1]:
            continue
        if at < inside[0]:
            yield at, inside[0], None
        yield *inside, item_end
        at = inside[1]
    if at < end:
        yield at, end, None
