"""Language models of the Qwen3 kind: GQA, norms on queries and keys, SwiGLU, RMSNorm, mRoPE.

The rotary embedding is Qwen3-VL's interleaved one, so text-only positions give plain Qwen3.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import model_validator

from mimo import megatron as engine
from mimo.item_rules import ItemRules
from mimo.languages._sizes import DecoderSettings, check_decoder_grid

if TYPE_CHECKING:
    from mimo.megatron import LanguageModel


ITEM_RULES = ItemRules(positions="mrope", bidirectional=False)


class Settings(DecoderSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""

    rotary_base: float = 1_000_000.0
    mrope_section: tuple[int, int, int]
    """Rotary channels that follow time, height and width; they sum to half the head size."""
    tie_word_embeddings: bool = False

    @model_validator(mode="after")
    def _sections_fit(self) -> Settings:
        if sum(self.mrope_section) != self.head_size // 2:
            raise ValueError(
                f"mrope_section {list(self.mrope_section)} must sum to half of head_size, "
                f"{self.head_size // 2}"
            )
        return self

    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer: all are alike."""
        return ("attention",) * self.num_layers

    def scaled_down(self, stages: int, tp: int) -> Settings:
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
                "vocab_multiple": math.lcm(16, tp),
                "mrope_section": _proportional(self.mrope_section, head_size // 2),
                "init_std": 0.1,
            }
        )


def _proportional(parts: tuple[int, int, int], total: int) -> tuple[int, int, int]:
    """``parts`` scaled to sum to ``total``, by largest remainder; what was above 0 stays so."""
    exact = [part * total / sum(parts) for part in parts]
    found = [max(int(x), 1) if part else 0 for x, part in zip(exact, parts, strict=True)]
    for axis in sorted(range(3), key=lambda a: found[a] - exact[a])[: max(0, total - sum(found))]:
        found[axis] += 1
    while sum(found) > total:
        found[found.index(max(found))] -= 1
    return found[0], found[1], found[2]


def check_grid(settings: Settings, tp: int, pp: int, vocab_size: int) -> list[str]:
    """Problems of a grid with these sizes, each one sentence that names the key.

    pp: pipeline stages, virtual ones included.
    """
    return check_decoder_grid(settings, tp, pp, vocab_size)


def build(
    settings: Settings,
    ctx: engine.ModuleContext,
    num_tokens: int,
    max_sequence_length: int,
    seed: int,
) -> LanguageModel:
    """This rank's chunk with freshly drawn weights, the same in every layout.

    num_tokens: of the tokenizer, without the padding of the vocabulary.
    """
    from mimo.megatron.language import LanguageShape, build_gpt

    shape = engine.StackShape(
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        ffn_hidden_size=settings.ffn_hidden_size,
        num_heads=settings.num_attention_heads,
        num_kv_heads=settings.num_query_groups,
        head_size=settings.head_size,
        norm_eps=settings.norm_eps,
        qk_norm=True,
    )
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
        lambda: engine.InterleavedMRope(
            settings.head_size, settings.mrope_section, settings.rotary_base
        ),
    )
    engine.initialize_parameters(
        model, config, ctx.groups, seed, settings.init_std, vp_stage=ctx.vp_stage
    )
    return model
