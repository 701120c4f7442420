"""`mimo data doctor`: what a recipe's data are like, from the index and a few samples.

All figures are of samples as training sees them: in its order, so mixed by the sources' weights.

Letters: n samples that are looked at, m of their items.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bridge import imbalance
from data.index.reader import UnreadableSample
from data.index.samples import column, items_of_samples
from data.modalities.image_files import thumbnail_url
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
from mimo.model.step_plan import StepPlan, StepPlanner, pads_samples, step_planner
from mimo.parallel.build import build_layout
from mimo.report.page import Chart, Part, Piece, Sample, Section, render
from mimo.report.tables import Table, number, percent, write
from mimo.runtime.progress import progress_of

MAX_SAMPLES = 200_000  # of more, some in random places are looked at
_PLANNED_SAMPLES, _PLANNED_STEPS = 20_000, 16
_READ, _RENDERED = 64, 12  # samples that are decoded, and that are shown
_LARGEST, _BAD = 10, 200  # samples that are named
_PICTURES, _PICTURE_SIDE, _SHOWN_CHARACTERS = 8, 240, 4000  # of one sample
_BINS = 24
_SEED = 0

Facts = dict[str, Any]  # for JSON


@dataclass(frozen=True)
class SampleColumns:
    """Columns of the indexes, int64, of n samples and their m items.

    item_sample: (m,) into the samples. media: (m,) into the index's. size: (m, 2) of files.
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


