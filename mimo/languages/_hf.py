"""What decoders with grouped queries and a gated MLP share in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo.families.hf_config import Config, refuse_dropout
from mimo.families.keymap import Weight, grouped_qkv, plain, stacked
from mimo.languages._decoder import DecoderSettings

_PREFIX = "model.language_model"


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
    settings: DecoderSettings, tied: bool, norms: Mapping[str, str], qkv_bias: bool = False
) -> list[Weight]:
    """Every parameter of a decoder.

    norms: of a layer, our name by theirs.
    """
    size, vocab = settings.hidden_size, settings.vocab_size
    assert vocab is not None, "settings from a checkpoint say how many tokens the model knows"
    heads, groups, head = (
        settings.num_attention_heads,
        settings.num_query_groups,
        settings.head_size,
    )
    found = [
        plain("embedding.word_embeddings.weight", f"{_PREFIX}.embed_tokens.weight", vocab, size),
        plain("decoder.final_layernorm.weight", f"{_PREFIX}.norm.weight", size),
    ]
    if not tied:
        found.append(plain("output_layer.weight", "lm_head.weight", vocab, size))
    for n in range(settings.num_layers):
        here, there = f"decoder.layers.{n}", f"{_PREFIX}.layers.{n}"
        attention, theirs = f"{here}.self_attention", f"{there}.self_attn"
        found += [
            plain(
                f"{here}.{ours}.weight",
                f"{there}.{norm}.weight",
                head if norm in ("self_attn.q_norm", "self_attn.k_norm") else size,
            )
            for norm, ours in norms.items()
        ]
        for kind, columns in (("weight", (size,)), ("bias", ())):
            if kind == "bias" and not qkv_bias:
                continue
            keys = [f"{theirs}.{which}_proj.{kind}" for which in "qkv"]
            qkv = f"{attention}.linear_qkv.{kind}"
            found.append(grouped_qkv(qkv, keys, groups, heads // groups, head, *columns))
        ffn = settings.ffn_hidden_size
        gate_up = [f"{there}.mlp.{which}_proj.weight" for which in ("gate", "up")]
        found += [
            plain(f"{attention}.linear_proj.weight", f"{theirs}.o_proj.weight", size, heads * head),
            stacked(f"{here}.mlp.linear_fc1.weight", gate_up, ffn, size),
            plain(f"{here}.mlp.linear_fc2.weight", f"{there}.mlp.down_proj.weight", size, ffn),
        ]
    return found


PRE_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
}
QK_NORMS = {
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
}
