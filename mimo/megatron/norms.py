"""Normalisation layers for layer specs.

Megatron's local norms refuse sequence parallelism; these are plain PyTorch and mark their
weights, so that their gradients are summed over the tensor-parallel group when each rank has
seen only its slice of the sequence.

Letters: S sequence, B batch, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32: (..., H) -> (..., H), same dtype as its input."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) -> (..., H)."""
        if x.dtype == torch.float32 or x.dtype == torch.float64:
            return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        normed = nn.functional.rms_norm(x.float(), (x.shape[-1],), None, self.eps)
        return self.weight * normed.to(x.dtype)


class LayerNorm(nn.Module):
    """Mean and variance norm with a bias: (..., H) -> (..., H), same dtype as its input."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) -> (..., H)."""
        return nn.functional.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


def norm_class(normalization: str) -> type[RMSNorm] | type[LayerNorm]:
    """Our class for the engine's name of a normalization."""
    return {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[normalization]
