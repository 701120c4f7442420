"""Settings and construction that dense decoders of the Qwen kind share.

Pre-norm layers of grouped-query attention and SwiGLU with RMSNorm, rotary positions on the three
axes of images (mRoPE). A family adds what is its own: biases, norms on queries and keys, and which
rotary channels follow which axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator
from torch import nn

from mimo import megatron as engine
from mimo.hf.config import Config, expect
from mimo.languages._hf import decoder_sizes
from mimo.languages._sizes import DecoderSettings

if TYPE_CHECKING:
    from mimo.megatron import LanguageModel, StackShape


class MRopeDecoderSettings(DecoderSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""

    rotary_base: float = 1_000_000.0
    mrope_section: tuple[int, int, int]
    """Rotary channels that follow time, height and width; they sum to half the head size."""
    tie_word_embeddings: bool = False

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if sum(self.mrope_section) != self.head_size // 2:
            raise ValueError(
                f"mrope_section {list(self.mrope_section)} must sum to half of head_size, "
                f"{self.head_size // 2}"
            )
        return self

    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer: all are alike."""
        return ("attention",) * self.num_layers

    def scaled_down(self, stages: int, tp: int) -> Self:
        """A tiny copy for ``stages`` pipeline stages and ``tp`` ranks that keeps the character.

        Grouped queries stay grouped (one group stays one), the shares of the three rotary axes,
        tied embeddings, rotary base and epsilon stay as they are. Weights are large enough for
        every part of the model to matter to the loss.
        """
        groups = self.num_query_groups if self.num_query_groups == 1 else math.lcm(2, tp)
        grouped = self.num_attention_heads > self.num_query_groups
        head_size = 8
        return self.model_copy(
            update={
                "num_layers": stages,
                "hidden_size": 32,
                "ffn_hidden_size": math.lcm(48, tp),
                "num_attention_heads": math.lcm(groups * (2 if grouped else 1), tp),
                "num_query_groups": groups,
                "head_size": head_size,
                "vocab_size": None,
                "vocab_multiple": math.lcm(16, tp),
                "mrope_section": proportional(self.mrope_section, head_size // 2),
                "init_std": 0.1,
            }
        )

    def stack_shape(self) -> StackShape:
        """The engine's sizes of the stack, without biases or norms on queries and keys."""
        return engine.StackShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_query_groups,
            head_size=self.head_size,
            norm_eps=self.norm_eps,
        )


def mrope_settings_from_hf(config: Config) -> dict[str, Any]:
    """Recipe keys under ``language.model`` for a whole model's configuration.

    Raises ValueError for what we do not compute.
    """
    text, rope = config["text_config"], config["text_config"]["rope_parameters"]
    expect(text, "text_config", hidden_act="silu")
    expect(rope, "text_config.rope_parameters", rope_type="default")
    return {
        **decoder_sizes(config),
        "rotary_base": float(rope["rope_theta"]),
        "mrope_section": list(rope["mrope_section"]),
    }


def proportional(parts: tuple[int, int, int], total: int) -> tuple[int, int, int]:
    """``parts`` scaled to sum to ``total``, by largest remainder; what was above 0 stays so."""
    exact = [part * total / sum(parts) for part in parts]
    found = [max(int(x), 1) if part else 0 for x, part in zip(exact, parts, strict=True)]
    for axis in sorted(range(3), key=lambda a: found[a] - exact[a])[: max(0, total - sum(found))]:
        found[axis] += 1
    while sum(found) > total:
        found[found.index(max(found))] -= 1
    return found[0], found[1], found[2]


def build_decoder(
    settings: MRopeDecoderSettings,
    shape: StackShape,
    rotary: Callable[[], nn.Module],
    ctx: engine.ModuleContext,
    num_tokens: int,
    max_sequence_length: int,
    seed: int,
) -> LanguageModel:
    """This rank's chunk with freshly drawn weights, the same in every layout.

    shape: ``settings.stack_shape()`` with what the family adds. rotary: makes the module that
    stands for `GPTModel.rotary_pos_emb`. The others: as of a family's ``build``.
    """
    from mimo.megatron.language import LanguageShape, build_gpt

    config = engine.transformer_config(shape, ctx)
    model = build_gpt(
        config,
        ctx,
        LanguageShape(
            num_tokens=num_tokens,
            vocab_size=settings.padded_vocab_size(num_tokens),
            max_sequence_length=max_sequence_length,
            tie_word_embeddings=settings.tie_word_embeddings,
        ),
        rotary,
    )
    engine.initialize_parameters(
        model, config, ctx.groups, seed, settings.init_std, vp_stage=ctx.vp_stage
    )
    return model
