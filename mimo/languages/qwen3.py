"""Language models of the Qwen3 kind: GQA, norms on queries and keys, SwiGLU, RMSNorm, mRoPE.

The rotary embedding is Qwen3-VL's interleaved one, so text-only positions give plain Qwen3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mimo.engines import megatron as engine
from mimo.families.hf_config import Config, expect
from mimo.families.keymap import Weight
from mimo.languages._decoder import check_grid
from mimo.languages._hf import PRE_NORMS, QK_NORMS, decoder_weights
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
        replace(settings.stack_shape(), qk_norm=True),
        engine.InterleavedMRope,
        ctx,
        num_tokens,
        max_sequence_length,
        seed,
    )


def settings_from_hf(config: Config) -> dict[str, Any]:
    """Recipe keys under ``language.model`` for Qwen3-VL's configuration, or Qwen3's.

    Raises ValueError.
    """
    expect(config["text_config"], "text_config", attention_bias=False, use_sliding_window=False)
    return mrope_settings_from_hf(config, section=[24, 20, 20])


def weights_in_hf(settings: Settings) -> list[Weight]:
    """Every parameter of the whole model, as what it consists of in Qwen3-VL's checkpoints."""
    return decoder_weights(settings, settings.tie_word_embeddings, PRE_NORMS | QK_NORMS)
