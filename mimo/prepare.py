"""`mimo prepare`: writes a recipe's example data, if it names any, and all indexes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from data.digits import prepare_digits
from mimo.dataset import item_processors, open_dataset, open_tokenizer
from mimo.progress_bar import progress_of
from mimo.recipe import Recipe
from mimo.recipe_errors import RecipeError, suggestion
from mimo.stages import load_stages

GENERATORS: dict[str, Callable[..., object]] = {"digits": prepare_digits}


def prepare(recipe: Recipe) -> None:
    """Write what is missing; a second call finds everything in place and does nothing.

    Raises RecipeError for an unknown generator or settings that it does not take.
    """
    if recipe.data.prepare is not None:
        _generate(recipe, recipe.data.prepare)
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    for split in ("sources", "validation", "test"):
        with progress_of(f"indexing {split}") as progress:
            open_dataset(recipe, split, chat, processors, progress)


def _generate(recipe: Recipe, name: str) -> None:
    generator = GENERATORS.get(name)
    if generator is None:
        raise RecipeError(
            recipe.problem(
                ("data", "prepare"), f"unknown generator {name!r}; {suggestion(name, GENERATORS)}"
            )
        )
    if recipe.data.directory is None:
        raise RecipeError(
            recipe.problem(("data", "directory"), "data.prepare needs a folder to write to")
        )
    known = set(inspect.signature(generator).parameters) - {"directory", "progress"}
    problems = [
        recipe.problem(
            ("data", "prepare_settings", key), f"unknown key; {suggestion(key, sorted(known))}"
        )
        for key in recipe.data.prepare_settings
        if key not in known
    ]
    if problems:
        raise RecipeError(*problems)
    with progress_of(f"writing {name}") as progress:
        generator(Path(recipe.data.directory), progress=progress, **recipe.data.prepare_settings)


def main(path: Path, overrides: Sequence[str]) -> int:
    """`mimo prepare RECIPE`."""
    staged = load_stages(path, overrides)
    staged.each(prepare)
    sources = [source.path for stage in staged.stages for source in stage.recipe.data.sources]
    print(f"data is ready: {', '.join(dict.fromkeys(sources))}")
    return 0
