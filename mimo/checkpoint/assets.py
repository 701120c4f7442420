"""The small files beside a model's weights: configuration, tokenizer, chat template, processor.

Our checkpoints carry them in ``assets/``, so that they can answer questions and be exported
wherever they are moved.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from mimo.hf.recipes import load_recipe
from mimo.recipe.schema import Recipe

ASSETS = "assets"
_SUFFIXES = {".json", ".jinja", ".txt", ".model"}
_TOKENIZER_FILES = (
    *("tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab", "merges.txt"),
    "chat_template",
)
_NOT_CARRIED = (".safetensors.index.json", "mimo_tiny.json")


def copy_assets(source: Path, target: Path) -> None:
    """Copy the small files of a folder into ``target``, replacing those of the same name."""
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        if path.suffix in _SUFFIXES and not path.name.endswith(_NOT_CARRIED):
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.name)


def collect_assets(recipe: Recipe, target: Path) -> None:
    """Copy the assets of a recipe's model into ``target``, if their folders exist.

    If the tokenizer is in another folder than the model, only the tokenizer's files are taken from
    there: the folder may hold another model.
    """
    tokenizer = Path(recipe.data.tokenizer)
    if recipe.init_from is not None:
        copy_assets(Path(recipe.init_from), target)
    if recipe.init_from == recipe.data.tokenizer or not tokenizer.is_dir():
        return
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(tokenizer.iterdir()):
        if path.name.startswith(_TOKENIZER_FILES):
            shutil.copyfile(path, target / path.name)


def recipe_of(checkpoint: Path) -> Recipe:
    """The recipe of a checkpoint; its tokenizer is the one in ``assets/`` if its folder is gone.

    Raises RecipeError.
    """
    recipe = load_recipe(checkpoint / "recipe.yaml")
    carried = checkpoint / ASSETS
    if Path(recipe.data.tokenizer).is_dir() or not carried.is_dir():
        return recipe
    data = recipe.data.model_copy(update={"tokenizer": str(carried)})
    return recipe.model_copy(update={"data": data})


def with_configuration(recipe: Recipe, checkpoint: Path) -> Recipe:
    """The recipe of a checkpoint, with ``assets/`` for the folder it started from if that is gone.

    A module of transformers is built by the configuration in it.
    """
    carried = checkpoint / ASSETS
    gone = recipe.init_from is not None and not Path(recipe.init_from).is_dir()
    if not gone or not (carried / "config.json").is_file():
        return recipe
    return recipe.model_copy(update={"init_from": str(carried)})
