"""Language models of the Qwen3 kind: GQA, norms on queries and keys, SwiGLU, RMSNorm, mRoPE.

The rotary embedding is Qwen3-VL's interleaved one, so text-only positions give plain Qwen3.
"""

from functools import partial
from typing import ClassVar

from mimo.families.languages._decoder import (
    PRE_NORMS,
    QK_NORMS,
    MRopeSettings,
    decoder_weights,
    mrope_settings_from_hf,
)
from mimo.families.languages._decoder import build as build
from mimo.ops.layers import interleaved_axes


class Settings(MRopeSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""

    axes_of: ClassVar = staticmethod(interleaved_axes)
    qk_norm: ClassVar = True


settings_from_hf = partial(mrope_settings_from_hf, section=(24, 20, 20))
weights_in_hf = partial(decoder_weights, norms=PRE_NORMS | QK_NORMS)
