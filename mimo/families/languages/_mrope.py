"""Settings of decoders whose rotary positions have the three axes of images (mRoPE)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from mimo.config.bounds import Channels, RotaryBase
from mimo.families.hf_config import Config, expect, rope_settings
from mimo.families.item_rules import ItemRules
from mimo.families.languages._decoder import DecoderSettings, decoder_sizes


class MRopeSettings(DecoderSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""

    item_rules: ClassVar = ItemRules(positions="mrope", bidirectional=False)

    rotary_base: RotaryBase = 1_000_000.0
    # A list in YAML: only the container is converted, not its entries.
    """Base of rotary positions."""
    mrope_section: Annotated[tuple[Channels, Channels, Channels], Field(strict=False)]
    """Rotary channels that follow time, height and width; they sum to half the head size."""

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if sum(self.mrope_section) != self.head_size // 2:
            raise ValueError(
                f"mrope_section {list(self.mrope_section)} must sum to half of head_size, "
                f"{self.head_size // 2}"
            )
        return self

    def scaled_down(self, chunks: int, tp: int) -> Self:
        """A tiny copy: see `LanguageSettings.scaled_down`.

        The shares of the three rotary axes, tied embeddings, rotary base and epsilon stay.
        """
        sizes = self._scaled_sizes(tp)
        section = proportional(self.mrope_section, sizes["head_size"] // 2)
        return self.model_copy(
            update={**sizes, "num_layers": chunks, "mrope_section": section, "init_std": 0.1}
        )


def mrope_settings_from_hf(config: Config, section: list[int]) -> dict[str, Any]:
    """Recipe keys under ``language.model`` for a whole model's configuration.

    section: ``mrope_section`` of the family where the configuration says none. For a model of text
    alone, whose three positions are always equal, any will do. Raises ValueError for what we do not
    compute.
    """
    text, rope = config["text_config"], config["text_config"]["rope_parameters"]
    expect(text, "text_config", hidden_act="silu", use_sliding_window=False)
    sizes = decoder_sizes(config)
    if "vision_config" not in config:
        time, height, width = section
        section = [*proportional((time, height, width), sizes["head_size"] // 2)]
    return {
        **sizes,
        "rotary_base": rope_settings(rope, "text_config.rope_parameters", "default")[0],
        "mrope_section": list(rope.get("mrope_section", section)),
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
