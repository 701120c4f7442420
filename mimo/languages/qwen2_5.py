"""Language models of the Qwen2.5 kind: GQA, biases on queries, keys and values, SwiGLU, RMSNorm.

The rotary embedding is Qwen2.5-VL's, in which time, height and width each have a block of channels,
so text-only positions give plain Qwen2.5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mimo.engines import megatron as engine
from mimo.families.hf_config import Config, expect
from mimo.families.keymap import Weight
from mimo.languages._decoder import check_grid
from mimo.languages._hf import PRE_NORMS, decoder_weights
from mimo.languages._mrope import (
    ITEM_RULES,
    MRopeDecoderSettings,
    build_mrope_decoder,
    mrope_settings_from_hf,
)

if TYPE_CHECKING:
    from mimo.engines.megatron import LanguageModel

__all__ = [
    "ITEM_RULES",
    "Settings",
    "build",
    "check_grid",
    "settings_from_hf",
    "weights_in_hf",
]

Settings = MRopeDecoderSettings


def build(
    settings: Settings,
    ctx: engine.ModuleContext,
    num_tokens: int,
    max_sequence_length: int,
    seed: int,
) -> LanguageModel:
    """This rank's chunk with freshly drawn weights, the same in every layout.

    num_tokens: of the tokenizer, without the padding of the vocabulary.
    """
    return build_mrope_decoder(
        settings,
        replace(settings.stack_shape(), qkv_bias=True),
        engine.ContiguousMRope,
        ctx,
        num_tokens,
        max_sequence_length,
        seed,
    )


def settings_from_hf(config: Config) -> dict[str, Any]:
    """Recipe keys under ``language.model`` for Qwen2.5-VL's configuration, or Qwen2.5's.

    Raises ValueError.
    """
    expect(config["text_config"], "text_config", use_sliding_window=False)
    return mrope_settings_from_hf(config, section=[16, 24, 24])


def weights_in_hf(settings: Settings) -> list[Weight]:
    """Every parameter of the whole model, as what it consists of in Qwen2.5-VL's checkpoints."""
    return decoder_weights(settings, settings.tie_word_embeddings, PRE_NORMS, qkv_bias=True)
