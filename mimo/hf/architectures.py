"""The models that we read and write, and the names that their tensors have had on disk.

A key map (`mimo.families.keymap`) uses the names that transformers 5 gives the tensors in memory.
On disk their beginnings differ, by the version that wrote them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from mimo.families.keymap import Weight

LANGUAGE_MODEL = "model.language_model."


@dataclass(frozen=True)
class KeyLayout:
    """Beginnings of names on disk by those in memory; the first that fits counts."""

    name: str
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def on_disk(self, key: str) -> str:
        """The name on disk of a tensor with this name in memory."""
        for memory, disk in self.prefixes.items():
            if key.startswith(memory):
                return disk + key.removeprefix(memory)
        return key


@dataclass(frozen=True)
class Architecture:
    """A kind of model, as ``model_type`` in ``config.json``.

    language, encoder: families that compute it; a model of text alone has no encoder.
    tower_prefixes: how names in memory of the encoder's tensors begin. encoder_keys: recipe keys of
    the encoder's section that follow from the chat template and the processor. layouts: the first
    is what transformers writes. language_prefix: how names in memory of the language model's
    tensors begin, its head's aside.
    """

    model_type: str
    language: str
    encoder: str | None
    tower_prefixes: tuple[str, ...]
    encoder_keys: Mapping[str, Any]
    layouts: tuple[KeyLayout, ...]
    language_prefix: str = LANGUAGE_MODEL

    def language_family(self) -> ModuleType:
        """`mimo.languages.<family>`."""
        return importlib.import_module(f"mimo.languages.{self.language}")

    def encoder_family(self) -> ModuleType:
        """`encoders.<family>`."""
        assert self.encoder is not None, f"{self.model_type} has no encoder"
        return importlib.import_module(f"encoders.{self.encoder}")

    def weights(self, language: Any, encoders: Mapping[str, Any]) -> dict[str, list[Weight]]:
        """By module, every parameter. language, encoders: the settings, of encoders by name."""
        ours = self.language_family().weights_in_hf(language)
        found = {"language": [self._renamed(weight) for weight in ours]}
        for name, settings in encoders.items():
            found[name] = self.encoder_family().weights_in_hf(settings, language.hidden_size)
        return found

    def _renamed(self, weight: Weight) -> Weight:
        """With this model's names in memory; families know those beside a tower."""
        names = KeyLayout(self.model_type, {LANGUAGE_MODEL: self.language_prefix})
        runs = [
            replace(run, source=replace(run.source, key=names.on_disk(run.source.key)))
            for run in weight.runs
        ]
        return replace(weight, runs=tuple(runs))


_IMAGE, _VIDEO = {"placeholder": "<|image_pad|>"}, {"placeholder": "<|video_pad|>"}
# The time of each frame stands before it, so each needs marks of its own.
_TIMED_VIDEO = {**_VIDEO, "item_text": "<|vision_start|>{placeholder}<|vision_end|>"}
_IN_MEMORY = KeyLayout("the one in memory")


def _of_text(model_type: str, language: str) -> Architecture:
    """A causal language model without a tower."""
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
                KeyLayout(
                    "the published one",
                    {LANGUAGE_MODEL: "model.", "model.visual.": "visual."},
                ),
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
                KeyLayout(
                    "transformers 5",
                    {
                        LANGUAGE_MODEL: "language_model.model.",
                        "model.vision_tower.": "vision_tower.",
                        "model.multi_modal_projector.": "multi_modal_projector.",
                        "lm_head.": "language_model.lm_head.",
                    },
                ),
                KeyLayout(
                    "the published one",
                    {
                        LANGUAGE_MODEL: "language_model.model.",
                        "model.vision_tower.": "vision_tower.vision_model.",
                        "model.multi_modal_projector.": "multi_modal_projector.",
                        "lm_head.": "language_model.lm_head.",
                    },
                ),
                KeyLayout(
                    "transformers 4.52",
                    {"model.vision_tower.": "model.vision_tower.vision_model."},
                ),
                _IN_MEMORY,
            ),
        ),
        _of_text("qwen2", "qwen2_5"),
        _of_text("qwen3", "qwen3"),
        _of_text("gemma3_text", "gemma3"),
    )
}


def architecture_of(model_type: object) -> Architecture:
    """Raises ValueError for a model that we do not know."""
    found = ARCHITECTURES.get(str(model_type))
    if found is None:
        raise ValueError(f"model_type is {model_type!r}; {', '.join(ARCHITECTURES)} are supported")
    return found


def best_layout(architecture: Architecture, keys: Sequence[str], stored: Mapping) -> KeyLayout:
    """The layout in which most of ``keys``, as in memory, are among the names on disk."""
    return max(
        architecture.layouts,
        key=lambda layout: sum(layout.on_disk(key) in stored for key in keys),
    )
