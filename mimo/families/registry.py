"""Finds a model family by its name in the recipe and checks the family's settings.

`mimo` never imports `encoders`: an encoder is reached by name only, so adding one is one file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError

from mimo.config.schema import LANGUAGE, Recipe, descriptions
from mimo.config.source import Location
from mimo.errors import RecipeError, suggestion
from mimo.families.contracts import (
    EncoderFamily,
    EncoderSettings,
    LanguageFamily,
    LanguageSettings,
)
from mimo.families.keymap import is_adapter

_LANGUAGES, _ENCODERS = "mimo.families.languages", "encoders"


def _names(package: str) -> list[str]:
    modules = [m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    # Modules that families share are private.
    return sorted(module for module in modules if not module.startswith("_"))


def _module(package: str, name: str) -> Any:
    # A test checks that it keeps the contract: the type checker cannot, as the name is only read.
    return importlib.import_module(f"{package}.{name}")


def language_families() -> dict[str, LanguageFamily]:
    """All families of language models, by name."""
    return {name: _module(_LANGUAGES, name) for name in _names(_LANGUAGES)}


def encoder_families() -> dict[str, EncoderFamily]:
    """All families of encoders, by name."""
    return {name: _module(_ENCODERS, name) for name in _names(_ENCODERS)}


def _load(package: str, name: str, location: Location, recipe: Recipe) -> Any:
    choices = _names(package)
    if name not in choices:
        raise RecipeError(
            recipe.problem(location, f"unknown family {name!r}; {suggestion(name, choices)}")
        )
    return _module(package, name)


def language_family(recipe: Recipe) -> LanguageFamily:
    """The module `mimo.families.languages.<family>`. Raises RecipeError when there is none."""
    return _load(_LANGUAGES, recipe.language.family, ("language", "family"), recipe)


def encoder_family(recipe: Recipe, encoder: str) -> EncoderFamily:
    """The module `encoders.<family>`. Raises RecipeError when there is none."""
    name = recipe.encoders[encoder].family
    return _load(_ENCODERS, name, ("encoders", encoder, "family"), recipe)


def check_settings[S: BaseModel](
    settings: type[S], values: dict[str, Any], location: Location, recipe: Recipe
) -> S:
    """The values at ``location`` of a recipe as ``settings``, a pydantic model.

    Raises RecipeError.
    """
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise RecipeError(*descriptions(error, recipe.problem, settings, location)) from error


def language_settings(recipe: Recipe) -> LanguageSettings:
    """The checked settings under ``language.model``. Raises RecipeError with file and line."""
    family = language_family(recipe)
    return check_settings(family.Settings, recipe.language.model, ("language", "model"), recipe)


def encoder_settings(recipe: Recipe, encoder: str) -> EncoderSettings:
    """The checked settings under ``encoders.<name>.model``. Raises RecipeError."""
    return check_settings(
        encoder_family(recipe, encoder).Settings,
        recipe.encoders[encoder].model,
        ("encoders", encoder, "model"),
        recipe,
    )


def trainable_names(recipe: Recipe, module: str) -> Callable[[str], bool]:
    """Return whether a parameter of the module trains, by its name in the whole module.

    A module with adapters trains only these; an encoder also trains its projector.
    """
    part = recipe.module(module)
    if part.freeze is False and part.lora is None:
        return lambda name: True
    kept = ()
    if part.trains and module != LANGUAGE:
        kept = encoder_family(recipe, module).PROJECTOR
    return lambda name: name.startswith(kept) or (part.trains and is_adapter(name))
