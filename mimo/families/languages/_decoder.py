"""Decoders with grouped queries and a gated MLP: settings, construction, published names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from mimo.config.bounds import Channels, RotaryBase
from mimo.engines import megatron as engine
from mimo.families.contracts import ItemRules, LanguageSettings
from mimo.families.hf_config import Config, expect, refuse_dropout, rope_settings
from mimo.families.keymap import Weight, grouped_qkv, plain, stacked
from mimo.ops.layers import MRope

PRE_NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
QK_NORMS = {
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
}
_PREFIX = "model.language_model"


class DecoderSettings(LanguageSettings):
    """The settings of a decoder, and the parts that `build` makes of them."""

    def stack_shape(self) -> dict[str, Any]:
        groups = {"num_query_groups": self.num_query_groups, "kv_channels": self.head_size}
        return super().stack_shape() | groups

    @abstractmethod
    def rotary(self) -> nn.Module:
        """Return the module that replaces `GPTModel.rotary_pos_emb`."""

    def layer_spec(
        self, config: engine.TransformerConfig, ctx: engine.ModuleContext, kind: str, **parts: Any
    ) -> engine.ModuleSpec:
        """Return the spec of a layer of this kind. parts: arguments of `engine.layer_spec`."""
        return engine.layer_spec(config, ctx.lora, causal=True, **parts)

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
    """Implement `MegatronLanguageFamily.build`."""
    config = engine.transformer_config(settings.stack_shape(), ctx)
    kinds = settings.layer_kinds()
    layers = engine.layers_here(config, ctx.groups, ctx.chunk)
    model = engine.build_gpt(
        config,
        ctx,
        [settings.layer_spec(config, ctx, kinds[layer]) for layer in layers],
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


def named_sizes(config: Config) -> dict[str, Any]:
    """Return settings of any language model. Raises ValueError for dropout, also of the tower."""
    refuse_dropout(config)
    text = config["text_config"]
    heads = text["num_attention_heads"]
    return {
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "ffn_hidden_size": text.get("intermediate_size") or text.get("moe_intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": text.get("num_key_value_heads") or heads,
        "head_size": text.get("head_dim") or text["hidden_size"] // heads,
        "vocab_size": text["vocab_size"],
        "tie_word_embeddings": bool(config["tie_word_embeddings"]),
    }


def decoder_sizes(config: Config) -> dict[str, Any]:
    """Return the settings of all decoders. Raises ValueError for dropout."""
    text = config["text_config"]
    more = {"norm_eps": text["rms_norm_eps"], "init_std": text["initializer_range"]}
    return named_sizes(config) | more


def decoder_weights(
    settings: LanguageSettings,
    norms: Mapping[str, str],
    qkv_bias: bool = False,
    attention: Callable[[Any, int], list[Weight]] | None = None,
    mlp: Callable[[Any, str, str], list[Weight]] | None = None,
) -> list[Weight]:
    """Implement `LanguageFamily.weights_in_hf`. norms: of a layer, our name by theirs.

    attention: takes settings and the number of a layer; None for `qkv_weights`. mlp: takes
    settings, and our and their name of a layer's MLP; None for a gated one.
    """
    size, vocab = settings.hidden_size, settings.vocab_size
    sizes = settings.ffn_hidden_size, size
    assert vocab is not None, "settings from a checkpoint say how many tokens the model knows"
    weights = [
        plain("embedding.word_embeddings.weight", f"{_PREFIX}.embed_tokens.weight", vocab, size),
        plain("decoder.final_layernorm.weight", f"{_PREFIX}.norm.weight", size),
    ]
    if not settings.tie_word_embeddings:
        weights.append(plain("output_layer.weight", "lm_head.weight", vocab, size))
    for n in range(settings.num_layers):
        layer, source = layer_names(n)
        weights += norm_weights(settings, n, norms)
        weights += attention(settings, n) if attention else qkv_weights(settings, n, qkv_bias)
        names = f"{layer}.mlp", f"{source}.mlp"
        weights += mlp(settings, *names) if mlp else gated_mlp(*names, *sizes)
    return weights


def gated_mlp(ours: str, theirs: str, *sizes: int) -> list[Weight]:
    """Return an MLP. ours, theirs: its names. sizes: the inner one, and that between layers."""
    gate_up = [f"{theirs}.{which}_proj.weight" for which in ("gate", "up")]
    down = plain(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight", *sizes[::-1])
    return [stacked(f"{ours}.linear_fc1.weight", gate_up, *sizes), down]


def layer_names(layer: int) -> tuple[str, str]:
    """Return the beginning of the names of a layer's parameters: ours and theirs."""
    return f"decoder.layers.{layer}", f"{_PREFIX}.layers.{layer}"


