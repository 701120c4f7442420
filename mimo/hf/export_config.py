"""The configuration of an exported model: that of the folder it started from, as it was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mimo.errors import RecipeError
from mimo.families.contracts import FamilySettings
from mimo.families.hf_config import read_config, read_json
from mimo.families.hf_preprocessing import TOKENIZER, image_defaults_of_processor, read_processors
from mimo.families.registry import encoder_settings, language_settings
from mimo.hf.architectures import Architecture
from mimo.recipe.schema import LANGUAGE, Recipe, key_of
from mimo.recipe.source import dotted

# Settings that no configuration of theirs has: how fresh weights are drawn, and padding.
_OURS = {"init_std", "vocab_multiple"}
# Of the image processor: their name by ours. Limits of pixels are written in several ways.
_LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_CROPS = [f"pan_and_scan_{k}" for k in ("min_crop_size", "max_num_crops", "min_ratio_to_activate")]
_SAME = ("image_mean", "image_std", *_CROPS)
_IMAGE_KEYS = {"pan_and_scan": "do_pan_and_scan", **{key: key for key in _SAME}}


def changed_settings(recipe: Recipe, architecture: Architecture, folder: Path) -> dict[str, Any]:
    """What the recipe has set otherwise than the folder for images, by our key.

    Raises RecipeError for settings that differ and cannot be written into its files: the exported
    model would compute something else than the one that was trained.
    """
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
    found: dict[str, Any] = {}
    problems: list[str] = []
    for name, trained, said in modules:
        expected, section = said.model_dump(), dotted((*key_of(name), "model"))
        for key, value in trained.model_dump().items():
            if key in _OURS or value == expected[key]:
                continue
            if name != LANGUAGE and key in (*_LIMITS, *_IMAGE_KEYS):
                found[key] = value
            else:
                problems.append(f"  {section}.{key} is {value}, {folder} says {expected[key]}")
    if problems:
        raise RecipeError(
            "the model was trained with settings that its configuration in Hugging Face format "
            "does not say, so it would compute something else there:",
            *problems,
        )
    return found


def write_image_settings(folder: Path, changed: Mapping[str, Any]) -> None:
    """Write settings from `changed_settings` into the files that decide in ``folder``."""
    if not changed:
        return
    for path, content, section in _image_sections(folder):
        for key, value in changed.items():
            if key in _IMAGE_KEYS:
                section[_IMAGE_KEYS[key]] = value
                continue
            size = section.setdefault("size", {})
            size[_LIMITS[key]] = value
            if section.get(key) is not None:
                section[key] = value
        _write_json(path, content)
    # Where the whole processor has a default, only what the tokenizer is made with counts more.
    fixed = image_defaults_of_processor(folder)
    stronger = {_IMAGE_KEYS[k]: v for k, v in changed.items() if _IMAGE_KEYS.get(k) in fixed}
    if stronger:
        _write_json(folder / TOKENIZER, {**read_json(folder / TOKENIZER), **stronger})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _image_sections(folder: Path) -> Iterator[tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Every file that says how images are prepared: path, content, the part that does."""
    path = folder / "processor_config.json"
    if path.is_file() and (content := read_json(path)).get("image_processor"):
        yield path, content, content["image_processor"]
    path = folder / "preprocessor_config.json"
    if path.is_file():
        content = read_json(path)
        yield path, content, content
