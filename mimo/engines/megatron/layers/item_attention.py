"""Causal attention in which the tokens of an item see each other in both directions (Gemma-3).

A query outside items sees what is before it; one inside an item also sees the rest of the item. A
sliding window bounds how far back a query sees, even inside its item, but never how far ahead.
Source: transformers `create_masks_for_vision_model`: sliding AND (causal OR same item).

Items are cut out of a rank's queries. What is left are causal blocks, which every kernel takes;
the parts of items run through SDPA, with a mask only where the window cuts. So a key is read only
by queries that see it, and a batch without items costs nothing extra.

Letters: Q query rows of this rank, T key rows of the lane, N heads, G key/value heads,
D head size, n queries and K keys of one part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mimo.engines.megatron.layers.attention_kernels import Kernel, repeat_heads
from mimo.engines.megatron.segments import AttentionBlocks, check_divisible


@dataclass(frozen=True)
class ItemPart:
    """The queries of one item that lie in one chunk of this rank.

    row: the first query's number among this rank's rows. place: its position in the lane.
    keys: (first, end) in the lane; ``end`` is the item's end.
    """

    row: int
    num_queries: int
    place: int
    keys: tuple[int, int]


@dataclass(frozen=True)
class ItemBlocks:
    """What one rank computes.

    text: causal blocks of the queries outside items. text_rows: (n,) int64, which of this rank's
    rows they are. back: (Q,) int64, brings text rows followed by the parts' rows into order.
    """

    text: AttentionBlocks
    text_rows: Tensor
    parts: tuple[ItemPart, ...]
    back: Tensor


@functools.lru_cache(maxsize=64)
def item_blocks(
    lengths: tuple[int, ...],
    items: tuple[tuple[int, int], ...],
    window: int | None,
    cp_size: int,
    cp_rank: int,
    device: torch.device,
) -> ItemBlocks:
    """What rank ``cp_rank`` of ``cp_size`` computes for segments of these padded ``lengths``.

    items: (start, length) in the lane, ascending, each inside one segment. window: keys that a
    query sees, up to its own; None for all. device: of the rows; all layers ask for the same.
    Raises ValueError for a segment that 2·cp does not divide.
    """
    check_divisible(lengths, cp_size)
    queries: list[int] = []
    keys: list[tuple[int, int]] = []
    text_rows: list[Tensor] = []
    parts: list[ItemPart] = []
    start = row = 0
    for length in lengths:
        own = [(a, n) for a, n in items if start <= a < start + length]
        assert all(a + n <= start + length for a, n in own), "an item sticks out of its segment"
        chunk = length if cp_size == 1 else length // (2 * cp_size)
        for which in (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank):
            chunk_start = start + which * chunk
            for first, end, item_end in _stretches(chunk_start, chunk_start + chunk, own):
                oldest = start if window is None else max(start, first - window + 1)
                if item_end is None:
                    queries.append(end - first)
                    keys.append((oldest, end))
                    text_rows.append(torch.arange(row, row + end - first))
                else:
                    parts.append(ItemPart(row, end - first, first, (oldest, item_end)))
                row += end - first
        start += length
    text = torch.cat([torch.zeros(0, dtype=torch.int64), *text_rows])
    inside = [torch.arange(part.row, part.row + part.num_queries) for part in parts]
    return ItemBlocks(
        text=AttentionBlocks(tuple(queries), tuple(keys), causal=True, window=window),
        text_rows=text.to(device),
        parts=tuple(parts),
        back=torch.argsort(torch.cat([text, *inside])).to(device),
    )


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


def attend_with_items(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, blocks: ItemBlocks, scale: float
) -> Tensor:
    """q (Q, N, D), k and v (T, G, D) -> (Q, N, D). kernel: for the queries outside items."""
    found = []
    if blocks.text.queries:
        found.append(kernel(q[blocks.text_rows], k, v, blocks.text, scale))
    found += [_attend(q, k, v, part, blocks.text.window, scale) for part in blocks.parts]
    return torch.cat(found)[blocks.back]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, part: ItemPart, window: int | None, scale: float
) -> Tensor:
    first, end = part.keys
    queries = q[part.row : part.row + part.num_queries]
    keys, values = (repeat_heads(x[first:end], q.shape[1]) for x in (k, v))
    mask = None
    last = part.place + part.num_queries - 1
    if window is not None and last - window >= first:
        place = torch.arange(part.place, last + 1, device=q.device)[:, None]
        mask = torch.arange(first, end, device=q.device) > place - window  # (n, K)
    out = nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (queries, keys, values)), attn_mask=mask, scale=scale
    )
    return out[0].transpose(0, 1)