def norm_weights(
    settings: LanguageSettings, layer: int, norms: Mapping[str, str]
) -> Iterator[Weight]:
    """Yield the weights of a layer's norms. norms: our name by theirs."""
    (ours, theirs), widths = layer_names(layer), (settings.hidden_size, settings.head_size)
    for norm, name in norms.items():
        width = widths[norm in QK_NORMS]
        yield plain(f"{ours}.{name}.weight", f"{theirs}.{norm}.weight", width)


def qkv_weights(
    settings: LanguageSettings, layer: int, qkv_bias: bool = False, has_gate: bool = False
) -> list[Weight]:
    """Return the projections of a layer's attention. has_gate: see `grouped_qkv`."""
    ours, theirs = layer_names(layer)
    size, head = settings.hidden_size, settings.head_size
    heads, groups = settings.num_attention_heads, settings.num_query_groups
    weights = []
    for kind, columns in {"weight": (size,), "bias": ()}.items():
        if kind == "weight" or qkv_bias:
            keys = [f"{theirs}.self_attn.{which}_proj.{kind}" for which in "qkv"]
            qkv = f"{ours}.self_attention.linear_qkv.{kind}"
            weights.append(
                grouped_qkv(qkv, keys, groups, heads // groups, head, *columns, has_gate=has_gate)
            )
    names = f"{ours}.self_attention.linear_proj.weight", f"{theirs}.self_attn.o_proj.weight"
    return [*weights, plain(*names, size, heads * head)]


class MRopeSettings(DecoderSettings):
    """Keys of decoders whose rotary positions have the three axes of images (mRoPE)."""

    item_rules: ClassVar = ItemRules(positions="mrope", bidirectional=False)
    axes_of: ClassVar[Callable[[Sequence[int]], Tensor]]
    """Takes ``mrope_section``, returns the axis of each rotary channel."""
    qkv_bias: ClassVar[bool] = False
    """Whether queries, keys and values have biases."""
    qk_norm: ClassVar[bool] = False
    """Whether queries and keys have norms."""

    rotary_base: RotaryBase = 1_000_000.0
    """Base of rotary positions."""
    # A list in YAML: only the container is converted, not its entries.
    mrope_section: Annotated[tuple[Channels, Channels, Channels], Field(strict=False)]
    """Rotary channels that follow time, height and width. Twice their sum is the rotated width of
    a head: all of it, except in the families of Qwen3.5."""

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if sum(self.mrope_section) != self.head_size // 2:
            raise ValueError(
                f"mrope_section {list(self.mrope_section)} must sum to half of head_size, "
                f"{self.head_size // 2}"
            )
        return self

    def stack_shape(self) -> dict[str, Any]:
        changes = {"add_qkv_bias": self.qkv_bias, "qk_layernorm": self.qk_norm}
        return super().stack_shape() | changes

    def rotary(self) -> nn.Module:
        return MRope(type(self).axes_of(self.mrope_section), self.rotary_base)

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        sizes = super()._scaled_sizes(chunks, tp)
        section = proportional(self.mrope_section, sizes["head_size"] // 2)
        return sizes | {"mrope_section": section}


def mrope_settings_from_hf(config: Config, section: tuple[int, int, int]) -> dict[str, Any]:
    """Implement `LanguageFamily.settings_from_hf`.

    section: default of ``mrope_section``. Any will do for a text-only model, whose three positions
    are always equal.
    """
    text, rope = config["text_config"], config["text_config"]["rope_parameters"]
    expect(text, "text_config", hidden_act="silu", use_sliding_window=False, attention_bias=False)
    sizes = decoder_sizes(config)
    if "vision_config" not in config:
        section = proportional(section, sizes["head_size"] // 2)
    return {
        **sizes,
        "rotary_base": rope_settings(rope, "text_config.rope_parameters", "default")[0],
        "mrope_section": list(rope.get("mrope_section", section)),
    }


def proportional(parts: tuple[int, int, int], total: int) -> tuple[int, int, int]:
    """Scale parts to sum to ``total``, by largest remainder; positive ones stay positive."""
    exact = [part * total / sum(parts) for part in parts]
    scaled = [max(int(x), 1) if part else 0 for x, part in zip(exact, parts, strict=True)]
    for axis in sorted(range(3), key=lambda a: scaled[a] - exact[a])[: max(0, total - sum(scaled))]:
        scaled[axis] += 1
    while sum(scaled) > total:
        scaled[scaled.index(max(scaled))] -= 1
    return scaled[0], scaled[1], scaled[2]
