"""Recipes as people use them: completed from the folder that ``init_from`` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mimo.hf.recipe_keys import fill_recipe
from mimo.recipe.phases import PhasedRecipe, read_phases
from mimo.recipe.schema import Recipe, read_recipe


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """`mimo.recipe.schema.read_recipe`, completed. Raises RecipeError."""
    return read_recipe(path, overrides, fill_recipe)


def load_phases(path: Path, overrides: Sequence[str] = ()) -> PhasedRecipe:
    """`mimo.recipe.phases.read_phases`, completed. Raises RecipeError."""
    return read_phases(path, overrides, fill_recipe)
