"""Open the data of a recipe: tokenizer, processors, indexes, readers and order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data.batch import GlobalMicrobatch
from data.index.build import Progress, build_here
from data.index.reader import SampleReader
from data.index.remote import BlockCache, default_cache_directory
from data.index.samples import Index, Processors, check_sizes, check_skipped
from data.index.shard_index import DamagedFileError
from data.index.shards import ShardChangedError
from data.index.store import Build, load_or_build_index
from data.modalities.images import TargetImages
from data.modalities.processor import Media
from data.order import SampleOrder
from data.packing import TokenBudget
from data.text.chat import ChatTokenizer
from data.text.messages import MediaText
from data.text.outputs import OutputText
from mimo.config.modules import Generator, MediaTokens
from mimo.config.schema import Recipe
from mimo.config.source import Location, dotted
from mimo.config.training import Source
from mimo.errors import InputError, RecipeError, StartError, file_system_failed, kind_of
from mimo.families.contracts import GeneratorSettings
from mimo.families.registry import encoder_settings, generator_settings, language_settings

SPLITS = ("sources", "validation", "test")
_TARGETS = {"image": TargetImages}  # by modality, what generators make
_SHORTEST_TOKEN = 2  # characters; a shorter one cannot be told from text


@dataclass(frozen=True)
class Dataset:
    """One split: an index and a reader per data source, and the order of its samples."""

    indexes: tuple[Index, ...]
    readers: tuple[SampleReader, ...]
    order: SampleOrder

    def sample_keys(self, microbatch: GlobalMicrobatch, most: int | None = None) -> list[str]:
        """Return the keys of a microbatch's samples in order, at most the first ``most``."""
        sources, samples = microbatch.source[:most], microbatch.sample[:most]
        pairs = zip(sources.tolist(), samples.tolist(), strict=True)
        return [self.indexes[source].key(sample) for source, sample in pairs]


def token_budget(recipe: Recipe) -> TokenBudget | None:
    """Return the limits of a packed sequence; None if a microbatch is a number of samples."""
    data = recipe.data
    if data.tokens_per_microbatch is None:
        return None
    return TokenBudget(data.tokens_per_microbatch, data.rows_per_microbatch, data.packing_window)


def linear_tokens(recipe: Recipe) -> int:
    """Return the tokens at which attention scores cost as much as the matrices of all layers.

    L tokens see L²/2 pairs of queries and keys; windows and the head are left out.
    """
    settings = language_settings(recipe)
    products = settings.products(settings.padded_vocab_size(1))
    linear = sum(product.forward for product in products if product.per == "token")
    scores = sum(product.forward for product in products if product.parameter is None)
    return round(linear / (scores / 2))


def modality_problems(recipe: Recipe) -> Iterator[str]:
    """Yield problems: a modality or token that two encoders or generators claim."""
    owners = dict[tuple[str, str], str]()

    def claim(location: Location, shown: str, value: str, *kinds: str) -> Iterator[str]:
        owner = next((owners[kind, value] for kind in kinds if (kind, value) in owners), None)
        if owner is not None:
            message = f"got {shown!r}, which {owner} is already; name another"
            yield recipe.problem(location, message)
        for kind in kinds:
            owners.setdefault((kind, value), dotted(location))

    for where, place, modality, tokens in _modalities_of(recipe):
        if modality == "text":
            message = "'text' is the language model's own; name another modality"
            yield recipe.problem(where, message)
        yield from claim(where, modality, modality, "media")
        for key in ("placeholder", "template_token"):
            if (token := getattr(tokens, key)) is not None:
                yield from claim((*place, key), token, token, key)
    for name, generator in recipe.generators.items():
        place = ("generators", name)
        if generator.media not in _TARGETS:
            message = f"got {generator.media!r}, but generators make only {', '.join(_TARGETS)}"
            yield recipe.problem((*place, "media"), message)
        yield from claim((*place, "media"), generator.media, generator.output, "media")
        for key in ("start_token", "end_token"):
            token = getattr(generator, key)
            if len(token) < _SHORTEST_TOKEN:
                message = f"got {token!r}, which texts have too; name a longer token"
                yield recipe.problem((*place, key), message)
            yield from claim((*place, key), token, token, "placeholder", "template_token")


