"""Rows of tensors: put in place, picked by their numbers, and gathered from other ranks.

Letters: S local sequence, B batch (1 for packed), H hidden, n rows, T packed tokens of a lane,
C context-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.engines.megatron.segments import LaneOrder


def place_rows(text: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """text (S, B, H), rows (n, H), positions (n,) int64 local -> (S, B, H).

    Position b·S + s is token s of sequence b: the sequences of a batch follow each other.
    The text embedding of a placeholder gets no gradient; its row does. Even with no rows the
    result depends on ``rows``, so that a backward through it reaches the bridge.

    Raises ValueError when a row has no position or positions lie outside the batch.
    """
    if rows.shape[0] != positions.shape[0]:
        raise ValueError(f"{rows.shape[0]} rows arrived for {positions.shape[0]} positions")
    flat = text.flatten(0, 1).index_copy(0, sequence_first(positions, text), rows.to(text.dtype))
    return flat.view(text.shape)


def sequence_first(positions: Tensor, hidden: Tensor) -> Tensor:
    """Positions b·S + s in a batch -> s·B + b, indices into ``hidden`` (S, B, H) flattened."""
    length, batch = hidden.shape[:2]
    return positions if batch == 1 else positions % length * batch + positions // length


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x (T, ...), rows (n,) int64 on its device -> (n, ...). A row may be asked for repeatedly.

    The gradient of a 16-bit row is added up in fp32: a GPU would round after every addition.
    Adding takes no sorting of the rows, unlike the gradient of ``x[rows]``. On a GPU it has no
    fixed order, unless PyTorch is told to use deterministic algorithms.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x.index_select(0, rows)
    gathered = _GatherRows.apply(x, rows)
    assert isinstance(gathered, Tensor)
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.num_rows = rows, x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        shape = (ctx.num_rows, *gradient.shape[1:])
        total = gradient.new_zeros(shape, dtype=torch.float32)
        total.index_add_(0, ctx.rows, gradient.float())
        return total.to(gradient.dtype), None


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
