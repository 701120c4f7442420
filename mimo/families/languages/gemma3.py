"""Language models of the Gemma-3 kind: sliding and global layers, norms around every branch.

Each global layer follows five local layers with a sliding window and another rotary base; GQA,
norms on queries and keys, tanh GeGLU, norm factors of 1 + weight, tied embeddings scaled by
sqrt(hidden_size). Inside an item tokens see each other in both directions. Source: transformers
`Gemma3TextModel` and `create_masks_for_vision_model`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import nn
from torch.nn import functional

from mimo.config.bounds import AttentionScalar, Layers, RotaryBase, RotaryFactor, Window
from mimo.engines import megatron as engine
from mimo.families.contracts import ItemRules
from mimo.families.flops import causal_pairs
from mimo.families.hf_config import Config, expect, rope_settings
from mimo.families.languages._decoder import (
    QK_NORMS,
    DecoderSettings,
    decoder_sizes,
    decoder_weights,
)
from mimo.families.languages._decoder import build as build

# Shorter than the tiny samples of `mimo verify`, so that sliding layers differ from global ones.
_SMALL_WINDOW = 8


class Settings(DecoderSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""

    item_rules: ClassVar = ItemRules(positions="plain", bidirectional=True)

    query_pre_attn_scalar: AttentionScalar | None = None
    """Attention scores are divided by its root; head_size when left out."""
    sliding_window: Window = 1024
    """Keys that a query of a local layer sees, its own included."""
    sliding_window_pattern: Layers = 6
    """Layers whose number is a multiple of this, counted from 1, are global."""
    local_rotary_base: RotaryBase = 10_000.0
    """Base of rotary positions in local layers."""
    rotary_base: RotaryBase = 1_000_000.0
    """Base of rotary positions in global layers."""
    rotary_factor: RotaryFactor = 1.0
    """Global positions are divided by it (linear scaling): 8 for models of 4B and larger."""
    tie_word_embeddings: bool = True

    def layer_kinds(self) -> tuple[str, ...]:
        return tuple(
            "sliding" if number % self.sliding_window_pattern else "global"
            for number in range(1, self.num_layers + 1)
        )

    def counts(
        self, lengths: np.ndarray, item_rows: np.ndarray, loss_tokens: int
    ) -> dict[str, float]:
        """Count pairs by kind of layer; an item's tokens also see those after them."""
        rows = np.asarray(item_rows, np.float64)
        later = float((rows * (rows - 1) / 2).sum())
        numbers = super().counts(lengths, item_rows, loss_tokens)
        numbers["global pair"] = numbers.pop("attention pair") + later
        numbers["sliding pair"] = causal_pairs(lengths, self.sliding_window) + later
        return numbers

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        """Scale down; the share of query_pre_attn_scalar in head_size stays."""
        kinds = len(set(self.layer_kinds()))
        pattern = 1 if self.sliding_window_pattern == 1 else 2
        if kinds == 1 and pattern > 1:  # fewer layers than the pattern: none is global
            pattern = chunks + 1
        sizes, scalar = super()._scaled_sizes(kinds * chunks, tp), self.query_pre_attn_scalar
        return sizes | {
            "query_pre_attn_scalar": scalar and scalar * sizes["head_size"] / self.head_size,
            "sliding_window": min(self.sliding_window, _SMALL_WINDOW),
            "sliding_window_pattern": pattern,
            "init_std": 0.2,
        }

    def stack_shape(self) -> dict[str, Any]:
        scalar = self.query_pre_attn_scalar
        return super().stack_shape() | {
            "activation_func": partial(functional.gelu, approximate="tanh"),
            "qk_layernorm": True,
            "softmax_scale": None if scalar is None else scalar**-0.5,
            "layernorm_zero_centered_gamma": True,
            "window_size": (self.sliding_window - 1, 0),
            "window_attn_skip_freq": self.sliding_window_pattern,
        }

    def rotary(self) -> nn.Module:
        bases = self.local_rotary_base, self.rotary_base
        return engine.LocalGlobalRope(self.head_size, *bases, self.rotary_factor)

    def layer_spec(
        self, config: engine.TransformerConfig, ctx: engine.ModuleContext, kind: str, **parts: Any
    ) -> engine.ModuleSpec:
        return engine.local_global_layer_spec(config, ctx.lora)

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5


_SANDWICH_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "self_attn_bda.norm",
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "mlp_bda.norm",
}


def settings_from_hf(config: Config) -> dict[str, Any]:
    """Return recipe keys for Gemma-3's configuration. Raises ValueError."""
    text = config["text_config"]
    expect(
        text,
        "text_config",
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        use_bidirectional_attention=False,
    )
    where, rope = "text_config.rope_parameters", text["rope_parameters"]
    local, _ = rope_settings(rope["sliding_attention"], f"{where}.sliding_attention", "default")
    base, factor = rope_settings(
        rope["full_attention"], f"{where}.full_attention", "default", "linear"
    )
    kinds = ["global" if kind == "full_attention" else "sliding" for kind in text["layer_types"]]
    settings = {
        **decoder_sizes(config),
        "query_pre_attn_scalar": float(text["query_pre_attn_scalar"]),
        "sliding_window": text["sliding_window"],
        # Without any global layer, all that counts is that the first would come later.
        "sliding_window_pattern": (kinds.index("global") if "global" in kinds else len(kinds)) + 1,
        "local_rotary_base": local,
        "rotary_base": base,
        "rotary_factor": factor,
    }
    if list(Settings(**settings).layer_kinds()) != kinds:
        raise ValueError(
            f"text_config.layer_types is {text['layer_types']}; only one global layer after each "
            f"{settings['sliding_window_pattern'] - 1} sliding ones is supported"
        )
    return settings


weights_in_hf = partial(decoder_weights, norms=_SANDWICH_NORMS | QK_NORMS)
