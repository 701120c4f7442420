"""Facts of a run: its parameters, data and length, printed at each start, kept for the report."""

import hashlib
import math
from collections.abc import Iterator

import numpy as np

from data.index.samples import Index
from mimo.checkpoint.folder import Progress
from mimo.checkpoint.hf.initial import InitialWeights
from mimo.config.schema import Recipe
from mimo.families.keymap import adapter_shapes, num_elements
from mimo.families.registry import language_settings, trainable_names, weights_of
from mimo.families.wire import precision_of
from mimo.model.dataset import Dataset, sources_of
from mimo.parallel.grids import Layout

_MEASURED = 256  # samples of a source, from which its mean length is estimated


def summary_of(
    recipe: Recipe,
    layout: Layout,
    tokenizer_size: int,
    progress: Progress,
    splits: dict[str, Dataset | None],
) -> dict[str, str]:
    """Return facts of a run by name, one line each. Reads some samples' lengths in the indexes.

    tokenizer_size: number of its tokens. progress: where the run begins.
    """
    facts = dict[str, str]()
    for name in layout.grids:
        total, trained = num_parameters(recipe, name, tokenizer_size)
        facts[f"model {name}"] = (
            f"{recipe.module(name).family}, {total:,} parameters, "
            f"{100 * trained / total:.3g} % trained ({trained:,})"
        )
    grids = "; ".join(f"{name}: {grid}" for name, grid in layout.grids.items())
    facts["layout"] = f"{layout.world_size} rank{'s' * (layout.world_size > 1)}; {grids}"
    for split, dataset in splits.items():
        pairs = zip(sources_of(recipe, split), dataset.indexes if dataset else (), strict=True)
        for number, (source, index) in enumerate(pairs):
            facts[f"data.{split}.{number}"] = f"{source.path}: {_data(index)}"
    sources = splits["sources"]
    assert sources is not None, "the recipe schema asks for at least one source"
    return facts | _amounts(recipe, progress, sources)


def num_parameters(recipe: Recipe, module: str, tokenizer_size: int) -> tuple[int, int]:
    """Count a module's parameters over all ranks, with adapters, and those that train."""
    num_tokens = language_settings(recipe).num_tokens(tokenizer_size)
    part, is_trainable = recipe.module(module), trainable_names(recipe, module)
    total = trained = 0
    for weight in weights_of(recipe, module, num_tokens):
        size = num_elements([weight])
        total += size
        trained += size * is_trainable(weight.name)
        if part.lora is not None and part.lora.adapts(weight.name):
            # Each expert has adapters of its own.
            count = weight.sources[0].shape[0] if weight.sources[0].stacked else 1
            shape = (weight.num_rows // count, size // weight.num_rows)
            adapters = count * sum(math.prod(s) for s in adapter_shapes(shape, part.lora.rank))
            total += adapters
            trained += adapters * part.trains
    return total, trained


def _data(index: Index) -> str:
    """Describe a source, with a digest that changes when a shard is rewritten."""
    catalog = index.catalog
    shards = repr((catalog.names, catalog.sizes, catalog.versions))
    digest = hashlib.sha256(shards.encode()).hexdigest()[:8]
    bad = f", {index.num_skipped:,} unusable" if index.num_skipped else ""
    files = f"{len(index.shards):,} shard{'s' if len(index.shards) > 1 else ''}"
    size = f"{sum(catalog.sizes):,} bytes"
    return f"{len(index):,} samples{bad} in {files} of {size}, written as {digest}"


def _amounts(recipe: Recipe, progress: Progress, dataset: Dataset) -> dict[str, str]:
    train, budget = recipe.train, recipe.data.tokens_per_microbatch
    lengths = []  # the mean of each source
    for index in dataset.indexes:
        measured = np.linspace(0, len(index) - 1, min(len(index), _MEASURED))
        lengths.append(index.column("token_length", measured).mean())
    weights = [source.weight for source in sources_of(recipe, "sources")]
    mean = float(np.average(lengths, weights=weights))
    per_step = float(train.global_batch_size)
    step = f"{train.global_batch_size:,} samples, about {per_step * mean:,.0f} tokens"
    if budget is not None:
        step = f"{train.global_batch_size:,} packed sequences of up to {budget:,} tokens"
        per_step *= budget / mean
    end = progress.used.end + round(max(train.steps - progress.step, 0) * per_step)
    epochs = [f"{epoch:.3g}" for epoch in sorted(dataset.order.epochs(end)) if epoch] or ["0"]
    all_sources = " to ".join(dict.fromkeys((epochs[0], epochs[-1])))
    run = f"{train.steps:,} steps, about {all_sources} epochs"
    return {"step": step, "run": run, "precision": train.precision}


def precision_warnings(recipe: Recipe, initial: InitialWeights | None) -> Iterator[str]:
    """Yield a warning if a run computes in fp32 only because its recipe leaves precision open."""
    if initial is None or "precision" in recipe.train.model_fields_set:
        return
    stored = precision_of(initial.checkpoint.dtype)
    if stored == "bf16":
        yield (
            f"warning: train.precision is {recipe.train.precision} by default, but init_from "
            f"{recipe.init_from} is in {stored}; set train.precision: {stored} for half the memory"
        )
