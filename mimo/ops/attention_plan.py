"""The plan of core attention for a microbatch: all indices and bounds of layers of one form.

Causal attention may let the tokens of an item see each other in both directions (Gemma-3). A query
inside an item then sees the rest of the item, too. A sliding window bounds how far back a query
sees, even inside its item, but never how far ahead. Source: transformers
`create_masks_for_vision_model`: sliding AND (causal OR same item). Items are cut out of a rank's
queries: the rest are causal blocks, the parts of items are blocks without causality. A kernel takes
each of the two in one call.

Letters: Q query rows of this rank, T key rows of the lane, N heads, G key/value heads, D head size.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mimo.device import send
from mimo.ops.attention_kernels import KERNELS, AttentionBlocks
from mimo.ops.segments import (
    Form,
    LaneOrder,
    PackedSegments,
    gather_rows,
    held_chunks,
    to_device,
    zigzag_order,
)


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel.

    rows: (n,) int64, its rows of this rank's queries; None for all. blocks: in the kernel's form.
    """

    rows: Tensor | None
    blocks: Any


@dataclass(frozen=True)
class AttentionPlan:
    """The calls of one layer.

    lane: order of the lane's keys and values on the context-parallel ranks; None without any.
    back: (Q,) int64, puts the calls' joined outputs into order; None if they are in order.
    """

    lane: LaneOrder | None
    calls: tuple[KernelCall, ...]
    back: Tensor | None


@dataclass(frozen=True)
class LayerForm:
    """A form of attention: all that a plan depends on besides the segments.

    kernel: its name in `KERNELS`. window: keys that a query sees, its own included; None for all.
    """

    kernel: str
    causal: bool
    window: int | None = None
    cp_size: int = 1
    cp_rank: int = 0

    def plan_of(self, segments: PackedSegments) -> AttentionPlan:
        """Return the plan for these segments, in host tensors."""
        return self.plan(segments.lengths, segments.items)

    def plan(self, lengths: tuple[int, ...], items: tuple[tuple[int, int], ...]) -> AttentionPlan:
        """Return the plan for segments of these padded ``lengths``, in host tensors.

        items: (start, length) in the lane of the items whose tokens see each other.
        Raises ValueError for a segment that 2·cp does not divide.
        """
        lane = zigzag_order(lengths, self.cp_size) if self.cp_size > 1 else None
        if not items:
            blocks = attention_blocks(lengths, self.causal, self.window, self.cp_size, self.cp_rank)
            return AttentionPlan(lane, (self._call(None, blocks),), None)
        assert self.causal, "without causal attention all tokens of a segment see each other"
        text, parts, back = item_calls(lengths, items, self.window, self.cp_size, self.cp_rank)
        calls = (self._call(cat_rows(c.rows), c.blocks) for c in (text, parts) if c.queries)
        return AttentionPlan(lane, tuple(calls), back)

    def _call(self, rows: Tensor | None, blocks: AttentionBlocks) -> KernelCall:
        return KernelCall(rows, KERNELS[self.kernel].prepare(blocks))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """q (Q, N, D), k and v (T, G, D) of the whole lane -> (Q, N, D)."""
        kernel = KERNELS[self.kernel].attend
        outputs = [
            kernel(q if call.rows is None else gather_rows(q, call.rows), k, v, call.blocks, scale)
            for call in plan.calls
        ]
        packed = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return packed if plan.back is None else packed.index_select(0, plan.back)


@functools.lru_cache(maxsize=8)
def batch_plan(form: Form, length: int, batch: int, device: torch.device) -> Any:
    """Return the plan for ``batch`` segments of one ``length``; most steps and layers share it."""
    segments = PackedSegments.from_lengths((length,) * batch, torch.device("cpu"))
    return to_device(form.plan_of(segments), functools.partial(send, device=device))


def attention_blocks(
    lengths: tuple[int, ...], causal: bool, window: int | None, cp_size: int, cp_rank: int
) -> AttentionBlocks:
    """Return a rank's blocks, one per chunk that it holds, for segments of padded ``lengths``.

    Raises ValueError for a segment that 2·cp does not divide.
    """
    assert causal or window is None, "a sliding window needs causal attention"
    queries: list[int] = []
    keys: list[tuple[int, int]] = []
    for segment, chunk in held_chunks(lengths, cp_size, cp_rank):
        oldest = segment.start if window is None else chunk.start - window + 1
        queries.append(len(chunk))
        keys.append((max(segment.start, oldest), chunk.stop if causal else segment.stop))
    return AttentionBlocks(tuple(queries), tuple(keys), causal, window)


@dataclass
class ItemCall:
    """The blocks of one rank in one call of the kernel. Host tensors.

    queries, keys: see `AttentionBlocks`. rows: each block's queries among this rank's. counts: the
    number of them that are real; the rest repeat the last.
    """

    causal: bool
    window: int | None
    queries: list[int] = field(default_factory=list)
    keys: list[tuple[int, int]] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, row: int, count: int, padded: int, keys: tuple[int, int]) -> None:
        """Add a block of ``count`` rows from ``row`` on, the last repeated up to ``padded``."""
        self.rows.append(torch.arange(row, row + padded).clamp_(max=row + count - 1))
        self.counts.append(count)
        self.queries.append(padded)
        self.keys.append(keys)

    @property
    def blocks(self) -> AttentionBlocks:
        return AttentionBlocks(tuple(self.queries), tuple(self.keys), self.causal, self.window)

    def places(self) -> Tensor:
        """Return the positions of the real rows among the queries of the call, int64."""
        starts = accumulate(self.queries, initial=0)
        return cat_rows([torch.arange(a, a + n) for a, n in zip(starts, self.counts, strict=False)])


def item_calls(
    lengths: tuple[int, ...],
    items: tuple[tuple[int, int], ...],
    window: int | None,
    cp_size: int,
    cp_rank: int,
) -> tuple[ItemCall, ItemCall, Tensor]:
    """Return a rank's causal call outside items, its call of items, and the order of their rows.

    The call of items has a block for each item and chunk of this rank that overlap: its queries
    against all keys that they see, up to the item's end. With a window its queries are padded to
    the item's end, from which kernels count windows. order: (Q,) int64.

    items: (start, length) in the lane, ascending, each inside one segment. Raises ValueError for a
    segment that 2·cp does not divide.
    """
    text, parts = ItemCall(True, window), ItemCall(False, window)
    row = 0
    for segment, chunk in held_chunks(lengths, cp_size, cp_rank):
        inside = [(a, n) for a, n in items if a in segment]
        assert all(a + n <= segment.stop for a, n in inside), "an item sticks out of its segment"
        for first, end, item_end in _stretches(chunk, inside):
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
        real = cat_rows([rows[:n] for rows, n in zip(call.rows, call.counts, strict=True)])
        back[real] = call.places() + before
    return text, parts, back


def cat_rows(parts: list[Tensor]) -> Tensor:
    """Join int64 tensors; there may be none."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def _stretches(chunk: range, items: list[tuple[int, int]]) -> Iterator[tuple[int, int, int | None]]:
    """Cut a chunk of a lane at items: (first, end, the item's end or None outside)."""
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
