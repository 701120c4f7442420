"""Find a model family by its name in the recipe, and check the family's settings.

`mimo` never imports `encoders` or `generators`: they are reached by name, so one more is one file.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel, ValidationError

from mimo.config.schema import LANGUAGE, Recipe, descriptions
from mimo.config.source import Location
from mimo.errors import RecipeError, suggestion
from mimo.families.contracts import (
    EncoderFamily,
    EncoderSettings,
    FamilySettings,
    GeneratorFamily,
    GeneratorSettings,
    LanguageFamily,
    LanguageSettings,
)
from mimo.families.keymap import Weight, is_adapter, plain

GENERAL = "transformers"
"""The family of both halves of any vision-language model of transformers."""
LANGUAGES, ENCODERS, GENERATORS = "mimo.families.languages", "encoders", "generators"
"""The packages of families."""


def family_names(package: str) -> list[str]:
    """List the families of a package; modules that they share are private."""
    modules = [m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    return sorted(module for module in modules if not module.startswith("_"))


def _load(package: str, name: str, location: Location, recipe: Recipe) -> Any:
    choices = family_names(package)
    if name not in choices:
        raise RecipeError(
            recipe.problem(location, f"unknown family {name!r}; {suggestion(name, choices)}")
        )
    return importlib.import_module(f"{package}.{name}")


def language_family(recipe: Recipe) -> LanguageFamily:
    """Return the module `mimo.families.languages.<family>`. Raises RecipeError."""
    return _load(LANGUAGES, recipe.language.family, ("language", "family"), recipe)


def encoder_family(recipe: Recipe, encoder: str) -> EncoderFamily:
    """Return the module `encoders.<family>`. Raises RecipeError."""
    name = recipe.encoders[encoder].family
    return _load(ENCODERS, name, ("encoders", encoder, "family"), recipe)


def generator_family(recipe: Recipe, generator: str) -> GeneratorFamily:
    """Return the module `generators.<family>`. Raises RecipeError, also without diffusers."""
    name, location = recipe.generators[generator].family, ("generators", generator, "family")
    family = _load(GENERATORS, name, location, recipe)
    if importlib.util.find_spec("diffusers") is None:
        message = f"{name} runs a module of diffusers; run: pip install 'mimo-toolkit[draw]'"
        raise RecipeError(recipe.problem(location, message))
    return family


def check_settings[S: BaseModel](
    settings: type[S], values: dict[str, Any], location: Location, recipe: Recipe
) -> S:
    """Validate the values at ``location`` of a recipe. Raises RecipeError."""
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise RecipeError(*descriptions(error, recipe.problem, settings, location)) from error


def language_settings(recipe: Recipe) -> LanguageSettings:
    """Return the checked settings under ``language.model``. Raises RecipeError."""
    family = language_family(recipe)
    return check_settings(family.Settings, recipe.language.model, ("language", "model"), recipe)


def encoder_settings(recipe: Recipe, encoder: str) -> EncoderSettings:
    """Return the checked settings under ``encoders.<name>.model``. Raises RecipeError."""
    settings, values = encoder_family(recipe, encoder).Settings, recipe.encoders[encoder].model
    if "folder" in settings.model_fields:
        values = {"folder": recipe.init_from, **values}
    return check_settings(settings, values, ("encoders", encoder, "model"), recipe)


def generator_settings(recipe: Recipe, generator: str) -> GeneratorSettings:
    """Return the checked settings under ``generators.<name>.model``. Raises RecipeError."""
    key, values = ("generators", generator, "model"), recipe.generators[generator].model
    settings = check_settings(generator_family(recipe, generator).Settings, values, key, recipe)
    problems = settings.problems(language_settings(recipe).hidden_size)
    if lines := [recipe.problem((*key, name), message) for name, message in problems]:
        raise RecipeError(*lines)
    return settings


def module_settings(recipe: Recipe, module: str) -> FamilySettings:
    """Return the checked settings of any module. Raises RecipeError."""
    if module == LANGUAGE:
        return language_settings(recipe)
    is_generator = module in recipe.generators
    return (generator_settings if is_generator else encoder_settings)(recipe, module)


QUERIES = "queries."
"""Beginning of the names of the language model's query parameters: ``queries.<generator>``."""


def query_weights(recipe: Recipe) -> list[Weight]:
    """Return the language model's query parameters, which no published checkpoint has."""
    size = language_settings(recipe).hidden_size
    return [
        plain(f"{QUERIES}{name}", f"{QUERIES}{name}", generator.num_queries, size)
        for name, generator in recipe.generators.items()
        if generator.num_queries
    ]


def weights_of(
    recipe: Recipe, module: str, vocab_size: int | None, **sizes: int
) -> Sequence[Weight]:
    """Return a module's weights over all ranks. sizes: replace settings of the recipe."""
    language = language_settings(recipe)
    if module == LANGUAGE:
        small = language.model_copy(update={"vocab_size": vocab_size, **sizes})
        return [*language_family(recipe).weights_in_hf(small), *query_weights(recipe)]
    if module in recipe.generators:
        settings = generator_settings(recipe, module).model_copy(update=sizes)
        return generator_family(recipe, module).weights(settings)
    settings = encoder_settings(recipe, module).model_copy(update=sizes)
    return encoder_family(recipe, module).weights_in_hf(settings, language.hidden_size)


def trainable_names(recipe: Recipe, module: str) -> Callable[[str], bool]:
    """Return whether a parameter of the module trains, by its name in the whole module.

    A module with adapters trains only these; an encoder also trains its projector. Queries of
    generators always train.
    """
    part = recipe.module(module)
    if isinstance(part.freeze, tuple):
        frozen = part.freeze if part.lora is None else ("*",)
        return lambda name: (
            name.startswith(QUERIES)
            or is_adapter(name)
            or not any(fnmatchcase(name, p) for p in frozen)
        )
    if part.freeze is False and part.lora is None:
        return lambda name: True
    kept: tuple[str, ...] = (QUERIES,)
    if part.trains and module in recipe.encoders:
        kept = encoder_family(recipe, module).PROJECTOR
    return lambda name: name.startswith(kept) or (part.trains and is_adapter(name))
