"""The plan by which core attention treats a microbatch; made once for all layers of one kind.

A plan holds every index and bound that a layer needs; see `PackedSegments.prepare`.

Letters: Q query rows of this rank, T key rows of the lane, N heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mimo.device import send
from mimo.engines.megatron.segments import (
    AttentionBlocks,
    LaneOrder,
    attention_blocks,
    brought,
    zigzag_order,
)
from mimo.ops.attention_kernels import KERNELS
from mimo.ops.item_attention import item_calls, joined
from mimo.ops.rows import gather_rows


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel.

    rows: (n,) int64, the queries that it gets of this rank's; None for all. blocks: as the kernel
    takes them.
    """

    rows: Tensor | None
    blocks: Any


@dataclass(frozen=True)
class AttentionPlan:
    """The calls of one layer.

    lane: order of the lane's keys and values on the context-parallel ranks; None on a lone rank.
    back: (Q,) int64, brings the calls' outputs laid end to end into order; None when they are.
    """

    lane: LaneOrder | None
    calls: tuple[KernelCall, ...]
    back: Tensor | None


@dataclass(frozen=True)
class LayerForm:
    """How a kind of layer attends: what a plan depends on besides the segments.

    kernel: its name in `KERNELS`. window: keys that a query sees, its own included; None for all.
    """

    kernel: str
    causal: bool
    window: int | None = None
    cp_size: int = 1
    cp_rank: int = 0

    def plan(self, lengths: tuple[int, ...], items: tuple[tuple[int, int], ...]) -> AttentionPlan:
        """For segments of these padded ``lengths``, in host tensors.

        items: (start, length) in the lane, of those whose tokens see each other.
        Raises ValueError for a segment that 2·cp does not divide.
        """
        lane = zigzag_order(lengths, self.cp_size) if self.cp_size > 1 else None
        if not items:
            blocks = attention_blocks(lengths, self.causal, self.window, self.cp_size, self.cp_rank)
            return AttentionPlan(lane, (self._call(None, blocks),), None)
        assert self.causal, "without causal attention all tokens of a segment see each other"
        *calls, back = item_calls(lengths, items, self.window, self.cp_size, self.cp_rank)
        found = (self._call(joined(one.rows), one.blocks) for one in calls if one.queries)
        return AttentionPlan(lane, tuple(found), back)

    def _call(self, rows: Tensor | None, blocks: AttentionBlocks) -> KernelCall:
        return KernelCall(rows, KERNELS[self.kernel].prepare(blocks))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """q (Q, N, D), k and v (T, G, D) of the whole lane -> (Q, N, D)."""
        kernel = KERNELS[self.kernel].attend
        found = [
            kernel(q if call.rows is None else gather_rows(q, call.rows), k, v, call.blocks, scale)
            for call in plan.calls
        ]
        packed = torch.cat(found) if len(found) > 1 else found[0]
        return packed if plan.back is None else packed.index_select(0, plan.back)


@functools.lru_cache(maxsize=8)
def batch_plan(form: LayerForm, length: int, batch: int, device: torch.device) -> AttentionPlan:
    """Of ``batch`` segments of one ``length``; the same in all layers and mostly in all steps."""
    plan = form.plan((length,) * batch, ())
    return brought(plan, functools.partial(send, device=device))
