"""The configuration of an exported model: that of the folder it started from, as it was trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimo.checkpoint.hf.architectures import Architecture
from mimo.config.schema import LANGUAGE, Recipe, key_of
from mimo.config.source import dotted
from mimo.errors import RecipeError
from mimo.families.contracts import FamilySettings
from mimo.families.hf_config import read_config, read_json, write_json
from mimo.families.hf_preprocessing import (
    TOKENIZER,
    WHOLE,
    image_defaults_of_processor,
    read_processors,
)
from mimo.families.registry import encoder_settings, language_settings

# Settings that no configuration of theirs has: how fresh weights are drawn, and padding.
_OURS = {"init_std", "vocab_multiple"}
# Of the image processor: their name by ours. Limits of pixels are written in several ways.
_LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_CROPS = [f"pan_and_scan_{k}" for k in ("min_crop_size", "max_num_crops", "min_ratio_to_activate")]
_SAME = ("image_mean", "image_std", *_CROPS)
_IMAGE_KEYS = {"pan_and_scan": "do_pan_and_scan", **{key: key for key in _SAME}}


@dataclass(frozen=True)
class Difference:
    """A setting of a recipe's module that a folder says otherwise. expected: what that says."""

    module: str
    key: str
    value: Any
    expected: Any

    @property
    def is_of_images(self) -> bool:
        """Whether it only says how images are prepared."""
        return self.module != LANGUAGE and self.key in (*_LIMITS, *_IMAGE_KEYS)


def differences(recipe: Recipe, architecture: Architecture, folder: Path) -> Iterator[Difference]:
    """What the recipe has set otherwise than the folder, of the modules that are in it."""
    config, processors = read_config(folder), read_processors(folder)
    language = architecture.language_family()
    said: FamilySettings = language.Settings(**language.settings_from_hf(config))
    modules: list[tuple[str, FamilySettings, FamilySettings]] = [
        (LANGUAGE, language_settings(recipe), said)
    ]
    if (tower := architecture.tower_of(recipe)) is not None:
        family = architecture.encoder_family()
        said = family.Settings(**family.settings_from_hf(config, processors))
        modules.append((tower, encoder_settings(recipe, tower), said))
    for name, given, said in modules:
        expected = said.model_dump()
        for key, value in given.model_dump().items():
            if key not in _OURS and value != expected[key]:
                yield Difference(name, key, value, expected[key])


def changed_settings(recipe: Recipe, architecture: Architecture, folder: Path) -> dict[str, Any]:
    """What the recipe has set otherwise than the folder for images, by our key.

    Raises RecipeError for settings that differ and cannot be written into its files: the exported
    model would compute something else than the one that was trained.
    """
    found = [*differences(recipe, architecture, folder)]
    problems = [
        f"  {dotted((*key_of(one.module), 'model'))}.{one.key} is {one.value}, "
        f"{folder} says {one.expected}"
        for one in found
        if not one.is_of_images
    ]
    if problems:
        raise RecipeError(
            "the model was trained with settings that its configuration in Hugging Face format "
            "does not say, so it would compute something else there:",
            *problems,
        )
    return {one.key: one.value for one in found}


def write_image_settings(folder: Path, changed: Mapping[str, Any]) -> None:
    """Write settings from `changed_settings` into the files that decide in ``folder``."""
    if not changed:
        return
    sections: list[tuple[Path, dict[str, Any], dict[str, Any]]] = []  # path, content, part of it
    path = folder / WHOLE
    if path.is_file() and (content := read_json(path)).get("image_processor"):
        sections.append((path, content, content["image_processor"]))
    path = folder / "preprocessor_config.json"
    if path.is_file():
        content = read_json(path)
        sections.append((path, content, content))
    for path, content, section in sections:
        for key, value in changed.items():
            if key in _IMAGE_KEYS:
                section[_IMAGE_KEYS[key]] = value
                continue
            size = section.setdefault("size", {})
            size[_LIMITS[key]] = value
            if section.get(key) is not None:
                section[key] = value
        write_json(path, content)
    # Where the whole processor has a default, only what the tokenizer is made with counts more.
    fixed = image_defaults_of_processor(folder)
    stronger = {_IMAGE_KEYS[k]: v for k, v in changed.items() if _IMAGE_KEYS.get(k) in fixed}
    if stronger:
        write_json(folder / TOKENIZER, {**read_json(folder / TOKENIZER), **stronger})
