"""`mimo prepare`: writes a recipe's example data, if it names any, and all indexes."""

from __future__ import annotations

import functools
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
from mimo.step.dataset import (
    SPLITS,
    item_processors,
    open_dataset,
    open_indexes,
    open_tokenizer,
    sources_of,
)
from mimo.step.indexing import build_in_processes


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
    for split in SPLITS:
        with progress_of(f"indexing {split}") as progress:
            open_dataset(recipe, split, chat, processors, progress, build_in_processes)


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


def index_main(path: Path, overrides: Sequence[str], workers: int | None) -> int:
    """`mimo data index RECIPE`."""
    load_phases(path, overrides).each(lambda recipe: _index(recipe, workers))
    return 0


def _index(recipe: Recipe, workers: int | None) -> None:
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    build = functools.partial(build_in_processes, workers=workers)
    problems: list[str] = []
    for split in SPLITS:
        try:
            with progress_of(f"indexing {split}") as progress:
                indexes = open_indexes(recipe, split, chat, processors, progress, build)
        except RecipeError as error:
            problems += error.problems
            continue
        for source, index in zip(sources_of(recipe, split), indexes, strict=True):
            print(
                f"{split} {source.path}: {len(index.shards)} shards, {len(index)} samples, "
                f"{index.num_items} items, {index.num_skipped} unusable samples left out"
            )
    if problems:
        raise RecipeError(*problems)
