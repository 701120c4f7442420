"""The scaled-down copy of a recipe that is run: tiny modules, synthetic data, a chosen layout.

A recipe with a module of `engine: fsdp` starts from a tiny checkpoint of its architecture, with
layers of every kind.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mimo.check.stand_in import tiny_checkpoint
from mimo.check.workload import Items, Outputs, Workload
from mimo.config.schema import Recipe
from mimo.config.source import dotted
from mimo.errors import RecipeError
from mimo.families.registry import encoder_settings, generator_settings, language_settings
from mimo.model.dataset import targets
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout, minimum_run_ahead, sequence_multiple

NUM_STEPS = 2  # the second step reveals stale state

# Few different depths and widths, so that layouts can share the one-rank run as a reference.
_USUAL_STAGES = 4
_USUAL_ENCODER_STAGES = 2
_USUAL_TP = 2
_USUAL_MICROBATCHES = 8
_USUAL_SAMPLES = 6  # of all lanes, in a microbatch
_SEQUENCE_LENGTH = 192
MULTI_RANK_KEYS = ("overlap_grad_reduce", "overlap_param_gather", "distributed_optimizer")
_AXES = ("tp", "sp", "cp", "pp", "vpp", "dp", "dp_replicate", "ep", "etp")
_MOST_QUERIES = 3  # per output item: fewer than the 6 or 12 tokens of its image
_MOST_SKIPPED = 2  # tokens of a sample: fewer than the shortest has
_GROUP = 3  # microbatches that a colocated encoder encodes in one go, if it takes several

# Large enough for weights to move visibly, and for Adam not to turn rounding noise into ± lr.
_LEARNING_RATE = {"sgd": 0.1, "adam": 0.01}
_SMALLEST_RATE = 0.1  # of a module, as a share of the largest: weights have to move
_WARMUP_STEPS = 2  # the shortest: half of the rate in the first step, all of it in the second
_LARGER_WEIGHT = 3.0  # of two data sources: the ratio in which samples are drawn
_ADAM_EPS = 1e-3
# Adapters begin at 0: their weights are nothing but updates, with all the rounding noise of these.
_ADAM_EPS_OF_ADAPTERS = 1e-2


@dataclass(frozen=True)
class ScaledRecipe:
    """A recipe to run, its layout and its data."""

    recipe: Recipe
    layout: Layout
    workload: Workload
    directory: Path


def scale_recipe(recipe: Recipe, layout: Layout, folder: Path, precision: str) -> ScaledRecipe:
    """Return the recipe with tiny modules on ``layout``, without the recipe's sizes and data.

    folder: where the data of all workloads go, and tiny checkpoints, which are written here.
    Raises RecipeError if a family or an engine cannot work on the layout's grids.
    """
    microbatches = _num_microbatches(layout)
    language, samples = layout.language, _samples_per_microbatch(layout)
    data, items, outputs = recipe.model_dump(mode="json"), [], []
    settings: dict[str, Any] = {LANGUAGE: language_settings(recipe)}
    settings |= {name: encoder_settings(recipe, name) for name in recipe.encoders}
    settings |= {name: generator_settings(recipe, name) for name in recipe.generators}
    models = {name: _scaled(s, layout.grids[name]) for name, s in settings.items()}
    checkpoint, checkpoint_models = tiny_checkpoint(recipe, layout, folder)
    data["init_from"] = checkpoint and str(checkpoint)
    models |= checkpoint_models
    data["language"] |= _placed(layout, LANGUAGE, models)
    for name, encoder in recipe.encoders.items():
        placeholder = f"<|{name}_pad|>"
        data["encoders"][name] |= _placed(layout, name, models) | {
            "encode_group": _encode_group(encoder.encode_group, language),
            "run_ahead": _run_ahead(encoder.run_ahead, layout, microbatches),
            # The recipe's placeholder may be a word in the data made here.
            "placeholder": placeholder,
            "template_token": None,
            "item_text": "{placeholder}",
            # One modality is enough; the others only share the encoder's weights.
            "other_media": {},
        }
        media = type(settings[name])(**models[name]).processor(encoder.media)
        items.append(Items(encoder.media, placeholder, media))
    for name, generator in recipe.generators.items():
        models[name] |= {"condition_size": models[LANGUAGE]["hidden_size"]}
        fewer = {
            "queries": min(generator.queries, _MOST_QUERIES),
            "skipped_tokens": min(generator.skipped_tokens, _MOST_SKIPPED),
        }
        data["generators"][name] |= _placed(layout, name, models) | fewer
        drawn = type(settings[name])(**models[name])
        outputs.append(Outputs(generator.media, targets(drawn, generator.model_copy(update=fewer))))
    divisor = sequence_multiple(language.cp, language.tp, language.sp)
    longest = -(-_SEQUENCE_LENGTH // divisor) * divisor
    by_tokens = recipe.data.tokens_per_microbatch is not None
    tokens, lanes = (longest, language.dp) if by_tokens else (None, 1)
    sizes = (NUM_STEPS, microbatches, samples, _source_weights(recipe), tokens, lanes)
    workload = Workload(tuple(items), tuple(outputs), *sizes)
    directory = folder / workload.name
    _set_training(data, recipe, precision)
    data["train"] |= {
        "seed": workload.seed(recipe.train.seed),
        "global_batch_size": microbatches * (language.dp if by_tokens else samples),
        "micro_batch_size": 1 if by_tokens else samples // language.dp,
        "run_dir": str(folder / "runs"),
    }
    data["data"] |= {
        "sources": [
            {"path": str(directory / shard), "weight": weight}
            for shard, weight in zip(workload.shards, workload.weights, strict=True)
        ],
        "validation": [],
        "test": [],
        "tokenizer": str(directory / "tokenizer"),
        "sequence_length": longest,
        "tokens_per_microbatch": workload.tokens,
        # A sample may be nearly all embeddings.
        "rows_per_microbatch": recipe.data.rows_per_microbatch and longest,
        "packing_window": samples,  # keeps the kinds of microbatches in the data apart
        "shuffle_block": workload.block,
        "max_skipped_samples": 0,
    }
    others = layout.colocated | layout.generators.keys()
    disjoint = [grid for name, grid in layout.grids.items() if name not in others]
    largest = max(grid.size // grid.pp for grid in disjoint)
    data["bridge"] |= {"wire_dtype": "auto", "check": "always", "timeout_seconds": 60.0}
    data["bridge"]["block_ranks"] = -(-largest // layout.blocks)
    scaled = _validated(data)
    placed = check_recipe(scaled, None)
    assert placed == layout, f"{placed} was built, not {layout}"
    return ScaledRecipe(scaled, placed, workload, directory)


def changes(recipe: Recipe, precision: str) -> list[str]:
    """Return what is left out of the recipe's training besides sizes, data and layout."""
    train, eps = recipe.train, _eps(recipe)
    sentences = {
        f"{precision} instead of {train.precision}": train.precision != precision,
        f"no 8-bit linears (fp8: {train.fp8})": train.fp8 != "none",
        f"adam_eps {eps:g} instead of {train.adam_eps:g}: a smaller one turns rounding noise of "
        "gradients into whole steps": train.optimizer == "adam" and eps != train.adam_eps,
        f"no distributed optimizer: the engine has none in {precision}": (
            train.distributed_optimizer and precision == "fp64"
        ),
    }
    return [sentence for sentence, applies in sentences.items() if applies]


