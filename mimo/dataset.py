"""Opens the data of a recipe: tokenizer, processors, indexes, readers and order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.batch import GlobalMicrobatch
from data.chat import ChatTokenizer
from data.index import Index, Processors, check_lengths
from data.index_store import load_or_build_index
from data.item_text import MediaText
from data.order import SampleOrder
from data.processor import ItemProcessor
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

    def sample_keys(self, microbatch: GlobalMicrobatch) -> list[str]:
        """The keys of a microbatch's samples, lane after lane."""
        pairs = zip(microbatch.source.tolist(), microbatch.sample.tolist(), strict=True)
        return [str(self.indexes[source].keys[sample]) for source, sample in pairs]


def check_media(recipe: Recipe) -> None:
    """Raise RecipeError unless every encoder has a media and a placeholder of its own."""
    problems = [
        recipe.problem(
            ("encoders", name, "media"), "'text' is the language model's own; name another media"
        )
        for name, encoder in recipe.encoders.items()
        if encoder.media == "text"
    ]
    for key in ("media", "placeholder", "template_token"):
        owners: dict[str, str] = {}
        for name, encoder in recipe.encoders.items():
            value = getattr(encoder, key)
            if value is None:
                continue
            owner = owners.setdefault(value, name)
            if owner != name:
                message = f"got {value!r}, which encoders.{owner}.{key} is already; name another"
                problems.append(recipe.problem(("encoders", name, key), message))
    if problems:
        raise RecipeError(*problems)


def item_processors(recipe: Recipe) -> dict[str, ItemProcessor]:
    """By media, how its encoder turns an item into patches. Raises RecipeError."""
    check_media(recipe)
    return {
        encoder.media: encoder_settings(recipe, name).processor()
        for name, encoder in recipe.encoders.items()
    }


def open_tokenizer(recipe: Recipe) -> ChatTokenizer:
    """The recipe's tokenizer. Raises RecipeError with the key ``data.tokenizer``."""
    placeholders = {
        encoder.media: MediaText(encoder.placeholder, encoder.template_token, encoder.item_text)
        for encoder in recipe.encoders.values()
    }
    try:
        return ChatTokenizer(recipe.data.tokenizer, placeholders)
    except ValueError as error:
        raise RecipeError(recipe.problem(("data", "tokenizer"), str(error))) from error


def open_dataset(
    recipe: Recipe,
    split: str,
    chat: ChatTokenizer,
    processors: Processors,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset | None:
    """A split ("sources", "validation" or "test"); None when the recipe names no shards for it.

    Builds an index where there is none that fits.
    Raises RecipeError for missing shards, samples that are too long, and samples whose
    placeholders do not match their items or that have items which no encoder takes.
    """
    sources: Sequence[Source] = getattr(recipe.data, split)
    if not sources:
        return None
    indexes, problems = [], []
    for number, source in enumerate(sources):
        try:
            index = load_or_build_index(source.path, chat, processors, progress)
            check_lengths(index, recipe.data.sequence_length)
            if len(index) == 0:
                raise ValueError(
                    f"{source.path}: none of {len(index.skipped)} samples is usable; the first: "
                    + "; ".join(f"{s.key}: {s.reason}" for s in index.skipped[:3])
                )
            indexes.append(index)
        except ValueError as error:
            problems.append(recipe.problem(("data", split, number, "path"), str(error)))
    if problems:
        raise RecipeError(*problems)
    return Dataset(
        indexes=tuple(indexes),
        readers=tuple(SampleReader(index, chat, processors) for index in indexes),
        order=SampleOrder(
            [len(index) for index in indexes],
            [source.weight for source in sources],
            seed=recipe.train.seed,
            block=recipe.data.shuffle_block,
        ),
    )
