"""Language models of the Qwen3 kind: GQA, norms on queries and keys, SwiGLU, RMSNorm, mRoPE.

The rotary embedding is Qwen3-VL's interleaved one, so text-only positions give plain Qwen3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from mimo.engines import megatron as engine
from mimo.families.hf_config import Config, expect
from mimo.families.keymap import Weight
from mimo.families.languages._decoder import (
    PRE_NORMS,
    QK_NORMS,
    MRopeSettings,
    decoder_weights,
    mrope_settings_from_hf,
)
from mimo.families.languages._decoder import build as build


class Settings(MRopeSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""

    def stack_shape(self) -> engine.StackShape:
        """Add norms on queries and keys."""
        return replace(super().stack_shape(), qk_norm=True)

    def rotary(self) -> nn.Module:
        """Return rotary positions in which the axes alternate among the channels."""
        return engine.MRope(engine.interleaved_axes(self.mrope_section), self.rotary_base)


def settings_from_hf(config: Config) -> dict[str, Any]:
    """Return recipe keys for Qwen3-VL's configuration, or Qwen3's. Raises ValueError."""
    expect(config["text_config"], "text_config", attention_bias=False)
    return mrope_settings_from_hf(config, section=[24, 20, 20])


def weights_in_hf(settings: Settings) -> list[Weight]:
    """Return every parameter of the whole model, as runs of Qwen3-VL's tensors."""
    return decoder_weights(settings, PRE_NORMS | QK_NORMS)
