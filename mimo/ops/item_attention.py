"""Causal attention in which the tokens of an item see each other in both directions (Gemma-3).

A query outside items sees what is before it; one inside an item also sees the rest of the item. A
sliding window bounds how far back a query sees, even inside its item, but never how far ahead.
Source: transformers `create_masks_for_vision_model`: sliding AND (causal OR same item).

Items are cut out of a rank's queries. What is left are causal blocks; the parts of items are blocks
without causality. Every kernel takes each of the two in one call, whatever the number of items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from mimo.engines.megatron.segments import AttentionBlocks, held_chunks


@dataclass
class ItemCall:
    """What one rank computes in a call of the kernel, block by block as it is found. Host tensors.

    queries, keys, causal, window: as of `AttentionBlocks`. rows: for each block, which of this
    rank's rows its queries are. counts: how many are real; then the last of them is repeated.
    """

    causal: bool
    window: int | None
    queries: list[int] = field(default_factory=list)
    keys: list[tuple[int, int]] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, row: int, count: int, padded: int, keys: tuple[int, int]) -> None:
        """``count`` rows from ``row`` on, the last of them repeated up to ``padded``."""
        self.rows.append(torch.arange(row, row + padded).clamp_(max=row + count - 1))
        self.counts.append(count)
        self.queries.append(padded)
        self.keys.append(keys)

    @property
    def blocks(self) -> AttentionBlocks:
        """As kernels take them."""
        return AttentionBlocks(tuple(self.queries), tuple(self.keys), self.causal, self.window)

    def places(self) -> Tensor:
        """Where the real rows stand among the queries of the call."""
        starts = accumulate(self.queries, initial=0)
        return joined([torch.arange(a, a + n) for a, n in zip(starts, self.counts, strict=False)])


def item_calls(
    lengths: tuple[int, ...],
    items: tuple[tuple[int, int], ...],
    window: int | None,
    cp_size: int,
    cp_rank: int,
) -> tuple[ItemCall, ItemCall, Tensor]:
    """What rank ``cp_rank`` of ``cp_size`` computes for segments of these padded ``lengths``.

    items: (start, length) in the lane, ascending, each inside one segment. window: keys that a
    query sees, up to its own; None for all.
    Returns the call of the queries outside items, causal; that of the parts of items, for each item
    and chunk of this rank that meet a block of the queries there against all keys that they see, up
    to the item's end; and (Q,) int64, which brings the rows of both into order. With a window the
    parts' queries reach the item's end too, because windows are counted from there.
    Raises ValueError for a segment that 2·cp does not divide.
    """
    text, parts = ItemCall(True, window), ItemCall(False, window)
    row = 0
    for segment, chunk in held_chunks(lengths, cp_size, cp_rank):
        own = [(a, n) for a, n in items if a in segment]
        assert all(a + n <= segment.stop for a, n in own), "an item sticks out of its segment"
        for first, end, item_end in _stretches(chunk, own):
            oldest = segment.start if window is None else first - window + 1
            oldest, count = max(segment.start, oldest), end - first
            if item_end is None:
                text.add(row, count, count, (oldest, end))
            else:
                reaching = count if window is None else item_end - first
                parts.add(row, count, reaching, (oldest, item_end))
            row += count
    back = torch.empty(row, dtype=torch.int64)
    for call, before in ((text, 0), (parts, sum(text.queries))):
        real = joined([rows[:n] for rows, n in zip(call.rows, call.counts, strict=True)])
        back[real] = call.places() + before
    return text, parts, back


def joined(parts: list[Tensor]) -> Tensor:
    """int64 tensors end to end; there may be none."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def _stretches(chunk: range, items: list[tuple[int, int]]) -> Iterator[tuple[int, int, int | None]]:
    """A chunk of a lane cut at items: (first, end, the item's end or None outside)."""
    at = chunk.start
    for item_start, length in items:
        item_end = item_start + length
        first, end = max(item_start, at), min(item_end, chunk.stop)
        if first >= end:
            continue
        if at < first:
            yield at, first, None
        yield first, end, item_end
        at = end
    if at < chunk.stop:
        yield at, chunk.stop, None
