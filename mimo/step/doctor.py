"""`mimo data doctor`: what a recipe's data are like, from the index and a few samples.

All figures are of samples as training sees them: in its order, so mixed by the sources' weights.

Letters: n samples that are looked at, m of their items.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bridge import imbalance
from data.index.lookup import column, items_of_samples
from data.index.reader import SampleReader, UnreadableSample
from data.text.chat import ChatTokenizer, EncodedSample
from mimo.layout.build import build_layout
from mimo.progress import progress_of
from mimo.recipe.schema import Recipe
from mimo.step.dataset import (
    Dataset,
    changed_shards_named,
    item_processors,
    open_dataset,
    open_tokenizer,
)
from mimo.step.indexing import build_in_processes
from mimo.step.plan import StepPlan, StepPlanner
from mimo.step.planner import step_planner

LOOKED_AT = 200_000  # samples: the index of more is looked at in random places
_PLANNED_SAMPLES, _PLANNED_STEPS = 20_000, 16
_READ, _RENDERED = 64, 12  # samples that are decoded, and that are shown
_LARGEST, _BAD = 10, 200  # samples that are named
_PICTURES = 8  # of one sample
_BINS = 24
_SEED = 0


@dataclass(frozen=True)
class Looked:
    """What the indexes say of n samples and their m items; all int64 but fps.

    source, sample, tokens, rows, loss: (n,). item_sample: (m,) into these. media: (m,) into
    ``names``. size: (m, 2) of the items' files. item_rows: (m,).
    """

    names: tuple[str, ...]
    source: np.ndarray
    sample: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray
    loss: np.ndarray
    item_sample: np.ndarray
    media: np.ndarray
    size: np.ndarray
    item_rows: np.ndarray


def look(dataset: Dataset, most: int = LOOKED_AT) -> Looked:
    """As many samples of the first epoch, all of them if there are no more than ``most``."""
    indexes, total = dataset.indexes, sum(map(len, dataset.indexes))
    positions = np.arange(total)
    if total > most:
        positions = np.unique(np.random.default_rng(_SEED).integers(0, total, most))
    source, sample = dataset.order.at(positions)
    item, item_sample = items_of_samples(indexes, source, sample)
    of_item = source[item_sample]
    names = ("item_media", "item_rows", "item_size_0", "item_size_1")
    media, item_rows, *size = (column(indexes, name, of_item, item) for name in names)
    return Looked(
        names=indexes[0].media,
        source=source,
        sample=sample,
        tokens=column(indexes, "token_length", source, sample),
        rows=np.bincount(item_sample, item_rows, len(sample)).astype(np.int64),
        loss=column(indexes, "loss_tokens", source, sample),
        item_sample=item_sample,
        media=media,
        size=np.stack(size, axis=1),
        item_rows=item_rows,
    )


# ------------------------------------------------------------------------------- figures


def histogram(values: np.ndarray) -> dict[str, Any] | None:
    """Counts of values above 0 in bins [edge, next edge), the last one closed; None without any.

    Bins grow by a factor where values spread over more than one order of magnitude.
    """
    values = values[values > 0]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    spaced = np.geomspace if high > 10 * low else np.linspace
    edges = spaced(low, high, _BINS + 1)
    if values.dtype.kind == "i":
        edges = np.unique(np.append(edges.round(), high + 1))
    edges[0], edges[-1] = low, max(edges[-1], high)  # whatever rounding did
    counts, edges = np.histogram(values, edges)
    spread = np.percentile(values, (0, 50, 99, 100)).tolist()
    names = ("least", "median", "percentile_99", "most")
    return dict(zip(names, spread, strict=True)) | {
        "mean": float(values.mean()),
        "edges": edges.tolist(),
        "counts": counts.tolist(),
    }


def modality_mix(looked: Looked) -> list[dict[str, Any]]:
    """By what samples hold: their share of samples, tokens and rows."""
    held = np.zeros(len(looked.sample), np.int64)
    np.bitwise_or.at(held, looked.item_sample, 1 << looked.media)
    found = []
    for kind in np.unique(held).tolist():
        own = held == kind
        names = [name for bit, name in enumerate(looked.names) if kind >> bit & 1]
        found.append(
            {
                "holds": " + ".join(names) or "text alone",
                "samples": float(own.mean()),
                "tokens": float(looked.tokens[own].sum() / looked.tokens.sum()),
                "rows": float(looked.rows[own].sum() / max(looked.rows.sum(), 1)),
            }
        )
    return sorted(found, key=lambda one: -one["samples"])


def histograms(looked: Looked) -> dict[str, dict[str, Any]]:
    """Of tokens and rows; by media, of items' rows and of their files' sizes and proportions."""
    found = {
        "tokens of a sample": histogram(looked.tokens),
        "text tokens of a sample": histogram(looked.tokens - looked.rows),
        "rows of a sample with items": histogram(looked.rows),
    }
    for number, name in enumerate(looked.names):
        own = looked.media == number
        first, second = looked.size[own].T
        found |= {
            f"{name}: rows of an item": histogram(looked.item_rows[own]),
            f"{name}: size of a file, first number (width, or samples)": histogram(first),
            f"{name}: size of a file, second number (height, or samples per second)": histogram(
                second
            ),
            f"{name}: first by second number (aspect ratio, or seconds)": histogram(first / second),
        }
    return {name: one for name, one in found.items() if one is not None}


def plans(recipe: Recipe, planner: StepPlanner) -> list[StepPlan]:
    """The first steps."""
    found, samples = list[StepPlan](), 0
    for step in range(min(_PLANNED_STEPS, recipe.train.steps)):
        found.append(planner.finish(planner.microbatches(step)))
        samples += sum(one.samples.num_samples for one in found[-1].microbatches)
        if samples >= _PLANNED_SAMPLES:
            break
    return found


def packing(recipe: Recipe, planner: StepPlanner, steps: Sequence[StepPlan]) -> dict[str, Any]:
    """How full lanes' microbatches are, and how even lanes and encoders are loaded.

    full: real tokens by all, padding included. of_budget: by `data.tokens_per_microbatch`.
    imbalance: most loaded lane by the mean of those that wait for each other, so a step takes that
    much longer than it need; its mean and worst.
    """
    layout = planner.layout
    linear, lanes = planner.linear_tokens, layout.language.dp
    real, padded = list[np.ndarray](), list[np.ndarray]()
    loads: dict[str, list[float]] = {name: [] for name in ("language", *layout.encoders)}
    for planned in (one for step in steps for one in step.microbatches):
        samples = planned.samples
        length = samples.length
        real.append(np.bincount(samples.lane, length, lanes))
        padded.append(samples.lane_tokens)
        cost = length * (linear + length)
        loads["language"].append(imbalance(np.bincount(samples.lane, cost, lanes)))
    for step, name in itertools.product(steps, layout.encoders):
        loads[name] += map(imbalance, planner.encoder_loads(name, step.microbatches))
    tokens, budget = np.concatenate(real), recipe.data.tokens_per_microbatch
    return {
        "steps": len(steps),
        "samples_per_step": float(
            np.mean([sum(m.samples.num_samples for m in step.microbatches) for step in steps])
        ),
        "loss_tokens_per_step": float(np.mean([step.num_loss_tokens for step in steps])),
        "tokens_per_microbatch": histogram(tokens.astype(np.int64)),
        "full": float(tokens.sum() / np.concatenate(padded).sum()),
        "of_budget": None if budget is None else float(tokens.mean() / budget),
        "imbalance": {
            name: {"mean": float(np.mean(own)), "worst": float(np.max(own))}
            for name, own in loads.items()
        },
        "encoder_imbalance": float(np.mean([step.encoder_imbalance for step in steps])),
    }


def largest(dataset: Dataset, looked: Looked) -> list[dict[str, Any]]:
    """The samples with the most tokens, by key."""
    found = []
    for place in np.argsort(-looked.tokens, kind="stable")[:_LARGEST].tolist():
        index, sample = dataset.indexes[looked.source[place]], int(looked.sample[place])
        sizes = {"tokens": int(looked.tokens[place]), "rows": int(looked.rows[place])}
        found.append({"key": index.key(sample), "shard": index.shard_of(sample)} | sizes)
    return found


# ------------------------------------------------------------------------- single samples


@dataclass(frozen=True)
class Rendered:
    """A sample to look at. pieces: of its text, in order. pictures: uint8 (height, width, 3)."""

    key: str
    shard: str
    tokens: int
    loss_tokens: int
    pieces: list[Piece]
    pictures: list[np.ndarray] = field(repr=False)


@dataclass(frozen=True)
class Piece:
    """Tokens beside each other of one kind. learned: whether the loss counts them.

    special: one special token. times: how often it is there, one after another.
    """

    text: str
    learned: bool
    special: bool = False
    times: int = 1


def pieces(chat: ChatTokenizer, sample: EncodedSample) -> list[Piece]:
    """A sample's text as the model sees it."""
    ids = sample.input_ids
    learned = np.append(False, sample.loss_mask[:-1] > 0)  # whether to write this token
    special = np.array([chat.text([one], special=False) == "" for one in ids.tolist()], bool)
    found = []
    for key, run in itertools.groupby(
        range(len(ids)), lambda i: (learned[i], special[i], ids[i] if special[i] else -1)
    ):
        own = ids[list(run)]
        times = len(own) if key[1] else 1
        text = chat.text(own[:1] if key[1] else own)
        found.append(Piece(text, bool(key[0]), bool(key[1]), times))
    return found