def _modalities_of(recipe: Recipe) -> Iterator[tuple[Location, Location, str, MediaTokens]]:
    """Yield the place of each modality's name, the place of its keys, its name and its tokens."""
    for name, encoder in recipe.encoders.items():
        place = ("encoders", name)
        yield (*place, "media"), place, encoder.media, encoder
        for modality, tokens in encoder.other_media.items():
            other = (*place, "other_media", modality)
            yield other, other, modality, tokens


def item_processors(recipe: Recipe) -> dict[str, Media[Any]]:
    """Return the modalities that encoders take and generators make, by name. Raises RecipeError."""
    if problems := [*modality_problems(recipe)]:
        raise RecipeError(*problems)
    inputs = {
        modality: encoder_settings(recipe, name).processor(modality)
        for name, encoder in recipe.encoders.items()
        for modality in encoder.media_tokens
    }
    outputs = {part.output: _targets(recipe, name) for name, part in recipe.generators.items()}
    return inputs | outputs


def targets(settings: GeneratorSettings, part: Generator) -> TargetImages:
    """Return the modality that a generator makes. Raises ValueError for too few pixels."""
    return _TARGETS[part.media](
        patch_size=settings.token_pixels,
        max_pixels=settings.max_pixels,
        num_queries=part.num_queries,
        tower_width=settings.hidden_size,
    )


def _targets(recipe: Recipe, name: str) -> TargetImages:
    try:
        return targets(generator_settings(recipe, name), recipe.generators[name])
    except ValueError as error:
        location = ("generators", name, "model", "max_pixels")
        raise RecipeError(recipe.problem(location, str(error))) from error


def open_tokenizer(recipe: Recipe) -> ChatTokenizer:
    """Open the tokenizer; tokens of generators that it lacks are its ``added_tokens``.

    Raises RecipeError with the key ``data.tokenizer`` or a generator's token, or StartError.
    """
    placeholders = {
        modality: MediaText(tokens.placeholder, tokens.template_token, tokens.item_text)
        for encoder in recipe.encoders.values()
        for modality, tokens in encoder.media_tokens.items()
    }
    outputs = {
        part.output: OutputText(
            part.start_token,
            part.end_token,
            part.skipped_tokens if part.condition == "prompt" else None,
            generator_settings(recipe, name).most_rows,
            part.system_prompt,
        )
        for name, part in recipe.generators.items()
    }
    try:
        chat = ChatTokenizer(recipe.data.tokenizer, placeholders, outputs)
    except ValueError as error:
        raise kind_of(error, RecipeError)(
            recipe.problem(("data", "tokenizer"), str(error))
        ) from error
    ends = chat.stop_token_ids | {chat.pad_token_id}
    problems = [
        recipe.problem(
            ("generators", name, f"{kind}_token"),
            f"got {getattr(part, f'{kind}_token')!r}, which in {chat.directory} is padding or ends "
            "a turn or text; name another",
        )
        for name, part in recipe.generators.items()
        for kind, token_id in zip(("start", "end"), chat.output_ids[part.output], strict=True)
        if token_id in ends
    ]
    if problems:
        raise RecipeError(*problems)
    return chat


def cache_folder(recipe: Recipe) -> Path:
    """Return the folder in which this machine keeps indexes and blocks of shards at URLs."""
    folder = recipe.data.cache_directory
    return default_cache_directory() if folder is None else Path(folder)


@contextmanager
def changed_shards_named() -> Iterator[None]:
    """Raise InputError for a shard or an index that changes meanwhile."""
    try:
        yield
    except (ShardChangedError, DamagedFileError) as error:
        raise InputError(str(error)) from error


def open_dataset(
    recipe: Recipe,
    split: str,
    chat: ChatTokenizer,
    processors: Processors,
    progress: Progress | None = None,
    build: Build = build_here,
) -> Dataset | None:
    """Open a split ("sources", "validation" or "test"); None when the recipe has no shards for it.

    build: indexes the shards that are not indexed yet. Raises RecipeError for data that does not
    fit the recipe, StartError where the shards' file system fails.
    """
    indexes = open_indexes(recipe, split, chat, processors, progress, build)
    return dataset_of(recipe, split, indexes, chat, processors) if indexes else None


