"""The models that we read and write.

A key map (`mimo.families.keymap`) uses the names that transformers 5 gives the tensors in memory;
`mimo.checkpoint.hf.conversion` finds them on disk.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, cast

import yaml

from mimo.config.schema import LANGUAGE, Recipe
from mimo.families.contracts import LanguageFamily, PublishedEncoderFamily
from mimo.families.keymap import Weight
from mimo.families.registry import GENERAL, encoder_settings, language_settings

LANGUAGE_MODEL = "model.language_model."
_CAUSAL_LM = "causal_lm"


@dataclass(frozen=True)
class Architecture:
    """A kind of model, as ``model_type`` in ``config.json``.

    language, encoder: families that compute it; a text-only model has no encoder. tower_prefixes,
    language_prefix: of the names of tensors in memory, except the head's. encoder_keys: recipe
    keys of the encoder's section that follow from the chat template and the processor.
    """

    model_type: str
    language: str
    encoder: str | None = None
    tower_prefixes: Sequence[str] = ()
    encoder_keys: Mapping[str, Any] = field(default_factory=dict)
    language_prefix: str = LANGUAGE_MODEL

    @property
    def is_general(self) -> bool:
        """Whether the model's own class in transformers computes it, not a family of ours."""
        return self.language in (GENERAL, _CAUSAL_LM)

    def language_family(self) -> LanguageFamily:
        """Return the module `mimo.families.languages.<family>`."""
        return cast("Any", importlib.import_module(f"mimo.families.languages.{self.language}"))

    def encoder_family(self) -> PublishedEncoderFamily:
        """Return the module `encoders.<family>`."""
        assert self.encoder is not None, f"{self.model_type} has no encoder"
        return cast("Any", importlib.import_module(f"encoders.{self.encoder}"))

    def tower_among(self, families: Mapping[str, object]) -> str | None:
        """Return the first encoder of this architecture's family, or of None. families: by name."""
        matching = (name for name, family in families.items() if family in (None, self.encoder))
        return None if self.encoder is None else next(matching, None)

    def tower_of(self, recipe: Recipe) -> str | None:
        """Return the recipe's encoder that belongs to this architecture, if any."""
        return self.tower_among({name: part.family for name, part in recipe.encoders.items()})

    def weights_of(self, recipe: Recipe) -> dict[str, list[Weight]]:
        """Return every parameter of a recipe's modules that this architecture has, by module."""
        language = language_settings(recipe)
        weights = {LANGUAGE: [*map(self._renamed, self.language_family().weights_in_hf(language))]}
        if (tower := self.tower_of(recipe)) is not None:
            settings = encoder_settings(recipe, tower)
            weights[tower] = self.encoder_family().weights_in_hf(settings, language.hidden_size)
        return weights

    def _renamed(self, weight: Weight) -> Weight:
        """Use this model's names in memory; families use the names of a model with a tower."""
        runs = []
        for run in weight.runs:
            key = run.source.key
            if key.startswith(LANGUAGE_MODEL):
                key = self.language_prefix + key.removeprefix(LANGUAGE_MODEL)
            runs.append(replace(run, source=replace(run.source, key=key)))
        return replace(weight, runs=tuple(runs))


ARCHITECTURES = {
    name: Architecture(name, **values)
    for name, values in yaml.safe_load(
        (files("mimo.checkpoint.hf") / "architectures.yaml").read_text(encoding="utf-8")
    ).items()
}


def architecture_of(model_type: object, family: object = None) -> Architecture:
    """Return the architecture of a model type. Raises ValueError for an unknown one.

    family: of the language model, if the recipe gives one.
    """
    name = str(model_type)
    architecture = ARCHITECTURES.get(name)
    if architecture is not None and (family != GENERAL or architecture.encoder is None):
        return architecture
    from transformers.models.auto import modeling_auto as auto  # late: it takes seconds to import

    with_items = name in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if with_items:
        return Architecture(name, GENERAL, GENERAL)
    if name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return Architecture(name, _CAUSAL_LM, language_prefix="model.")
    raise ValueError(
        f"model_type is {model_type!r}; {', '.join(ARCHITECTURES)} are supported, and with "
        f"engine: fsdp every causal language model and vision-language model that transformers has"
    )