def read_some(dataset: Dataset, looked: Looked) -> tuple[list[Rendered], list[dict[str, Any]], int]:
    """Samples in random places: the first readable ones, the unreadable ones, and how many of all.

    Their files are decoded, which the index does not do.
    """
    places = np.random.default_rng(_SEED).permutation(len(looked.sample))[:_READ]
    shown, bad = list[Rendered](), list[dict[str, Any]]()
    for place in places.tolist():
        reader, sample = dataset.readers[looked.source[place]], int(looked.sample[place])
        try:
            encoded, pictures = reader.sample(sample), _pictures(reader, sample)
        except UnreadableSample as error:
            bad.append(vars(error.sample))
            continue
        if len(shown) < _RENDERED:
            index, learned = reader.index, int(encoded.loss_mask.sum())
            where = index.key(sample), index.shard_of(sample)
            own = pieces(reader.chat, encoded)
            shown.append(Rendered(*where, len(encoded.input_ids), learned, own, pictures))
    return shown, bad, len(places)


def _pictures(reader: SampleReader, sample: int) -> list[np.ndarray]:
    """Decodes all files, and keeps pictures of the first."""
    found = []
    for item in reader.index.parts_of_sample(sample):
        for file in reader.index.files_of_part(item):
            picture = reader.media(item).picture(reader.decoded(item, file))
            found += [picture] if len(found) < _PICTURES else []
    return found


