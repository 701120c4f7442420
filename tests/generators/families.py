"""Tiny generators of every family, with random weights, and items for them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

FAMILIES = ("qwen_image", "lumina2")
H = 24  # of hidden states of the language model

_SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "condition_size": H}
_ITEMS = {"in_channels": 12, "axes_dims_rope": (4, 6, 6)}
_OTHERS: dict[str, dict[str, Any]] = {
    "qwen_image": {},
    "lumina2": {"num_query_groups": 1, "ffn_hidden_size": 40, "axes_lens": (20, 16, 16)},
}


def settings_of(family: str, **changes: Any) -> tuple[Any, Any]:
    """The family's module and its tiny settings."""
    module: Any = importlib.import_module(f"generators.{family}")
    return module, module.Settings(**{**_SIZES, **_ITEMS, **_OTHERS[family], **changes})


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, Any]:
    """The family's module and a transformer whose weights all have random values."""
    module, settings = settings_of(family)
    transformer = module.build(settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in transformer.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            is_norm = param.ndim == 1 and not name.endswith(".bias")
            param.copy_(1 + 0.1 * noise if is_norm else 0.2 * noise)
    for param in transformer.parameters():  # `to` of the module would warn
        param.data = param.data.to(dtype)
    return module, transformer


def draw_items(
    num_items: int, grid: tuple[int, int], rows: int, seed: int = 1, channels: int = 12
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B, S, C), times (B,) and condition (B, T, H)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_items, grid[0] * grid[1], channels, generator=generator)
    times = torch.rand(num_items, generator=generator)
    return tokens, times, torch.randn(num_items, rows, H, generator=generator)
