"""Language models of the Qwen2.5 kind: GQA, biases on queries, keys and values, SwiGLU, RMSNorm.

The rotary embedding is Qwen2.5-VL's, in which time, height and width each have a block of channels,
so text-only positions give plain Qwen2.5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from mimo.engines import megatron as engine
from mimo.families.hf_config import Config
from mimo.families.keymap import Weight
from mimo.families.languages._decoder import (
    PRE_NORMS,
    MRopeSettings,
    decoder_weights,
    mrope_settings_from_hf,
)
from mimo.families.languages._decoder import build as build


class Settings(MRopeSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""

    def stack_shape(self) -> engine.StackShape:
        """Add biases to queries, keys and values."""
        return replace(super().stack_shape(), qkv_bias=True)

    def rotary(self) -> nn.Module:
        """Return rotary positions in which each axis has a block of channels."""
        return engine.MRope(engine.contiguous_axes(self.mrope_section), self.rotary_base)


def settings_from_hf(config: Config) -> dict[str, Any]:
    """Return recipe keys for Qwen2.5-VL's configuration, or Qwen2.5's. Raises ValueError."""
    return mrope_settings_from_hf(config, section=[16, 24, 24])


def weights_in_hf(settings: Settings) -> list[Weight]:
    """Return every parameter of the whole model, as runs of Qwen2.5-VL's tensors."""
    return decoder_weights(settings, PRE_NORMS, qkv_bias=True)
