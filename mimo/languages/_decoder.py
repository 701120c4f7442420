"""What decoders with grouped queries and a gated MLP share: sizes, checks, construction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, model_validator
from torch import nn

from mimo.bounds import STRICT, Epsilon, Heads, InitStd, Layers, Vocabulary, Width
from mimo.engines import megatron as engine
from mimo.families.flops import Product, causal_pairs, layer_products

if TYPE_CHECKING:
    from mimo.engines.megatron import (
        LanguageModel,
        ModuleContext,
        ModuleSpec,
        StackShape,
        TransformerConfig,
    )

_SMALL_HEAD = 8


class DecoderSettings(BaseModel):
    """Recipe keys under ``language.model`` that all families have. Numbers of elements."""

    model_config = STRICT

    num_layers: Layers
    """Transformer layers."""
    hidden_size: Width
    """Width between layers."""
    ffn_hidden_size: Width
    """Inner width of the MLP."""
    num_attention_heads: Heads
    """Query heads."""
    num_query_groups: Heads
    """Key and value heads; query heads share them in equal groups."""
    head_size: Width
    """Width of a head."""
    vocab_size: Vocabulary | None = None
    """Tokens that the model knows; as many as the tokenizer has when left out."""
    vocab_multiple: Width = 64
    """The vocabulary is padded to a multiple of this, in every layout alike."""
    tie_word_embeddings: bool = False
    """Use the embedding's weights for the output layer too."""
    norm_eps: Epsilon = 1e-6
    """Added to the variance in norms."""
    init_std: InitStd = 0.02
    """Standard deviation of freshly drawn weights."""

    @model_validator(mode="after")
    def _heads_form_groups(self):
        if self.head_size % 2:
            raise ValueError(f"head_size {self.head_size} must be even: channels turn in pairs")
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_query_groups {self.num_query_groups}"
            )
        return self

    def num_tokens(self, tokenizer_size: int) -> int:
        """Tokens that the model knows, with a tokenizer of this many.

        Raises ValueError for a tokenizer with more than ``vocab_size``.
        """
        if self.vocab_size is None:
            return tokenizer_size
        if tokenizer_size > self.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer_size} tokens, but language.model.vocab_size is "
                f"{self.vocab_size}; use the tokenizer that belongs to the model"
            )
        return self.vocab_size

    def padded_vocab_size(self, num_tokens: int) -> int:
        """Rows of the embedding for a tokenizer of ``num_tokens`` tokens."""
        known = max(num_tokens, self.vocab_size or 0)
        return -(-known // self.vocab_multiple) * self.vocab_multiple

    def scaled_sizes(self, tp: int) -> dict[str, Any]:
        """The sizes of a tiny copy that ``tp`` ranks divide, but for its layers.

        Grouped queries stay grouped, and one group stays one.
        """
        groups = self.num_query_groups if self.num_query_groups == 1 else math.lcm(2, tp)
        grouped = self.num_attention_heads > self.num_query_groups
        return {
            "hidden_size": 32,
            "ffn_hidden_size": math.lcm(48, tp),
            "num_attention_heads": math.lcm(groups * (2 if grouped else 1), tp),
            "num_query_groups": groups,
            "head_size": _SMALL_HEAD,
            "vocab_size": None,
            "vocab_multiple": math.lcm(16, tp),
        }

    def stack_shape(self) -> StackShape:
        """The engine's sizes of the stack, without what a family adds."""
        return engine.StackShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_query_groups,
            head_size=self.head_size,
            norm_eps=self.norm_eps,
        )

    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer; all are alike unless a family says otherwise."""
        return ("attention",) * self.num_layers

    def products(self, vocab_size: int) -> list[Product]:
        """All matrices and attention, in the order of a forward."""
        embedding = "embedding.word_embeddings.weight"
        found = [Product(embedding, "token")]
        for number, kind in enumerate(self.layer_kinds()):
            found += layer_products(
                f"decoder.layers.{number}",
                "token",
                f"{kind} pair",
                self.hidden_size,
                self.ffn_hidden_size,
                self.num_attention_heads,
                self.num_query_groups,
                self.head_size,
                gated=True,
            )
        head = embedding if self.tie_word_embeddings else "output_layer.weight"
        return [*found, Product(head, "loss token", (vocab_size, self.hidden_size))]

    def counts(
        self, lengths: np.ndarray, item_rows: np.ndarray, loss_tokens: int
    ) -> dict[str, float]:
        """Tokens, those with a loss, and pairs of queries and keys of causal layers."""
        return {
            "token": float(lengths.sum()),
            "loss token": float(loss_tokens),
            "attention pair": causal_pairs(lengths),
        }


def check_grid(settings: DecoderSettings, tp: int, pp: int, vocab_size: int) -> list[str]:
    """Problems of a grid with these sizes, each one sentence that names the key.

    pp: pipeline stages times the chunks of each.
    """
    problems = []
    for key, size in (
        ("num_attention_heads", settings.num_attention_heads),
        ("ffn_hidden_size", settings.ffn_hidden_size),
        ("vocabulary (padded by vocab_multiple)", vocab_size),
    ):
        if size % tp:
            problems.append(f"language.grid.tp={tp} must divide {key}, which is {size}")
    if settings.num_query_groups % tp and tp % settings.num_query_groups:
        problems.append(
            f"language.grid.tp={tp} must divide num_query_groups, which is "
            f"{settings.num_query_groups}, or be a multiple of it"
        )
    if settings.num_layers % pp:
        problems.append(
            f"language.grid.pp · vpp = {pp} must divide num_layers, which is {settings.num_layers}"
        )
    return problems


def build_decoder(
    settings: DecoderSettings,
    shape: StackShape,
    rotary: Callable[[], nn.Module],
    ctx: ModuleContext,
    num_tokens: int,
    max_sequence_length: int,
    seed: int,
    embedding_scale: float | None = None,
    layer: Callable[[TransformerConfig, ModuleContext], ModuleSpec] | None = None,
) -> LanguageModel:
    """This rank's chunk; weights that no checkpoint provides are drawn, the same in every layout.

    shape: ``settings.stack_shape()`` with what the family adds. rotary: makes the module that
    stands for `GPTModel.rotary_pos_emb`. embedding_scale: factor of the embeddings of tokens.
    layer: makes the spec of its layers; pre-norm ones without. The others: as of a family's
    ``build``.
    """
    from mimo.engines.megatron.language import LanguageShape, build_gpt

    config = engine.transformer_config(shape, ctx)
    model = build_gpt(
        config,
        ctx,
        LanguageShape(
            num_tokens=num_tokens,
            vocab_size=settings.padded_vocab_size(num_tokens),
            max_sequence_length=max_sequence_length,
            tie_word_embeddings=settings.tie_word_embeddings,
            embedding_scale=embedding_scale,
        ),
        rotary,
        None if layer is None else layer(config, ctx),
    )
    engine.initialize_parameters(
        model,
        config,
        ctx.groups,
        seed,
        settings.init_std,
        chunk=ctx.chunk,
        provided=ctx.provided,
    )
    return model
