"""The models that we read and write, and the names that their tensors have had on disk.

A key map (`mimo.families.keymap`) uses the names that transformers 5 gives the tensors in memory.
On disk the names begin differently, depending on the version that wrote them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mimo.config.schema import LANGUAGE, Recipe
from mimo.families.contracts import (
    EncoderSettings,
    LanguageFamily,
    LanguageSettings,
    PublishedEncoderFamily,
)
from mimo.families.keymap import Weight
from mimo.families.registry import encoder_settings, language_settings

LANGUAGE_MODEL = "model.language_model."


@dataclass(frozen=True)
class KeyLayout:
    """How names begin on disk, by how they begin in memory; the first match counts."""

    prefixes: Mapping[str, str] = field(default_factory=dict)

    def on_disk(self, key: str) -> str:
        """The name on disk of the tensor with this name in memory."""
        for memory, disk in self.prefixes.items():
            if key.startswith(memory):
                return disk + key.removeprefix(memory)
        return key


@dataclass(frozen=True)
class Architecture:
    """A kind of model, as ``model_type`` in ``config.json``.

    language, encoder: families that compute it; a text-only model has no encoder. tower_prefixes,
    language_prefix: how names of tensors begin in memory, except the head's. encoder_keys: recipe
    keys of the encoder's section that follow from the chat template and the processor. layouts: the
    first is what transformers writes.
    """

    model_type: str
    language: str
    encoder: str | None
    tower_prefixes: tuple[str, ...]
    encoder_keys: Mapping[str, Any]
    layouts: tuple[KeyLayout, ...]
    language_prefix: str = LANGUAGE_MODEL

    def language_family(self) -> LanguageFamily:
        """`mimo.families.languages.<family>`."""
        return cast("Any", importlib.import_module(f"mimo.families.languages.{self.language}"))

    def encoder_family(self) -> PublishedEncoderFamily:
        """`encoders.<family>`."""
        assert self.encoder is not None, f"{self.model_type} has no encoder"
        return cast("Any", importlib.import_module(f"encoders.{self.encoder}"))

    def tower_among(self, families: Mapping[str, object]) -> str | None:
        """Which of a recipe's encoders belongs to this architecture; None if none does.

        It is the first whose family is this architecture's or is not given. families: by the
        encoder's name, in the recipe's order.
        """
        own = (name for name, family in families.items() if family in (None, self.encoder))
        return None if self.encoder is None else next(own, None)

    def tower_of(self, recipe: Recipe) -> str | None:
        """The recipe's encoder that belongs to this architecture, if any; all others do not."""
        return self.tower_among({name: one.family for name, one in recipe.encoders.items()})

    def weights(
        self, language: LanguageSettings, towers: Mapping[str, EncoderSettings]
    ) -> dict[str, list[Weight]]:
        """Every parameter, by module. towers: settings, by name, of this architecture's encoder."""
        ours = self.language_family().weights_in_hf(language)
        found = {LANGUAGE: [self._renamed(weight) for weight in ours]}
        for name, settings in towers.items():
            found[name] = self.encoder_family().weights_in_hf(settings, language.hidden_size)
        return found

    def weights_of(self, recipe: Recipe) -> dict[str, list[Weight]]:
        """The same for those modules of a recipe that are part of this architecture.

        Raises RecipeError for settings that are wrong.
        """
        tower = self.tower_of(recipe)
        towers = {} if tower is None else {tower: encoder_settings(recipe, tower)}
        return self.weights(language_settings(recipe), towers)

    def _renamed(self, weight: Weight) -> Weight:
        """With this model's names in memory; families use the names of a model with a tower."""
        rename = KeyLayout({LANGUAGE_MODEL: self.language_prefix}).on_disk
        sources = [replace(run.source, key=rename(run.source.key)) for run in weight.runs]
        pairs = zip(weight.runs, sources, strict=True)
        return replace(weight, runs=tuple(replace(run, source=own) for run, own in pairs))


_IMAGE, _VIDEO = {"placeholder": "<|image_pad|>"}, {"placeholder": "<|video_pad|>"}
# The time of each frame stands before it, so each frame needs its own marks.
_TIMED_VIDEO = {**_VIDEO, "item_text": "<|vision_start|>{placeholder}<|vision_end|>"}
_IN_MEMORY = KeyLayout()
_GEMMA3 = {
    LANGUAGE_MODEL: "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}


def _of_text(model_type: str, language: str) -> Architecture:
    return Architecture(model_type, language, None, (), {}, (_IN_MEMORY,), "model.")


ARCHITECTURES = {
    one.model_type: one
    for one in (
        Architecture(
            "qwen2_5_vl",
            "qwen2_5",
            "qwen_vl",
            ("model.visual.",),
            {**_IMAGE, "other_media": {"video": _VIDEO}},
            (
                # The published one.
                KeyLayout({LANGUAGE_MODEL: "model.", "model.visual.": "visual."}),
                _IN_MEMORY,
            ),
        ),
        Architecture(
            "qwen3_vl",
            "qwen3",
            "qwen3_vl",
            ("model.visual.",),
            {**_IMAGE, "other_media": {"video": _TIMED_VIDEO}},
            (_IN_MEMORY,),
        ),
        Architecture(
            "gemma3",
            "gemma3",
            "gemma3",
            ("model.vision_tower.", "model.multi_modal_projector."),
            {
                "placeholder": "<image_soft_token>",
                "template_token": "<start_of_image>",
                "item_text": "\n\n<start_of_image>{placeholder}<end_of_image>\n\n",
            },
            (
                # Of transformers 5, the published one, and of transformers 4.52.
                KeyLayout(_GEMMA3),
                KeyLayout(_GEMMA3 | {"model.vision_tower.": "vision_tower.vision_model."}),
                KeyLayout({"model.vision_tower.": "model.vision_tower.vision_model."}),
                _IN_MEMORY,
            ),
        ),
        _of_text("qwen2", "qwen2_5"),
        _of_text("qwen3", "qwen3"),
        _of_text("gemma3_text", "gemma3"),
    )
}


def architecture_of(model_type: object) -> Architecture:
    """The architecture of this model type; any language model alone that transformers has is one.

    Raises ValueError for a model that we do not know.
    """
    name = str(model_type)
    if (found := ARCHITECTURES.get(name)) is not None:
        return found
    from transformers.models.auto import modeling_auto as auto  # late: it takes seconds to import

    with_items = name in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not with_items:
        return _of_text(name, "causal_lm")
    raise ValueError(
        f"model_type is {model_type!r}; {', '.join(ARCHITECTURES)} are supported, and with "
        f"language.engine: fsdp every causal language model of text alone that transformers has"
    )