def _eps(recipe: Recipe) -> float:
    """Return Adam's eps, the same in every precision, so that fp64 can decide for fp32."""
    has_adapters = any(module.lora is not None for module in recipe.modules.values())
    return max(recipe.train.adam_eps, _ADAM_EPS_OF_ADAPTERS if has_adapters else _ADAM_EPS)


def _source_weights(recipe: Recipe) -> tuple[float, ...]:
    """Return the weights of one data source, or of two like the recipe's: equal or unequal."""
    weights = [source.weight for source in recipe.data.sources]
    if len(weights) == 1:
        return (1.0,)
    small, large = weights.index(min(weights)), weights.index(max(weights))
    if small == large:
        return (1.0, 1.0)
    return (1.0, _LARGER_WEIGHT) if small < large else (_LARGER_WEIGHT, 1.0)


def _scaled_rate(recipe: Recipe, rate: float | None) -> float:
    """Scale a module's learning rate, `train.learning_rate` if None, so that weights move.

    The largest becomes `_LEARNING_RATE`; others keep their ratio to it, at least `_SMALLEST_RATE`.
    """
    train = recipe.train
    rates = [part.learning_rate or train.learning_rate for part in recipe.modules.values()]
    rates += [part.query_learning_rate or 0.0 for part in recipe.generators.values()]
    share = (rate or train.learning_rate) / max(rates)
    return _LEARNING_RATE[train.optimizer] * max(share, _SMALLEST_RATE)


def _scaled_warmups(recipe: Recipe) -> dict[int, int]:
    """Map warm-up steps of the recipe to those of the copy: unequal ones stay unequal."""
    warmups = {recipe.train.warmup_steps, *map(recipe.warmup_steps, recipe.modules)}
    return {0: 0} | {steps: n for n, steps in enumerate(sorted(warmups - {0}), _WARMUP_STEPS)}


