"""`mimo prepare`: writes a recipe's example data, if it names any, and all indexes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel

from data.digits.shards import prepare_digits
from data.digits.spoken import prepare_spoken_digits
from mimo.bounds import STRICT, Samples, Seed
from mimo.errors import RecipeError, suggestion
from mimo.families.registry import check_settings
from mimo.hf.recipes import load_phases
from mimo.progress import progress_of
from mimo.recipe.schema import Recipe
from mimo.step.dataset import item_processors, open_dataset, open_tokenizer


class DigitsSettings(BaseModel):
    """Recipe keys under ``data.prepare_settings`` of both kinds of digits, whose defaults hold."""

    model_config = STRICT

    num_train: Samples | None = None
    """Samples to train on."""
    num_validation: Samples | None = None
    """Samples for validation."""
    num_test: Samples | None = None
    """Samples to evaluate on."""
    seed: Seed | None = None
    """Seed of what is drawn."""


GENERATORS: dict[str, tuple[Callable[..., object], type[BaseModel]]] = {
    "digits": (prepare_digits, DigitsSettings),
    "spoken_digits": (prepare_spoken_digits, DigitsSettings),
}


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
    if name not in GENERATORS:
        raise RecipeError(
            recipe.problem(
                ("data", "prepare"), f"unknown generator {name!r}; {suggestion(name, GENERATORS)}"
            )
        )
    generator, settings = GENERATORS[name]
    if recipe.data.directory is None:
        raise RecipeError(
            recipe.problem(("data", "directory"), "data.prepare needs a folder to write to")
        )
    given = recipe.data.prepare_settings
    checked = check_settings(settings, given, ("data", "prepare_settings"), recipe)
    with progress_of(f"writing {name}") as progress:
        generator(
            Path(recipe.data.directory), progress=progress, **checked.model_dump(exclude_none=True)
        )


def main(path: Path, overrides: Sequence[str]) -> int:
    """`mimo prepare RECIPE`."""
    phased = load_phases(path, overrides)
    phased.each(prepare)
    sources = [source.path for phase in phased.phases for source in phase.recipe.data.sources]
    print(f"data is ready: {', '.join(dict.fromkeys(sources))}")
    return 0
