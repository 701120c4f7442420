"""Language models of the Qwen3.5 kind with experts, as Qwen3.5-35B-A3B.

Layers are those of `qwen3_5`, with experts in place of the MLP: a softmax over all of them, then
the choice, and weights that sum to 1. Each token also goes through a shared expert, times a sigmoid
gate. Source: transformers `Qwen3_5MoeSparseMoeBlock`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from mimo.config.bounds import Width
from mimo.engines import megatron as engine
from mimo.families.flops import Product
from mimo.families.hf_config import Config
from mimo.families.keymap import Weight, plain
from mimo.families.languages import qwen3_5
from mimo.families.languages._decoder import PRE_NORMS, decoder_weights, gated_mlp
from mimo.families.languages._decoder import build as build
from mimo.families.languages._experts import ExpertSettings, expert_sizes, expert_weights

_LAST_OF_EXPERTS = ".mlp.experts.linear_fc2.weight"
_SHARED, _GATE = ".mlp.shared_expert", ".mlp.shared_expert_gate.weight"


class Settings(ExpertSettings, qwen3_5.Settings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""

    shared_expert_size: Width
    """Inner width of the expert that every token goes through."""

    def experts(self) -> engine.Experts:
        return replace(super().experts(), shared_size=self.shared_expert_size)

    def _divided_by_tp(self) -> dict[str, int]:
        return super()._divided_by_tp() | {"shared_expert_size": self.shared_expert_size}

    def products(self, vocab_size: int) -> list[Product]:
        products, size, inner = [], self.hidden_size, self.shared_expert_size
        for product in super().products(vocab_size):
            products.append(product)
            layer, separator, _ = (product.parameter or "").partition(_LAST_OF_EXPERTS)
            if separator:
                products += [
                    Product(f"{layer}{_SHARED}.linear_fc1.weight", "token", (2 * inner, size)),
                    Product(f"{layer}{_SHARED}.linear_fc2.weight", "token", (size, inner)),
                    Product(f"{layer}{_GATE}", "token", (1, size)),
                ]
        return products

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        return super()._scaled_sizes(chunks, tp) | {"shared_expert_size": math.lcm(20, tp)}


def settings_from_hf(config: Config) -> dict[str, Any]:
    """Return recipe keys for Qwen3.5's configuration with experts. Raises ValueError."""
    shared = config["text_config"]["shared_expert_intermediate_size"]
    dense = qwen3_5.settings_from_hf(config)
    return dense | expert_sizes(config) | {"shared_expert_size": shared}


def sparse_weights(settings: Settings, ours: str, theirs: str) -> list[Weight]:
    """Return router, experts and shared expert of a layer. ours, theirs: names of its MLP."""
    size, inner = settings.hidden_size, settings.shared_expert_size
    gate = f"{ours}.shared_expert_gate.weight", f"{theirs}.shared_expert_gate.weight"
    return [
        *expert_weights(settings, ours, theirs),
        *gated_mlp(f"{ours}.shared_expert", f"{theirs}.shared_expert", inner, size),
        plain(*gate, 1, size),
    ]


weights_in_hf = partial(
    decoder_weights, norms=PRE_NORMS, attention=qwen3_5.attention_weights, mlp=sparse_weights
)