def sources_of(recipe: Recipe, split: str) -> Sequence[Source]:
    """Return the sources of a split, possibly none."""
    return getattr(recipe.data, split)


def open_indexes(
    recipe: Recipe,
    split: str,
    chat: ChatTokenizer,
    processors: Processors,
    progress: Progress | None = None,
    build: Build = build_here,
) -> tuple[Index, ...]:
    """Open the index of every source of a split. Raises RecipeError, StartError."""

    def open_source(source: Source) -> Index:
        index = load_or_build_index(
            source.path, chat, processors, progress, cache_folder(recipe), build
        )
        check_index(index, source, recipe)
        return index

    return tuple(for_each_source(recipe, [split], open_source))


def check_index(index: Index, source: Source, recipe: Recipe) -> None:
    """Raise ValueError for unusable, too long or too few samples in a source."""
    check_skipped(index, recipe.data.max_skipped_fraction)
    check_sizes(index, recipe.data.sequence_length, recipe.data.rows_per_microbatch)
    if len(index) == 0:
        raise ValueError(
            f"{source.path}: none of {index.num_skipped} samples is usable; the first: "
            + "; ".join(f"{s.key}: {s.reason}" for s in islice(index.skipped_samples(), 3))
        )


def unknown_text(sources: Iterable[Source], indexes: Iterable[Index]) -> list[str]:
    """Return a warning for each source whose texts have more than 1 % unknown tokens."""
    return [
        f"warning: {source.path}: {index.unknown_share:.1%} of the tokens of its texts are unknown "
        "to data.tokenizer, so the model cannot read or learn them; use a tokenizer that knows "
        "these texts"
        for source, index in zip(sources, indexes, strict=True)
        if index.unknown_share > 0.01
    ]


def added_tokens(chat: ChatTokenizer) -> list[str]:
    """Return a note on the tokens of generators that the tokenizer's files lack, if any."""
    names = ", ".join(chat.added_tokens)
    return [f"note: tokens added to those of data.tokenizer: {names}"] if names else []


def for_each_source[T](recipe: Recipe, splits: Sequence[str], do: Callable[[Source], T]) -> list[T]:
    """Call ``do`` on every source of these splits.

    Raises one RecipeError with all errors, each with the source's key; StartError at once where a
    file system fails.
    """
    results, problems = list[T](), list[str]()
    for split in splits:
        for number, source in enumerate(sources_of(recipe, split)):
            try:
                results.append(do(source))
            except RecipeError as error:
                problems += error.problems
            except ValueError as error:
                problem = recipe.problem(("data", split, number, "path"), str(error))
                if file_system_failed(error):
                    raise StartError(problem) from error
                problems.append(problem)
    if problems:
        raise RecipeError(*problems)
    return results


def dataset_of(
    recipe: Recipe,
    split: str,
    indexes: Sequence[Index],
    chat: ChatTokenizer,
    processors: Processors,
) -> Dataset:
    """Build a split from its open indexes."""
    gib = recipe.data.cache_gib
    cache = BlockCache(cache_folder(recipe), round(gib * 2**30)) if gib else None
    readers = tuple(SampleReader(index, chat, processors, cache) for index in indexes)
    return Dataset(tuple(indexes), readers, _order(recipe, indexes, sources_of(recipe, split)))


def _order(recipe: Recipe, indexes: Sequence[Index], sources: Sequence[Source]) -> SampleOrder:
    return SampleOrder(
        [len(index) for index in indexes],
        [source.weight for source in sources],
        seed=recipe.train.seed,
        block=recipe.data.shuffle_block,
        names=[source.path for source in sources],
    )


def split_by_source(recipe: Recipe, split: str, dataset: Dataset) -> dict[int, Dataset]:
    """Split an open dataset by source number; sources of weight 0 are left out."""
    return {
        number: Dataset((index,), (reader,), _order(recipe, [index], [source]))
        for number, (index, reader, source) in enumerate(
            zip(dataset.indexes, dataset.readers, sources_of(recipe, split), strict=True)
        )
        if source.weight > 0
    }
