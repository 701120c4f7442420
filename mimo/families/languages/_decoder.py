"""What decoders with grouped queries and a gated MLP share: construction and published names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn

from mimo.engines import megatron as engine
from mimo.families.contracts import LanguageSettings
from mimo.families.hf_config import Config, refuse_dropout
from mimo.families.keymap import Weight, grouped_qkv, plain, stacked

PRE_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
}
QK_NORMS = {
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
}
_PREFIX = "model.language_model"


class DecoderSettings(LanguageSettings):
    """What `build` needs beside the recipe keys."""

    def stack_shape(self) -> engine.StackShape:
        """What the engine builds the layers from; families change what differs."""
        return engine.StackShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_query_groups,
            head_size=self.head_size,
            norm_eps=self.norm_eps,
        )

    @abstractmethod
    def rotary(self) -> nn.Module:
        """The module that stands for `GPTModel.rotary_pos_emb`."""

    def layer_spec(
        self, config: engine.TransformerConfig, ctx: engine.ModuleContext
    ) -> engine.ModuleSpec:
        """The spec of the layers: pre-norm ones."""
        return engine.layer_spec(config, ctx.lora, causal=True)

    @property
    def embedding_scale(self) -> float | None:
        """Factor of the embeddings of tokens."""
        return None


def build(
    settings: DecoderSettings,
    ctx: engine.ModuleContext,
    num_tokens: int,
    max_sequence_length: int,
    seed: int,
) -> engine.LanguageModel:
    """This rank's chunk; weights that no checkpoint provides are drawn, the same in every layout.

    num_tokens: of the tokenizer, without the padding of the vocabulary.
    """
    config = engine.transformer_config(settings.stack_shape(), ctx)
    model = engine.build_gpt(
        config,
        ctx,
        settings.layer_spec(config, ctx),
        settings.rotary(),
        num_tokens,
        settings.embedding_scale,
        vocab_size=settings.padded_vocab_size(num_tokens),
        max_sequence_length=max_sequence_length,
        share_embeddings_and_output_weights=settings.tie_word_embeddings,
    )
    std = settings.init_std
    engine.initialize_parameters(model, config, ctx.groups, seed, std, ctx.chunk, ctx.provided)
    return model


def decoder_sizes(config: Config) -> dict[str, Any]:
    """The settings that all decoders have, from a whole model's configuration.

    Raises ValueError for dropout, also of the tower.
    """
    refuse_dropout(config)
    text = config["text_config"]
    heads = text["num_attention_heads"]
    return {
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "ffn_hidden_size": text["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": text["num_key_value_heads"],
        "head_size": text.get("head_dim") or text["hidden_size"] // heads,
        "vocab_size": text["vocab_size"],
        "norm_eps": text["rms_norm_eps"],
        "init_std": text["initializer_range"],
        "tie_word_embeddings": bool(config["tie_word_embeddings"]),
    }


def decoder_weights(
    settings: LanguageSettings, norms: Mapping[str, str], qkv_bias: bool = False
) -> list[Weight]:
    """Every parameter of a decoder. norms: of a layer, our name by theirs."""
    size, vocab = settings.hidden_size, settings.vocab_size
    assert vocab is not None, "settings from a checkpoint say how many tokens the model knows"
    ffn, head = settings.ffn_hidden_size, settings.head_size
    heads, groups = settings.num_attention_heads, settings.num_query_groups
    found = [
        plain("embedding.word_embeddings.weight", f"{_PREFIX}.embed_tokens.weight", vocab, size),
        plain("decoder.final_layernorm.weight", f"{_PREFIX}.norm.weight", size),
    ]
    if not settings.tie_word_embeddings:
        found.append(plain("output_layer.weight", "lm_head.weight", vocab, size))
    for n in range(settings.num_layers):
        here, there = f"decoder.layers.{n}", f"{_PREFIX}.layers.{n}"
        attention, theirs = f"{here}.self_attention", f"{there}.self_attn"
        for norm, ours in norms.items():
            width = head if norm in QK_NORMS else size
            found.append(plain(f"{here}.{ours}.weight", f"{there}.{norm}.weight", width))
        kinds = {"weight": (size,), "bias": ()} if qkv_bias else {"weight": (size,)}
        for kind, columns in kinds.items():
            keys = [f"{theirs}.{which}_proj.{kind}" for which in "qkv"]
            qkv = f"{attention}.linear_qkv.{kind}"
            found.append(grouped_qkv(qkv, keys, groups, heads // groups, head, *columns))
        gate_up = [f"{there}.mlp.{which}_proj.weight" for which in ("gate", "up")]
        found += [
            plain(f"{attention}.linear_proj.weight", f"{theirs}.o_proj.weight", size, heads * head),
            stacked(f"{here}.mlp.linear_fc1.weight", gate_up, ffn, size),
            plain(f"{here}.mlp.linear_fc2.weight", f"{there}.mlp.down_proj.weight", size, ffn),
        ]
    return found
