"""Language models of the Qwen2.5 kind: GQA, biases on queries, keys and values, SwiGLU, RMSNorm.

The rotary embedding is Qwen2.5-VL's, in which time, height and width each have a block of channels,
so text-only positions give plain Qwen2.5.
"""

from functools import partial
from typing import ClassVar

from mimo.families.languages._decoder import (
    PRE_NORMS,
    MRopeSettings,
    decoder_weights,
    mrope_settings_from_hf,
)
from mimo.families.languages._decoder import build as build
from mimo.ops.layers import contiguous_axes


class Settings(MRopeSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""

    axes_of: ClassVar = staticmethod(contiguous_axes)
    qkv_bias: ClassVar = True


settings_from_hf = partial(mrope_settings_from_hf, section=(16, 24, 24))
weights_in_hf = partial(decoder_weights, norms=PRE_NORMS, qkv_bias=True)
