"""The small files beside a model's weights: configuration, tokenizer, chat template, processor.

A checkpoint of ours carries them in ``assets/``, so that it can answer questions and be exported
wherever it is moved.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from mimo.recipe import Recipe, load_recipe

ASSETS = "assets"
_SUFFIXES = {".json", ".jinja", ".txt", ".model"}
_NOT_CARRIED = (".safetensors.index.json", "mimo_tiny.json")


def copy_assets(sources: Iterable[Path], target: Path) -> None:
    """Copy the small files of folders into ``target``; of equal names the last one counts."""
    for source in sources:
        for path in sorted(source.iterdir()) if source.is_dir() else ():
            if path.suffix in _SUFFIXES and not path.name.endswith(_NOT_CARRIED):
                target.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / path.name)


def asset_folders(recipe: Recipe) -> list[Path]:
    """Where the assets of a recipe's model are, as far as the folders exist."""
    folders = [recipe.data.tokenizer]
    if recipe.init_from is not None and recipe.init_from != recipe.data.tokenizer:
        folders.insert(0, recipe.init_from)
    return [Path(folder) for folder in folders if Path(folder).is_dir()]


def recipe_of(checkpoint: Path) -> Recipe:
    """The recipe of a checkpoint; where its tokenizer's folder is gone, with the one it carries.

    Raises RecipeError.
    """
    recipe = load_recipe(checkpoint / "recipe.yaml")
    carried = checkpoint / ASSETS
    if Path(recipe.data.tokenizer).is_dir() or not carried.is_dir():
        return recipe
    data = recipe.data.model_copy(update={"tokenizer": str(carried)})
    return recipe.model_copy(update={"data": data})
