"""`mimo prepare`: writes a recipe's example data, if it names any, and all indexes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel

from data.digits.shards import prepare_digits
from data.digits.spoken import prepare_spoken_digits
from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.bounds import STRICT, Samples, Seed
from mimo.config.schema import Recipe
from mimo.errors import RecipeError, suggestion
from mimo.families.registry import check_settings
from mimo.model.dataset import (
    SPLITS,
    item_processors,
    open_indexes,
    open_tokenizer,
    sources_of,
    unknown_text,
)
from mimo.model.indexing import build_in_processes
from mimo.runtime.progress import progress_of


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
    _index(recipe)


def _generate(recipe: Recipe, name: str) -> None:
    if name not in GENERATORS:
        message = f"unknown generator {name!r}; {suggestion(name, GENERATORS)}"
        raise RecipeError(recipe.problem(("data", "prepare"), message))
    generator, settings = GENERATORS[name]
    if recipe.data.directory is None:
        message = "data.prepare needs a folder to write to"
        raise RecipeError(recipe.problem(("data", "directory"), message))
    given, place = recipe.data.prepare_settings, ("data", "prepare_settings")
    own = check_settings(settings, given, place, recipe).model_dump(exclude_none=True)
    with progress_of(f"writing {name}") as progress:
        generator(Path(recipe.data.directory), progress=progress, **own)


def _index(
    recipe: Recipe,
    workers: int | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> None:
    """Index all splits. tell: gets a line on each source, as soon as its split is done.

    Raises RecipeError with all problems.
    """
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    build = functools.partial(build_in_processes, workers=workers)
    problems = list[str]()
    for split in SPLITS:
        try:
            with progress_of(f"indexing {split}") as progress:
                indexes = open_indexes(recipe, split, chat, processors, progress, build)
        except RecipeError as error:
            problems += error.problems
            continue
        for source, index in zip(sources_of(recipe, split), indexes, strict=True):
            tell(
                f"{split} {source.path}: {len(index.shards)} shards, {len(index)} samples, "
                f"{index.num_items} items, {index.num_skipped} unusable samples left out"
            )
        for line in unknown_text(sources_of(recipe, split), indexes):
            tell(line)
    if problems:
        raise RecipeError(*problems)


def main(path: Path, overrides: Sequence[str]) -> int:
    """`mimo prepare RECIPE`."""
    phased = load_phases(path, overrides)
    phased.each(prepare)
    sources = [source.path for phase in phased.phases for source in phase.recipe.data.sources]
    print(f"data is ready: {', '.join(dict.fromkeys(sources))}")
    return 0


def index_main(path: Path, overrides: Sequence[str], workers: int | None) -> int:
    """`mimo data index RECIPE`."""
    tell = functools.partial(print, flush=True)
    load_phases(path, overrides).each(lambda recipe: _index(recipe, workers, tell))
    return 0
