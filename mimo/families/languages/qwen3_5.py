"""Language models of the Qwen3.5 kind: three layers of linear attention to one of full attention.

Linear layers are Gated DeltaNet (`mimo.engines.megatron.delta_net`). Full layers have GQA, norms on
queries and keys, a sigmoid gate on each head's output, and rotary positions (interleaved mRoPE) in
a part of each head. SwiGLU; norm factors are 1 + weight, except that of the linear layers' output.
Source: transformers `Qwen3_5TextModel`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Self

from pydantic import model_validator

from mimo.config.bounds import Heads, Layers, RotaryBase, Width
from mimo.engines import megatron as engine
from mimo.families.flops import Product, attention_products
from mimo.families.hf_config import Config, expect
from mimo.families.keymap import Source, Weight, interleaved, plain
from mimo.families.languages._decoder import (
    PRE_NORMS,
    QK_NORMS,
    MRopeSettings,
    decoder_weights,
    layer_names,
    mrope_settings_from_hf,
    norm_weights,
    proportional,
    qkv_weights,
)
from mimo.families.languages._decoder import build as build
from mimo.ops.layers import interleaved_axes

_LINEAR, _FULL = "linear", "attention"
_THEIR_KINDS = {_LINEAR: "linear_attention", _FULL: "full_attention"}
_SECTION = (11, 11, 10)


class Settings(MRopeSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""

    engines: ClassVar = ("megatron",)
    axes_of: ClassVar = staticmethod(interleaved_axes)
    qk_norm: ClassVar = True

    rotary_base: RotaryBase = 10_000_000.0
    full_attention_interval: Layers = 4
    """Layers whose number is a multiple of this, counted from 1, have full attention."""
    linear_num_key_heads: Heads = 16
    """Query and key heads of linear attention; value heads share them in equal groups."""
    linear_num_value_heads: Heads = 32
    """Value heads of linear attention."""
    linear_key_size: Width = 128
    """Width of a query or key head of linear attention."""
    linear_value_size: Width = 128
    """Width of a value head of linear attention."""
    conv_width: Width = 4
    """Tokens that the convolution before linear attention sees, its own included."""

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if sum(self.mrope_section) > self.head_size // 2:
            raise ValueError(
                f"mrope_section {list(self.mrope_section)} must sum to half of head_size at most, "
                f"{self.head_size // 2}"
            )
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.linear_num_value_heads} must be a multiple of "
                f"linear_num_key_heads {self.linear_num_key_heads}"
            )
        return self

    def layer_kinds(self) -> tuple[str, ...]:
        return tuple(
            _LINEAR if number % self.full_attention_interval else _FULL
            for number in range(1, self.num_layers + 1)
        )

    @property
    def layer_period(self) -> int:
        return self.full_attention_interval

    def stack_shape(self) -> dict[str, Any]:
        return super().stack_shape() | {
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            "linear_conv_kernel_dim": self.conv_width,
            "linear_key_head_dim": self.linear_key_size,
            "linear_value_head_dim": self.linear_value_size,
            "linear_num_key_heads": self.linear_num_key_heads,
            "linear_num_value_heads": self.linear_num_value_heads,
        }

    def layer_spec(
        self, config: engine.TransformerConfig, ctx: engine.ModuleContext, kind: str, **parts: Any
    ) -> engine.ModuleSpec:
        if kind == _LINEAR:
            parts["attention"] = engine.GatedDeltaNet
        return super().layer_spec(config, ctx, kind, **parts)

    def grid_problems(self, tp: int, chunks: int, cp: int = 1) -> Iterator[str]:
        yield from super().grid_problems(tp, chunks)
        groups, heads = self.num_query_groups, self.linear_num_key_heads
        if tp > groups and tp % groups == 0:
            yield f"tp={tp} must divide num_query_groups, which is {groups}, for the output gate"
        if heads % (tp * cp):
            axes = f"tp={tp}" if cp == 1 else f"tp · cp = {tp * cp}"
            yield f"{axes} must divide linear_num_key_heads, which is {heads}"

    def attention_products(self, name: str, kind: str) -> list[Product]:
        """Count a linear layer's state three times: a token reads it by key and query, and writes.

        Chunked kernels do more work than that.
        """
        size = self.hidden_size
        if kind == _FULL:
            heads = (self.num_attention_heads, self.num_query_groups, self.head_size)
            return attention_products(name, kind, "token", size, heads, has_gate=True)
        keys, values = self._linear_widths
        rows = 2 * keys + 2 * values + 2 * self.linear_num_value_heads
        return [
            Product(f"{name}.linear_qkv.weight", "token", (rows, size)),
            Product(f"{name}.conv_weight", "token", (2 * keys + values, self.conv_width)),
            Product(None, "token", (3 * self.linear_key_size, values)),
            Product(f"{name}.linear_proj.weight", "token", (size, values)),
        ]

    @property
    def _linear_widths(self) -> tuple[int, int]:
        """All keys and all values of a linear layer."""
        keys = self.linear_num_key_heads * self.linear_key_size
        return keys, self.linear_num_value_heads * self.linear_value_size

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        """Scale down; rotate half of each head, and keep enough key heads for cp of 2.

        A smaller norm_eps would amplify the rounding noise of states near 0.
        """
        has_both_kinds = len(set(self.layer_kinds())) == 2
        interval = 2 if has_both_kinds else 1 if self.full_attention_interval == 1 else chunks + 1
        heads = 2 * math.lcm(2, tp)
        grouped = self.linear_num_value_heads > self.linear_num_key_heads
        return super()._scaled_sizes((1 + has_both_kinds) * chunks, tp) | {
            "head_size": 16,
            "full_attention_interval": interval,
            "mrope_section": proportional(self.mrope_section, 4),
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads * (2 if grouped else 1),
            "linear_key_size": 8,
            "linear_value_size": 12,
            "norm_eps": 0.01,
        }


def settings_from_hf(config: Config) -> dict[str, Any]:
    """Return recipe keys for Qwen3.5's configuration. Raises ValueError."""
    text = config["text_config"]
    expect(text, "text_config", attn_output_gate=True)
    rope, settings = text["rope_parameters"], mrope_settings_from_hf(config, _SECTION)
    channels = int(settings["head_size"] * rope.get("partial_rotary_factor", 1.0)) // 2
    section = rope.get("mrope_section", _SECTION)
    if "vision_config" not in config:
        section = proportional(tuple(section), channels)
    if sum(section) != channels:
        raise ValueError(
            f"text_config.rope_parameters.mrope_section is {section!r}; it must sum to half of the "
            f"channels that turn, {channels}"
        )
    kinds = text["layer_types"]
    interval = (kinds.index(full) if (full := _THEIR_KINDS[_FULL]) in kinds else len(kinds)) + 1
    settings |= {
        "mrope_section": list(section),
        "full_attention_interval": interval,
        "linear_num_key_heads": text["linear_num_key_heads"],
        "linear_num_value_heads": text["linear_num_value_heads"],
        "linear_key_size": text["linear_key_head_dim"],
        "linear_value_size": text["linear_value_head_dim"],
        "conv_width": text["linear_conv_kernel_dim"],
    }
    if [_THEIR_KINDS[kind] for kind in Settings(**settings).layer_kinds()] != list(kinds):
        raise ValueError(
            f"text_config.layer_types is {kinds}; only one layer of full attention after each "
            f"{interval - 1} of linear attention is supported"
        )
    return settings


