"""Rows of a tensor by their numbers, with a gradient that adds up well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ADDS_UP_IN_FP32 = (torch.bfloat16, torch.float16)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x (T, ...), rows (n,) int64 on its device -> (n, ...). A row may be asked for repeatedly.

    The gradient of a 16-bit row is added up in fp32: a GPU would round after every addition.
    Adding takes no sorting of the rows, unlike the gradient of ``x[rows]``. On a GPU it has no
    fixed order, unless PyTorch is told to use deterministic algorithms.
    """
    if x.dtype not in _ADDS_UP_IN_FP32:
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