def _set_training(data: dict[str, Any], recipe: Recipe, precision: str) -> None:
    warmups = _scaled_warmups(recipe)
    for part in (data["language"], *data["encoders"].values(), *data["generators"].values()):
        for key in ("learning_rate", "query_learning_rate"):
            if part.get(key) is not None:
                part[key] = _scaled_rate(recipe, part[key])
        if part["warmup_steps"] is not None:
            part["warmup_steps"] = warmups[part["warmup_steps"]]
    data["train"] |= {
        # Not among the steps that run: the last one, which saves, and the decay of a rate.
        "steps": max(NUM_STEPS, *warmups.values()) + 1,
        "precision": precision,
        "fp8": "none",
        "learning_rate": _scaled_rate(recipe, None),
        "warmup_steps": warmups[recipe.train.warmup_steps],
        "decay_steps": recipe.train.decay_steps and 1,
        "max_skipped_steps": 0,
        "loss_spike_zscore": None,
        "profile": None,
        "adam_eps": _eps(recipe),
        "validate_every": None,
        "save_every": None,
        "threads_per_rank": 1,
    }
    if precision == "fp64" or not recipe.train.distributed_optimizer:
        # Megatron's distributed optimizer has no fp64.
        data["train"] |= {"distributed_optimizer": False, "overlap_param_gather": "auto"}


def _placed(layout: Layout, module: str, models: dict[str, Any]) -> dict[str, Any]:
    grid = layout.grids[module]
    sizes = {axis: getattr(grid, axis) for axis in _AXES}
    if module in layout.colocated:
        return {"placement": "colocated", "grid": sizes, "model": models[module]}
    placement = {} if module == LANGUAGE else {"placement": "disjoint"}
    place = {"grid": sizes | {"rank_offset": grid.rank_offset}, "model": models[module]}
    return placement | place


def _scaled(settings: Any, grid: GridSpec) -> dict[str, Any]:
    usual = _USUAL_STAGES if grid.module == LANGUAGE else _USUAL_ENCODER_STAGES
    stages = _multiple(usual, grid.pp * grid.vpp)
    scaled = settings.scaled_down(stages, _multiple(_USUAL_TP, grid.tp)).model_dump(mode="json")
    for key, size in (("num_experts", grid.ep), ("ffn_hidden_size", grid.etp)):
        if key in scaled:
            scaled[key] = math.lcm(scaled[key], size)
    return scaled


def _multiple(usual: int, size: int) -> int:
    return usual if usual % size == 0 else size


def _num_microbatches(layout: Layout) -> int:
    """Return enough microbatches to fill the pipeline and every encoder's run-ahead."""
    language, step = layout.language, layout.language.pp if layout.language.vpp > 1 else 1
    count, pp, ahead = math.lcm(step, _USUAL_MICROBATCHES), language.pp, layout.ahead
    # One more than needed is what `run_ahead: auto` means.
    while count <= pp + ahead + minimum_run_ahead(pp, language.vpp, count, ahead) + 1:
        count += step
    return count


def _samples_per_microbatch(layout: Layout) -> int:
    """Return the samples of a microbatch: at least two per language lane, one per other lane."""
    lanes = layout.language.dp
    needed = max(2 * lanes, *(grid.dp for grid in layout.item_grids.values()), 0)
    is_usual = _USUAL_SAMPLES % lanes == 0 and needed <= _USUAL_SAMPLES
    return _USUAL_SAMPLES if is_usual else -(-needed // lanes) * lanes


def _run_ahead(value: int | str, layout: Layout, microbatches: int) -> int | str:
    """Return 'auto', or the recipe's number, raised to what is needed or cut to what fits."""
    if value == "auto":
        return value
    language, ahead = layout.language, layout.ahead
    needed = minimum_run_ahead(language.pp, language.vpp, microbatches, ahead)
    return min(max(int(value), needed), microbatches - language.pp - ahead - 1)


def _encode_group(value: int | str, language: GridSpec) -> int | str:
    """Return 'all', one, or several microbatches, as the interleaved schedule allows."""
    if value == "all":
        return value
    stages = language.pp if language.vpp > 1 else 1
    return stages if value == 1 else max(_GROUP // stages, 1) * stages


def reference_recipe(scaled: ScaledRecipe) -> Recipe:
    """Return the recipe for one rank; layouts for which it is equal share one run."""
    data = scaled.recipe.model_dump(mode="json")
    alone = {"grid": {"dp": 1}, "recompute": "none"}
    alone |= {"reshard_after_forward": True, "reduce_gradients": "step"}
    data["language"] |= alone
    for module in (*data["encoders"].values(), *data["generators"].values()):
        module |= alone | {"placement": "disjoint"}
    for encoder in data["encoders"].values():
        encoder |= {"run_ahead": "auto", "encode_group": "all"}
    data["bridge"] = {}
    tokens = scaled.workload.tokens
    if tokens is None:
        data["train"] |= {"micro_batch_size": scaled.workload.samples_per_microbatch}
    data["train"] |= dict.fromkeys(MULTI_RANK_KEYS, False)
    data["data"] |= {"packing": True, "sequence_length": tokens or _SEQUENCE_LENGTH}
    return _validated(data)


def _validated(data: dict[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        problems = (f"{dotted(e['loc'])}: {e['msg']}; got {e['input']!r}" for e in error.errors())
        raise RecipeError(*problems) from error
