"""Matrix products, in fp32 on a CPU by oneDNN.

PyTorch gives them to MKL. On an AMD EPYC of the Zen 5 kind oneDNN is twice as fast; others have not
been measured.

Letters: M rows, K summed over, N columns; I inputs and O outputs of a linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ONEDNN = torch.backends.mkldnn.is_available()
_SMALLEST = 2**21
"""M·K·N below which a call costs more than it saves."""


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left (M, K), right (N, K), of any strides -> left · rightᵀ (M, N), written to ``out`` if any.

    Which of the two computes it, and so the last bits, depends on the sizes alone.
    """
    (m, k), n = left.shape, right.shape[0]
    is_single = left.dtype == right.dtype == torch.float32
    if not (_ONEDNN and left.is_cpu and is_single and m * k * n >= _SMALLEST):
        return torch.mm(left, right.T, out=out)
    found = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return found if out is None else out.copy_(found)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., I), weight (O, I) -> (..., O)."""
    y = _Linear.apply(x, weight)
    assert isinstance(y, Tensor)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return product(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(rows, weight.T).view(*gradient.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            of_weight = product(rows.T, x.flatten(0, -2).T)
        return of_x, of_weight