# ---------------------------------------------------------------------------- the whole


def examine(recipe: Recipe, num_ranks: int | None) -> tuple[dict[str, Any], list[Rendered]]:
    """All figures of a recipe's training data, as JSON takes them, and samples to look at.

    Builds the index where there is none. Raises RecipeError.
    """
    layout = build_layout(recipe, num_ranks)
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    with progress_of("indexing sources") as progress:
        dataset = open_dataset(recipe, "sources", chat, processors, progress, build_in_processes)
    assert dataset is not None, "the recipe schema asks for at least one source"
    looked = look(dataset)
    planner = step_planner(recipe, layout, dataset, links=())
    with changed_shards_named():
        shown, unreadable, read = read_some(dataset, looked)
    skipped = itertools.chain.from_iterable(one.skipped_samples() for one in dataset.indexes)
    tokens = int(looked.tokens.sum())
    return {
        "recipe": recipe.name,
        "samples": sum(map(len, dataset.indexes)),
        "items": sum(index.num_items for index in dataset.indexes),
        "shards": sum(len(index.shards) for index in dataset.indexes),
        "looked_at": len(looked.sample),
        "tokens_per_sample": tokens / len(looked.sample),
        "loss_token_fraction": float(looked.loss.sum() / tokens),
        "modality_mix": modality_mix(looked),
        "packing": packing(recipe, planner, plans(recipe, planner)),
        "largest": largest(dataset, looked),
        "bad": {
            "in_index": sum(index.num_skipped for index in dataset.indexes),
            "read": read,
            "unreadable": len(unreadable),
            "named": [*unreadable, *map(vars, itertools.islice(skipped, _BAD))],
        },
        "histograms": histograms(looked),
    }, shown
