"""`mimo data doctor`: what a recipe's data are like, from the index and a few samples.

All figures are of samples as training sees them: in its order, so mixed by the sources' weights.

Letters: n samples that are looked at, m of their items.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge import imbalance
from data.index.reader import UnreadableSample
from data.index.samples import column, items_of_samples
from data.text.chat import ChatTokenizer, EncodedSample
from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.schema import Recipe
from mimo.model.dataset import (
    Dataset,
    changed_shards_named,
    item_processors,
    open_dataset,
    open_tokenizer,
    unknown_text,
)
from mimo.model.indexing import build_in_processes
from mimo.model.step_plan import StepPlan, StepPlanner, step_planner
from mimo.parallel.build import build_layout
from mimo.report.doctor_page import render_reports
from mimo.report.page import Piece, write
from mimo.runtime.progress import progress_of

LOOKED_AT = 200_000  # samples: the index of more is looked at in random places
_PLANNED_SAMPLES, _PLANNED_STEPS = 20_000, 16
_READ, _RENDERED = 64, 12  # samples that are decoded, and that are shown
_LARGEST, _BAD = 10, 200  # samples that are named
_PICTURES = 8  # of one sample
_BINS = 24
_SEED = 0


@dataclass(frozen=True)
class Looked:
    """What the indexes say of n samples and their m items, all int64.

    source, sample, tokens, rows, loss: (n,). item_sample: (m,) into these. media: (m,) into the
    index's. size: (m, 2) of the items' files. item_rows: (m,).
    """

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
    names = ("item_media", "item_rows", "item_size_0", "item_size_1")
    media, item_rows, *size = (column(indexes, name, source[item_sample], item) for name in names)
    return Looked(
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
    return dict(zip(("least", "median", "percentile_99", "most"), spread, strict=True)) | {
        "mean": float(values.mean()),
        "edges": edges.tolist(),
        "counts": counts.tolist(),
    }


def modality_mix(looked: Looked, names: Sequence[str]) -> list[dict[str, Any]]:
    """By what samples hold, the most frequent first: their share of samples, tokens and rows."""
    held = np.zeros(len(looked.sample), np.int64)
    np.bitwise_or.at(held, looked.item_sample, 1 << looked.media)
    found = []
    for kind in np.unique(held).tolist():
        own = held == kind
        found.append(
            {
                "holds": " + ".join(name for bit, name in enumerate(names) if kind >> bit & 1)
                or "text alone",
                "samples": float(own.mean()),
                "tokens": float(looked.tokens[own].sum() / looked.tokens.sum()),
                "rows": float(looked.rows[own].sum() / max(looked.rows.sum(), 1)),
            }
        )
    return sorted(found, key=lambda one: -one["samples"])


def histograms(looked: Looked, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return histograms of tokens and embeddings; by modality, of items and their files."""
    values = {
        "tokens of a sample": looked.tokens,
        "text tokens of a sample": looked.tokens - looked.rows,
        "embeddings of a sample with items": looked.rows,
    }
    for modality, name in enumerate(names):
        selected = looked.media == modality
        first, second = looked.size[selected].T
        values |= {
            f"{name}: embeddings of an item": looked.item_rows[selected],
            f"{name}: size of a file, first number (width, or samples)": first,
            f"{name}: size of a file, second number (height, or samples per second)": second,
            f"{name}: first by second number (aspect ratio, or seconds)": first / second,
        }
    found = {name: histogram(one) for name, one in values.items()}
    return {name: one for name, one in found.items() if one is not None}


