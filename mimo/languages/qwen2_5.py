"""Language models of the Qwen2.5 kind: GQA, biases on queries, keys and values, SwiGLU, RMSNorm.

The rotary embedding is Qwen2.5-VL's, in which time, height and width each have a block of channels,
so text-only positions give plain Qwen2.5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mimo import megatron as engine
from mimo.item_rules import ItemRules
from mimo.languages._decoder import MRopeDecoderSettings, build_decoder
from mimo.languages._sizes import check_grid

if TYPE_CHECKING:
    from mimo.megatron import LanguageModel

__all__ = ["ITEM_RULES", "Settings", "build", "check_grid"]

ITEM_RULES = ItemRules(positions="mrope", bidirectional=False)


class Settings(MRopeDecoderSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""


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
    return build_decoder(
        settings,
        replace(settings.stack_shape(), qkv_bias=True),
        lambda: engine.ContiguousMRope(
            settings.head_size, settings.mrope_section, settings.rotary_base
        ),
        ctx,
        num_tokens,
        max_sequence_length,
        seed,
    )
