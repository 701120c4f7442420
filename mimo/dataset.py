"""Opens the data of a recipe: tokenizer, processor, indexes, readers and order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.chat import ChatTokenizer
from data.images import ImageProcessor
from data.index import Index, check_lengths
from data.index_store import load_or_build_index
from data.order import SampleOrder
from data.reader import SampleReader
from mimo.families import encoder_settings
from mimo.recipe import Recipe, Source
from mimo.recipe_errors import RecipeError


@dataclass(frozen=True)
class Dataset:
    """One split: an index and a reader per data source, and the order of its samples."""

    indexes: tuple[Index, ...]
    readers: tuple[SampleReader, ...]
    order: SampleOrder


def image_processor(recipe: Recipe) -> ImageProcessor:
    """How the recipe's encoder turns images into patches; a default one without an encoder."""
    for name in recipe.encoders:
        return encoder_settings(recipe, name).processor()
    return ImageProcessor()


def open_tokenizer(recipe: Recipe) -> ChatTokenizer:
    """The recipe's tokenizer. Raises RecipeError with the key ``data.tokenizer``."""
    try:
        return ChatTokenizer(recipe.data.tokenizer)
    except ValueError as error:
        raise RecipeError(recipe.problem(("data", "tokenizer"), str(error))) from error


def open_dataset(
    recipe: Recipe,
    split: str,
    chat: ChatTokenizer,
    processor: ImageProcessor,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset | None:
    """A split ("sources", "validation" or "test"); None when the recipe names no shards for it.

    Builds an index where there is none that fits.
    Raises RecipeError for missing shards, samples that are too long and samples whose
    placeholders do not match their images.
    """
    sources: Sequence[Source] = getattr(recipe.data, split)
    if not sources:
        return None
    indexes, problems = [], []
    for number, source in enumerate(sources):
        try:
            index = load_or_build_index(source.path, chat, processor, progress)
            check_lengths(index, recipe.data.sequence_length)
            indexes.append(index)
        except ValueError as error:
            problems.append(recipe.problem(("data", split, number, "path"), str(error)))
    if problems:
        raise RecipeError(*problems)
    return Dataset(
        indexes=tuple(indexes),
        readers=tuple(SampleReader(index, chat, processor) for index in indexes),
        order=SampleOrder(
            [len(index) for index in indexes],
            [source.weight for source in sources],
            seed=recipe.train.seed,
            block=recipe.data.shuffle_block,
        ),
    )