def packing(recipe: Recipe, planner: StepPlanner) -> dict[str, Any]:
    """How full lanes' microbatches are, and how even lanes and encoders are loaded, at first.

    full: real tokens by all, padding included. of_budget: by `data.tokens_per_microbatch`.
    imbalance: most loaded lane by the mean of those that wait for each other, so a step takes that
    much longer than it need; its mean and worst.
    """
    steps, num_samples = list[StepPlan](), 0
    while len(steps) < min(_PLANNED_STEPS, recipe.train.steps) and num_samples < _PLANNED_SAMPLES:
        steps.append(planner.finish(planner.microbatches(len(steps))))
        num_samples += sum(one.samples.num_samples for one in steps[-1].microbatches)
    lanes, linear = planner.layout.language.dp, planner.linear_tokens
    lengths = [(one.samples.lane, one.samples.length) for s in steps for one in s.microbatches]
    tokens = np.stack([np.bincount(lane, length, lanes) for lane, length in lengths])
    padded = sum(one.samples.lane_tokens.sum() for step in steps for one in step.microbatches)
    loads = {"language": [np.bincount(at, n * (linear + n), lanes) for at, n in lengths]}
    for name in planner.layout.encoders:
        loads[name] = [own for s in steps for own in planner.encoder_loads(name, s.microbatches)]
    uneven = {name: [imbalance(one) for one in own] for name, own in loads.items()}
    budget = recipe.data.tokens_per_microbatch
    return {
        "steps": len(steps),
        "samples_per_step": num_samples / len(steps),
        "loss_tokens_per_step": float(np.mean([step.num_loss_tokens for step in steps])),
        "tokens_per_microbatch": histogram(tokens.ravel().astype(np.int64)),
        "full": float(tokens.sum() / padded),
        "of_budget": None if budget is None else float(tokens.mean() / budget),
        "imbalance": {
            name: {"mean": float(np.mean(own)), "worst": max(own)} for name, own in uneven.items()
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


def pieces(chat: ChatTokenizer, sample: EncodedSample) -> list[Piece]:
    """A sample's text as the model sees it."""
    ids = sample.input_ids
    learned = np.append(False, sample.loss_mask[:-1] > 0).tolist()  # whether to write this token
    special = [chat.text([one], special=False) == "" for one in ids.tolist()]
    kinds = zip(learned, special, np.where(special, ids, -1).tolist(), strict=True)
    found, start = [], 0
    for (is_learned, is_special, _), run in itertools.groupby(kinds):
        times = len(list(run))
        text = chat.text(ids[start : start + (1 if is_special else times)])
        found.append(Piece(text, is_learned, is_special, times if is_special else 1))
        start += times
    return found


def read_some(
    dataset: Dataset, looked: Looked
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Samples in random places: the first readable ones, the unreadable ones, and how many of all.

    Their files are decoded, which the index does not do. Of readable ones: key, shard, how many
    tokens, and how many with a loss, pieces of the text, pictures uint8 (height, width, 3).
    """
    places = np.random.default_rng(_SEED).permutation(len(looked.sample))[:_READ]
    shown, bad = list[dict[str, Any]](), list[dict[str, Any]]()
    for place in places.tolist():
        reader, sample = dataset.readers[looked.source[place]], int(looked.sample[place])
        index = reader.index
        try:
            encoded = reader.sample(sample)
            pictures = [
                reader.media(item).picture(reader.decoded(item, file))
                for item in index.parts_of_sample(sample)
                for file in index.files_of_part(item)
            ]
        except UnreadableSample as error:
            bad.append(vars(error.sample))
            continue
        if len(shown) < _RENDERED:
            one = {"key": index.key(sample), "shard": index.shard_of(sample)}
            one |= {"tokens": len(encoded.input_ids), "loss_tokens": int(encoded.loss_mask.sum())}
            text = pieces(reader.chat, encoded)
            shown.append(one | {"pieces": text, "pictures": pictures[:_PICTURES]})
    return shown, bad, len(places)


# ---------------------------------------------------------------------------- the whole


def examine(recipe: Recipe, num_ranks: int | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All figures of a recipe's training data, as JSON takes them, and samples to look at.

    Builds the index where there is none. Raises RecipeError.
    """
    layout = build_layout(recipe, num_ranks)
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    with progress_of("indexing sources") as progress:
        dataset = open_dataset(recipe, "sources", chat, processors, progress, build_in_processes)
    assert dataset is not None, "the recipe schema asks for at least one source"
    looked, indexes = look(dataset), dataset.indexes
    with changed_shards_named():
        shown, unreadable, read = read_some(dataset, looked)
    skipped = itertools.chain.from_iterable(index.skipped_samples() for index in indexes)
    tokens = int(looked.tokens.sum())
    return {
        "recipe": recipe.name,
        "warnings": unknown_text(recipe.data.sources, indexes),
        "samples": sum(map(len, indexes)),
        "items": sum(index.num_items for index in indexes),
        "shards": sum(len(index.shards) for index in indexes),
        "looked_at": len(looked.sample),
        "tokens_per_sample": tokens / len(looked.sample),
        "loss_token_fraction": float(looked.loss.sum() / tokens),
        "modality_mix": modality_mix(looked, indexes[0].media),
        "packing": packing(recipe, step_planner(recipe, layout, dataset, links=())),
        "largest": largest(dataset, looked),
        "bad": {
            "in_index": sum(index.num_skipped for index in indexes),
            "read": read,
            "unreadable": len(unreadable),
            "named": [*unreadable, *map(vars, itertools.islice(skipped, _BAD))],
        },
        "histograms": histograms(looked, indexes[0].media),
    }, shown


def main(
    path: Path, overrides: Sequence[str], num_ranks: int | None, page: Path, figures: Path | None
) -> int:
    """Write the page, and the figures of every phase as JSON, for `mimo data doctor`."""
    phased = load_phases(path, overrides)
    reports = phased.each(lambda recipe: examine(recipe, num_ranks))
    for line in dict.fromkeys(line for data, _ in reports for line in data["warnings"]):
        print(line)
    titles = [phase.title or phase.recipe.name for phase in phased.phases]
    write(page, render_reports(list(zip(titles, reports, strict=True))))
    if figures is not None:
        write(figures, json.dumps([data for data, _ in reports], indent=1) + "\n")
    return 0