def read_columns(dataset: Dataset, most: int = MAX_SAMPLES) -> SampleColumns:
    """Return at most ``most`` samples of the first epoch, in random places if there are more."""
    indexes, total = dataset.indexes, sum(map(len, dataset.indexes))
    positions = np.arange(total)
    if total > most:
        positions = np.unique(np.random.default_rng(_SEED).integers(0, total, most))
    source, sample = dataset.order.at(positions)
    item, item_sample = items_of_samples(indexes, source, sample)
    names = ("item_media", "item_rows", "item_size_0", "item_size_1")
    media, item_rows, *size = (column(indexes, name, source[item_sample], item) for name in names)
    return SampleColumns(
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


def histogram(values: np.ndarray) -> Facts | None:
    """Count values above 0 in bins [edge, next edge), the last one closed; None without any."""
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


def modality_mix(columns: SampleColumns, names: Sequence[str]) -> list[Facts]:
    """Return shares of samples, tokens and rows by what samples hold, the most frequent first."""
    held = np.zeros(len(columns.sample), np.int64)
    np.bitwise_or.at(held, columns.item_sample, 1 << columns.media)
    mix = []
    for kind in np.unique(held).tolist():
        selected, bits = held == kind, enumerate(names)
        row: Facts = {
            "holds": " + ".join(name for bit, name in bits if kind >> bit & 1) or "text alone",
            "samples": float(selected.mean()),
            "tokens": float(columns.tokens[selected].sum() / columns.tokens.sum()),
            "rows": float(columns.rows[selected].sum() / max(columns.rows.sum(), 1)),
        }
        mix.append(row)
    return sorted(mix, key=lambda row: -row["samples"])


def histograms(columns: SampleColumns, names: Sequence[str]) -> dict[str, Facts]:
    """Return histograms of tokens and embeddings; by modality, of items and their files."""
    values = {
        "tokens of a sample": columns.tokens,
        "text tokens of a sample": columns.tokens - columns.rows,
        "embeddings of a sample with items": columns.rows,
    }
    for modality, name in enumerate(names):
        selected = columns.media == modality
        first, second = columns.size[selected].T
        values |= {
            f"{name}: embeddings of an item": columns.item_rows[selected],
            f"{name}: size of a file, first number (width, or samples)": first,
            f"{name}: size of a file, second number (height, or samples per second)": second,
            f"{name}: first by second number (aspect ratio, or seconds)": first / second,
        }
    counted = {name: histogram(numbers) for name, numbers in values.items()}
    return {name: counts for name, counts in counted.items() if counts is not None}


def packing(recipe: Recipe, planner: StepPlanner) -> Facts:
    """Return how full and how even the lanes' microbatches of the first steps are.

    full: real tokens by all, padding included. of_budget: by `data.tokens_per_microbatch`.
    imbalance: load of the most loaded lane over the mean of the lanes that wait for each other.
    """
    steps, num_samples = list[StepPlan](), 0
    while len(steps) < min(_PLANNED_STEPS, recipe.train.steps) and num_samples < _PLANNED_SAMPLES:
        steps.append(planner.finish(planner.microbatches(len(steps))))
        num_samples += sum(m.samples.num_samples for m in steps[-1].microbatches)
    lanes, linear = planner.layout.language.dp, planner.linear_tokens
    microbatches = [m.samples for step in steps for m in step.microbatches]
    tokens = np.stack([np.bincount(m.lane, m.length, lanes) for m in microbatches])
    costs = [np.bincount(m.lane, m.length * (linear + m.length), lanes) for m in microbatches]
    uneven = {"language": [*map(imbalance, costs)]}
    for name in planner.layout.item_grids:
        loads = (v for s in steps for v in planner.lane_loads(name, s.microbatches))
        uneven[name] = [*map(imbalance, loads)]
    budget = recipe.data.tokens_per_microbatch
    return {
        "steps": len(steps),
        "samples_per_step": num_samples / len(steps),
        "tokens_per_microbatch": histogram(tokens.ravel().astype(np.int64)),
        "full": float(tokens.sum() / sum(m.lane_tokens.sum() for m in microbatches)),
        "of_budget": None if budget is None else float(tokens.mean() / budget),
        "imbalance": {
            name: {"mean": float(np.mean(ratios)), "worst": max(ratios)}
            for name, ratios in uneven.items()
        },
    }


def largest(dataset: Dataset, columns: SampleColumns) -> list[Facts]:
    """Return the samples with the most tokens."""
    samples = []
    for place in np.argsort(-columns.tokens, kind="stable")[:_LARGEST].tolist():
        index, sample = dataset.indexes[columns.source[place]], int(columns.sample[place])
        sizes = {"tokens": int(columns.tokens[place]), "rows": int(columns.rows[place])}
        samples.append({"key": index.key(sample), "shard": index.shard_of(sample)} | sizes)
    return samples


def pieces(chat: ChatTokenizer, sample: EncodedSample) -> list[Piece]:
    """Return a sample's text as the model sees it."""
    ids = sample.input_ids
    learned = np.append(False, sample.loss_mask[:-1] > 0).tolist()  # whether to write this token
    special = [chat.text([token], special=False) == "" for token in ids.tolist()]
    kinds = zip(learned, special, np.where(special, ids, -1).tolist(), strict=True)
    parts, start = [], 0
    for (is_learned, is_special, _), neighbours in itertools.groupby(kinds):
        count = len(list(neighbours))
        text = chat.text(ids[start : start + (1 if is_special else count)])
        parts.append(Piece(text, is_learned, is_special, count if is_special else 1))
        start += count
    return parts


def read_some(dataset: Dataset, columns: SampleColumns) -> tuple[list[Sample], list[Facts], int]:
    """Decode samples in random places; return readable ones, unreadable ones and their number."""
    places = np.random.default_rng(_SEED).permutation(len(columns.sample))[:_READ]
    readable, bad = list[Sample](), list[Facts]()
    for place in places.tolist():
        reader, sample = dataset.readers[columns.source[place]], int(columns.sample[place])
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
        if len(readable) < _RENDERED:
            learned, num_tokens = int(encoded.loss_mask.sum()), len(encoded.input_ids)
            note = f"{index.shard_of(sample)} · {num_tokens} tokens, {learned} learned"
            images = [thumbnail_url(picture, _PICTURE_SIDE) for picture in pictures[:_PICTURES]]
            texts = [*_cut(pieces(reader.chat, encoded), _SHOWN_CHARACTERS)]
            readable.append(Sample(index.key(sample), note, images, texts))
    return readable, bad, len(places)


def examine(recipe: Recipe, num_ranks: int | None) -> tuple[Facts, list[Sample]]:
    """Return all figures of a recipe's data, for JSON, and samples to show. Raises RecipeError."""
    layout = build_layout(recipe, num_ranks)
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    with progress_of("indexing sources") as progress:
        dataset = open_dataset(recipe, "sources", chat, processors, progress, build_in_processes)
    assert dataset is not None, "the recipe schema asks for at least one source"
    columns, indexes = read_columns(dataset), dataset.indexes
    with changed_shards_named():
        shown, unreadable, read = read_some(dataset, columns)
    skipped = itertools.chain.from_iterable(index.skipped_samples() for index in indexes)
    tokens = int(columns.tokens.sum())
    planner = step_planner(recipe, layout, dataset, links=(), padded=pads_samples(recipe))
    return {
        "recipe": recipe.name,
        "warnings": unknown_text(recipe.data.sources, indexes),
        "samples": sum(map(len, indexes)),
        "items": sum(index.num_items for index in indexes),
        "shards": sum(len(index.shards) for index in indexes),
        "looked_at": len(columns.sample),
        "tokens_per_sample": tokens / len(columns.sample),
        "loss_token_fraction": float(columns.loss.sum() / tokens),
        "modality_mix": modality_mix(columns, indexes[0].media),
        "packing": packing(recipe, planner),
        "largest": largest(dataset, columns),
        "bad": {
            "in_index": sum(index.num_skipped for index in indexes),
            "read": read,
            "unreadable": len(unreadable),
            "named": [*unreadable, *map(vars, itertools.islice(skipped, _BAD))],
        },
        "histograms": histograms(columns, indexes[0].media),
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


def render_reports(reports: Sequence[tuple[str, tuple[Facts, list[Sample]]]]) -> str:
    """Return the page about phases. reports: of each its title, and what `examine` returns."""
    parts = [_part(name if len(reports) > 1 else "", *report) for name, report in reports]
    return render(f"Data of {reports[0][1][0]['recipe']}", parts)


def _part(title: str, figures: Facts, samples: list[Sample]) -> Part:
    plan, bad = figures["packing"], figures["bad"]
    tiles = {name: number(figures[name]) for name in ("samples", "items", "shards")} | {
        "tokens per sample": f"{figures['tokens_per_sample']:,.0f}",
        "of tokens count in the loss": percent(figures["loss_token_fraction"]),
        "tokens per microbatch of a lane": f"{plan['tokens_per_microbatch']['mean']:,.0f}",
        "of a microbatch is real tokens": percent(plan["full"]),
        "samples per step": f"{plan['samples_per_step']:,.0f}",
        "bad samples": number(bad["in_index"] + bad["unreadable"]),
    }
    if plan["of_budget"] is not None:
        tiles["of the token budget is used"] = percent(plan["of_budget"])
    mix = [
        (row["holds"], *(percent(row[name]) for name in ("samples", "tokens", "rows")))
        for row in figures["modality_mix"]
    ]
    loads = plan["imbalance"].items()
    lanes = [(name, f"{load['mean']:.2f}", f"{load['worst']:.2f}") for name, load in loads]
    per_lane = {"tokens of a lane's microbatch": plan["tokens_per_microbatch"]}
    charts = figures["histograms"] | per_lane
    biggest = [
        (row["key"], number(row["tokens"]), number(row["rows"]), row["shard"])
        for row in figures["largest"]
    ]
    named = [(row["key"], row["reason"], row["shard"]) for row in bad["named"]]
    looked_at = number(figures["looked_at"])
    note = f"Figures are of {looked_at} samples in random places, mixed as training mixes them."
    sizes = ("tokens", "embeddings")
    sections = [
        Section("Warnings", note="; ".join(figures["warnings"])),
        Section(
            "What samples hold",
            tables=[Table(("", "samples", *sizes), mix)],
            note=note if figures["looked_at"] < figures["samples"] else "",
        ),
        Section(
            "Lanes",
            tables=[Table(("", "mean", "worst"), lanes)],
            note=f"Most loaded lane over the mean of the lanes that wait for each other, in "
            f"{plan['steps']} planned steps: at 1.10 all take a tenth longer than they need.",
        ),
        Section("How large", charts=[_chart(name, counts) for name, counts in charts.items()]),
        Section("The largest samples", tables=[Table(("key", *sizes, "shard"), biggest)]),
        Section(
            "Bad samples",
            tables=[Table(("key", "why", "shard"), named, words=True)],
            note=f"The index leaves out {bad['in_index']}. Of {bad['read']} others, read in random "
            f"places, {bad['unreadable']} cannot be used.",
        ),
        Section(
            "Samples as the model sees them",
            note="Green is what the model learns to write, orange are special tokens, and the loss "
            "leaves out what is grey.",
            samples=samples,
        ),
    ]
    return Part(title, tiles, [section for section in sections if section.has_content])


def _chart(title: str, counts: Facts) -> Chart:
    edges, most = [*map(number, counts["edges"])], max(counts["counts"])
    bars = [
        (max(100 * count / most, 1.4 if count else 0), f"{first} to {last}: {number(count)}")
        for count, (first, last) in zip(counts["counts"], itertools.pairwise(edges), strict=True)
    ]
    least, most, median = (number(counts[name]) for name in ("least", "most", "median"))
    below = number(counts["percentile_99"])
    return Chart(title, bars, f"{least} to {most}, median {median}, 99 % below {below}")


def _cut(pieces: Sequence[Piece], left: int) -> Iterator[Piece]:
    """Yield the first pieces, up to about ``left`` characters."""
    for piece in pieces:
        if left > 0:
            is_short = len(piece.text) <= left
            yield piece if is_short else replace(piece, text=f"{piece.text[:left]} …")
            left -= len(piece.text)
