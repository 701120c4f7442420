"""Exchange tokens for heads between context-parallel ranks, for layers that scan a whole sequence.

A rank's zigzag share has some tokens of all heads. An all-to-all gives it all tokens of some heads,
and a second one brings results back. Each sends 1 - 1/C of a rank's elements, and their number
stays. Source: Jacobs et al. 2023 (DeepSpeed Ulysses), arXiv:2309.14509.

Letters: T packed tokens of a lane, C context-parallel ranks, K heads of a share, X numbers of one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.ops.segments import LaneOrder


def share_to_heads(share: Tensor, order: LaneOrder, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens (T/C, K, X) -> the lane's tokens of its heads (T, K/C, X), packed order.

    Rank r has the r-th part of the heads. Every rank of the group calls it and takes part in its
    backward, which is `heads_to_share`. order: on the device of ``share``.
    """
    there, back = (partial(way, order=order, group=group) for way in (_to_heads, _to_share))
    return cast("Tensor", _Exchange.apply(share, there, back))


def heads_to_share(lane: Tensor, order: LaneOrder, group: dist.ProcessGroup) -> Tensor:
    """Invert `share_to_heads`: (T, K/C, X) -> (T/C, K, X). Collective, also in its backward."""
    there, back = (partial(way, order=order, group=group) for way in (_to_share, _to_heads))
    return cast("Tensor", _Exchange.apply(lane, there, back))


def _to_heads(share: Tensor, order: LaneOrder, group: dist.ProcessGroup) -> Tensor:
    parts = torch.stack(share.chunk(group.size(), dim=1))  # (C, T/C, K/C, X), by receiver
    return _all_to_all(parts, group).flatten(0, 1).index_select(0, order.to_lane)


def _to_share(lane: Tensor, order: LaneOrder, group: dist.ProcessGroup) -> Tensor:
    shares = lane.index_select(0, order.to_shares)  # by receiver
    parts = _all_to_all(shares, group).unflatten(0, (group.size(), -1))  # by heads
    return torch.cat(parts.unbind(), dim=1)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None