def attention_weights(settings: Settings, layer: int) -> list[Weight]:
    """Return a layer's attention, as runs of Qwen3.5's tensors."""
    if settings.layer_kinds()[layer] == _LINEAR:
        return _linear_weights(settings, layer)
    norms = norm_weights(settings, layer, QK_NORMS)
    return [*norms, *qkv_weights(settings, layer, has_gate=True)]


def _linear_weights(settings: Settings, layer: int) -> list[Weight]:
    our_layer, their_layer = layer_names(layer)
    ours, theirs = f"{our_layer}.self_attention", f"{their_layer}.linear_attn"
    size, heads = settings.hidden_size, settings.linear_num_key_heads
    (keys, values), strengths = settings._linear_widths, settings.linear_num_value_heads
    key, value, strength = keys // heads, values // heads, strengths // heads

    def parts(source: Source) -> list[tuple[Source, int, int]]:
        """Query, key and values of each head, from all queries, all keys, all values."""
        return [(source, 0, key), (source, keys, key), (source, 2 * keys, value)]

    mixed = 2 * keys + values
    inputs = [
        *parts(Source(f"{theirs}.in_proj_qkv.weight", (mixed, size))),
        (Source(f"{theirs}.in_proj_b.weight", (strengths, size)), 0, strength),
        (Source(f"{theirs}.in_proj_a.weight", (strengths, size)), 0, strength),
        (Source(f"{theirs}.in_proj_z.weight", (values, size)), 0, value),
    ]
    conv = Source(f"{theirs}.conv1d.weight", (mixed, 1, settings.conv_width))
    return [
        interleaved(f"{ours}.linear_qkv.weight", inputs, heads),
        interleaved(f"{ours}.conv_weight", parts(conv), heads),
        plain(f"{ours}.a_log", f"{theirs}.A_log", strengths),
        plain(f"{ours}.dt_bias", f"{theirs}.dt_bias", strengths),
        plain(f"{ours}.norm_weight", f"{theirs}.norm.weight", settings.linear_value_size),
        plain(f"{ours}.linear_proj.weight", f"{theirs}.out_proj.weight", size, values),
    ]


weights_in_hf = partial(decoder_weights, norms=PRE_NORMS, attention=attention_weights)
