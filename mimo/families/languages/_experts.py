"""Decoders whose layers have experts in place of an MLP: settings, products, published names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from mimo.config.bounds import Width
from mimo.engines import megatron as engine
from mimo.families.contracts import LanguageSettings
from mimo.families.flops import Product
from mimo.families.hf_config import Config, expect
from mimo.families.keymap import Weight, plain
from mimo.families.languages._decoder import DecoderSettings

_CHOSEN = "chosen expert"  # the unit of products: one expert of one token
_FC1, _FC2 = ".mlp.linear_fc1.weight", ".mlp.linear_fc2.weight"
Coefficient = Annotated[float, Field(ge=0, le=1e3)]


class ExpertSettings(DecoderSettings):
    """Keys of decoders with experts; ``ffn_hidden_size`` is the inner width of one."""

    changeable_keys: ClassVar = LanguageSettings.changeable_keys | {
        *("balance_loss", "z_loss", "pool_layers")
    }

    num_experts: Width
    """Experts of a layer."""
    experts_per_token: Width
    """Experts that each token chooses."""
    normalize_weights: bool = True
    """Let the weights of a token's experts sum to 1."""
    balance_loss: Coefficient = 0.0
    """Coefficient of the loss that balances experts, computed for each packed sample; the default
    of transformers is 0.001."""
    z_loss: Coefficient = 0.0
    """Coefficient of the loss that keeps the router's logits small."""
    pool_layers: bool = False
    """Balance experts over all layers together, as transformers does, instead of in each layer."""

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} must be at most num_experts "
                f"{self.num_experts}"
            )
        return self

    @property
    def routers(self) -> tuple[int, int, int]:
        return self.num_layers, self.num_experts, self.experts_per_token

    def experts(self) -> engine.Experts:
        return engine.Experts(
            count=self.num_experts,
            top_k=self.experts_per_token,
            size=self.ffn_hidden_size,
            normalize=self.normalize_weights,
            balance_loss=self.balance_loss,
            z_loss=self.z_loss,
            pools_layers=self.pool_layers,
        )

    def layer_spec(
        self, config: engine.TransformerConfig, ctx: engine.ModuleContext, kind: str, **parts: Any
    ) -> engine.ModuleSpec:
        return super().layer_spec(config, ctx, kind, experts=self.experts(), **parts)

    def _divided_by_tp(self) -> dict[str, int]:
        sizes = super()._divided_by_tp()
        return {key: size for key, size in sizes.items() if key != "ffn_hidden_size"}

    def grid_problems(self, tp: int, chunks: int, cp: int = 1) -> Iterator[str]:
        yield from super().grid_problems(tp, chunks, cp)
        if self.pool_layers and chunks > 1:
            yield f"pp · vpp = {chunks} must be 1 for pool_layers, as a stage knows its layers only"

    def expert_problems(self, ep: int, etp: int) -> Iterator[tuple[str, str]]:
        for axis, size, key in (("ep", ep, "num_experts"), ("etp", etp, "ffn_hidden_size")):
            if (divided := getattr(self, key)) % size:
                yield axis, f"got {size}, but it must divide language.model.{key}, {divided}"

    def products(self, vocab_size: int) -> list[Product]:
        products = []
        for product in super().products(vocab_size):
            name = product.parameter or ""
            if name.endswith(_FC1):
                router = name.replace(_FC1, ".mlp.router.weight")
                shape = (self.num_experts, self.hidden_size)
                products.append(Product(router, product.per, shape))
            if name.endswith((_FC1, _FC2)):
                name = name.replace(".mlp.", ".mlp.experts.")
                product = replace(product, parameter=name, per=_CHOSEN)
            products.append(product)
        return products

    def counts(
        self, lengths: np.ndarray, item_rows: np.ndarray, loss_tokens: int
    ) -> dict[str, float]:
        counts = super().counts(lengths, item_rows, loss_tokens)
        return counts | {_CHOSEN: counts["token"] * self.experts_per_token}

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        experts = {"num_experts": 8, "experts_per_token": min(self.experts_per_token, 3)}
        return super()._scaled_sizes(chunks, tp) | experts


def expert_sizes(config: Config) -> dict[str, Any]:
    """Return the settings of experts. Raises ValueError for a model that also has dense layers."""
    text = config["text_config"]
    expect(text, "text_config", mlp_only_layers=[], decoder_sparse_step=1)
    return {
        "ffn_hidden_size": text["moe_intermediate_size"],
        "num_experts": text.get("num_local_experts") or text["num_experts"],
        "experts_per_token": text["num_experts_per_tok"],
        # Only the router of Qwen3-MoE reads the key; the others always normalize.
        "normalize_weights": text["model_type"] != "qwen3_moe" or bool(text["norm_topk_prob"]),
    }


def expert_weights(settings: ExpertSettings, ours: str, theirs: str) -> list[Weight]:
    """Return the router and the experts of a layer. ours, theirs: names of its MLP."""
    count, size, inner = settings.num_experts, settings.hidden_size, settings.ffn_hidden_size
    first, last = f"{ours}.experts.linear_fc1.weight", f"{ours}.experts.linear_fc2.weight"
    return [
        plain(f"{ours}.router.weight", f"{theirs}.gate.weight", count, size),
        plain(first, f"{theirs}.experts.gate_up_proj", count, 2 * inner, size, stacked=True),
        plain(last, f"{theirs}.experts.down_proj", count, size, inner, stacked=True),
    ]
