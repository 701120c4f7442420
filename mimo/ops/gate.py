"""Gated activations, such as SwiGLU, in fewer passes than autograd makes of their parts.

Letters: F inner size of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_GRADIENTS: dict[Any, Callable[..., Tensor]] = {
    functional.silu: torch.ops.aten.silu_backward.grad_input,
    functional.gelu: torch.ops.aten.gelu_backward.grad_input,
}


def gate(both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """both (..., 2F) -> activation(first half) * second half, (..., F).

    activation: SiLU or GELU, or a partial of these. Its output is kept for the backward, which
    writes both halves of the gradient in place instead of joining them.
    """
    gated = _Gate.apply(both, activation)
    assert isinstance(gated, Tensor)
    return gated


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        opened, values = both.chunk(2, dim=-1)
        active = activation(opened)
        ctx.save_for_backward(both, active)
        ctx.activation = activation
        return active * values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), (both, active) = gradients, ctx.saved_tensors
        opened, values = both.chunk(2, dim=-1)
        total = both.new_empty(both.shape)
        of_opened, of_values = total.chunk(2, dim=-1)
        torch.mul(gradient, active, out=of_values)
        torch.mul(gradient, values, out=of_opened)
        function, options = ctx.activation, {}
        if isinstance(function, partial):
            function, options = function.func, function.keywords
        _GRADIENTS[function](of_opened, opened, **options, grad_input=of_opened)
        return total, None
