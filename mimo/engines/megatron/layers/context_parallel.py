"""Keys and values of a whole lane on every context-parallel rank.

Letters: T packed tokens of a lane, C context-parallel ranks, S sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.engines.megatron.segments import LaneOrder


class _GatherLane(torch.autograd.Function):
    """All-gather of dim 0 and a permutation; the backward sums over ranks and scatters."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, order: LaneOrder, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.order = group, order
        gathered = share.new_empty(share.shape[0] * group.size(), *share.shape[1:])
        dist.all_gather_into_tensor(gathered, share.contiguous(), group=group)
        return gathered.index_select(0, order.to_lane)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (whole,) = gradients
        by_rank = whole.index_select(0, ctx.order.to_shares)
        share = whole.new_empty(whole.shape[0] // ctx.group.size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(share, by_rank, group=ctx.group)
        return share, None, None


def gather_lane(share: Tensor, order: LaneOrder, group: dist.ProcessGroup) -> Tensor:
    """This rank's zigzag share (T/C, ...) -> the whole lane's tokens (T, ...) in packed order.

    Every rank of the group calls it, in the forward and again in the backward, which returns the
    sum of all ranks' gradients of this rank's share. Nothing is replicated beforehand.
    order: of the lane's segments, on the device of ``share``.
    """
    whole, expected = share.shape[0] * group.size(), len(order.to_lane)
    assert expected == whole, f"{expected} tokens in segments, {whole} on the ranks"
    gathered = _GatherLane.apply(share, order, group)
    assert isinstance(gathered, Tensor)
    return gathered
