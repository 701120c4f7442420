"""Normalisation layers for layer specs.

Megatron's local norms refuse sequence parallelism; these are plain PyTorch and mark their
weights, so that their gradients are summed over the tensor-parallel group when each rank has
seen only its slice of the sequence.

Letters: S sequence, B batch, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., H) of two dimensions or more, weight (H,), both fp32 or fp64 -> (..., H).

    On a GPU it is torch's fused norm. On a CPU torch composes the norm of operators that autograd
    follows one by one; this one computes the same bits in half the time.
    """
    if not x.is_cpu:
        return nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    y = _RMSNorm.apply(x, weight, eps)
    assert isinstance(y, Tensor)
    return y


class _RMSNorm(torch.autograd.Function):
    """Operators in the order of torch's composite norm and its gradient, in place where possible.

    r is 1 / root mean square, so y = w * (x * r).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = x.square()
        r = y.mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return torch.mul(x, r, out=y).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight, r) = gradients, ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (x * r).mul_(g).flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            of_x = g * weight
            # The gradient of r, (..., 1), then of the mean square, times 2.
            slope = (of_x * x).sum(-1, keepdim=True).mul_(-0.5).mul_(r * r * r)
            of_x.mul_(r).add_(x * slope.div_(x.shape[-1]).mul_(2))
        return of_x, of_weight, None


def _parameter(config, hidden_size: int, value: float) -> nn.Parameter:
    """(H,), marked so that Megatron sums its gradient under sequence parallelism."""
    parameter = nn.Parameter(torch.full((hidden_size,), value, dtype=config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


class _Norm(nn.Module):
    start = 1.0  # of the weight

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, hidden_size, self.start)


class RMSNorm(_Norm):
    """Root-mean-square norm, computed in fp32: (..., H) -> (..., H), same dtype as its input.

    In 16 bits it is rounded before the factor is applied, as in transformers, so the factor is no
    argument of torch's fused norm, which would round once.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) -> (..., H)."""
        if x.dtype == torch.float32 or x.dtype == torch.float64:
            return rms_norm(x, self.weight, self.eps)
        return self.weight * nn.functional.rms_norm(x, (x.shape[-1],), None, self.eps)


class ZeroCenteredRMSNorm(_Norm):
    """`RMSNorm` whose factor is 1 + weight, so that weights start at 0, as in Gemma.

    The factor is applied in fp32, before the result is cast back. Source: transformers
    `Gemma3RMSNorm`.
    """

    start = 0.0
    zero_centered_gamma = True  # the name of Transformer Engine's norms for it

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) -> (..., H)."""
        wide = x if x.dtype == torch.float64 else x.float()
        factor = 1 + self.weight.to(wide.dtype)
        return rms_norm(wide, factor, self.eps).to(x.dtype)


class LayerNorm(_Norm):
    """Mean and variance norm with a bias: (..., H) -> (..., H), same dtype as its input."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = _parameter(config, hidden_size, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) -> (..., H)."""
        return nn.functional.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


def norm_class(config) -> type[_Norm]:
    """Our class for the norms of a stack with this `TransformerConfig`."""
    if config.normalization == "LayerNorm":
        return LayerNorm
    return ZeroCenteredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm
