"""Place the modules of a recipe on ranks, and check the layout.

Disjoint encoders come first, then the language model, then disjoint generators, unless a recipe
gives `rank_offset`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mimo.config.bounds import MAX_RANKS
from mimo.config.schema import Recipe
from mimo.config.source import Location
from mimo.errors import RecipeError
from mimo.families.registry import encoder_settings, language_settings
from mimo.ops.acceleration import fp8_multiple
from mimo.parallel.grids import (
    LANGUAGE,
    GridSpec,
    Layout,
    Link,
    links_of,
    minimum_run_ahead,
    sequence_multiple,
)


def build_layout(recipe: Recipe, world_size: int | None = None) -> Layout:
    """Place every module of `recipe` on its ranks.

    With a `world_size`, one module may leave out `dp`: it gets the remaining ranks. Without one, a
    missing `dp` is 1 and the world is as large as the grids need.

    Raises RecipeError with one line per error.
    """
    if world_size is not None and not 1 <= world_size <= MAX_RANKS:
        raise RecipeError(f"world size: got {world_size}, needs 1 to {MAX_RANKS}")
    guests = {**recipe.encoders, **recipe.generators}
    colocated = {name for name, module in guests.items() if module.placement == "colocated"}
    every = (*recipe.encoders, LANGUAGE, *recipe.generators)
    grids = {name: _grid(recipe, name) for name in every if name not in colocated}
    if sum(grid.size for grid in grids.values()) > MAX_RANKS:  # before anything is enumerated
        culprit = max(grids, key=lambda name: grids[name].size)
        message = f"got {grids[culprit]}, but all grids together have at most {MAX_RANKS}"
        raise RecipeError(recipe.problem((*recipe.key_of(culprit), "grid"), message))
    grids = _place(recipe, _derive_lanes(recipe, grids, world_size))
    in_blocks = {name: grid for name, grid in grids.items() if name not in recipe.generators}
    blocks = _blocks(in_blocks, recipe.bridge.block_ranks) if len(in_blocks) > 1 else 1
    needed = sum(grid.size for grid in grids.values())
    language = grids[LANGUAGE]
    for name in colocated:  # the language model's ranks, but the module's own axes
        grid = _grid(recipe, name)
        lanes = guests[name].grid.dp or max(1, language.size // grid.lane_size)
        grids[name] = replace(grid, dp=lanes, rank_offset=language.rank_offset)
    problems = list[tuple[Location, str]]()
    layout = Layout(
        language=language,
        encoders={name: grids[name] for name in recipe.encoders},
        world_size=world_size or needed,
        colocated=frozenset(colocated),
        links=_links(recipe, language, problems),
        blocks=blocks,
        generators={name: grids[name] for name in recipe.generators},
    )
    problems += _tiling_problems(recipe, layout)
    problems += _colocation_problems(recipe, layout)
    problems += _size_problems(recipe, layout)
    for grid in layout.grids.values():
        problems += _engine_problems(recipe, grid)
    if problems:
        raise RecipeError(*(recipe.problem(*problem) for problem in problems))
    return layout


def _blocks(grids: dict[str, GridSpec], most_ranks: int) -> int:
    """Return the fewest blocks of lanes with at most `most_ranks` at an end of a bridge.

    grids: of the language model and of disjoint encoders.
    """
    lanes = math.gcd(*(grid.dp for grid in grids.values()))
    ranks = max(grid.size // grid.pp for grid in grids.values())
    possible = [number for number in range(1, lanes + 1) if lanes % number == 0]
    return next((number for number in possible if ranks <= number * most_ranks), lanes)


def _links(
    recipe: Recipe, language: GridSpec, problems: list[tuple[Location, str]]
) -> dict[str, tuple[Link, ...]]:
    """Return the bridges of each encoder with feature levels; adds errors to `problems`."""
    links = {}
    try:
        layers = language_settings(recipe).num_layers
        num_levels = {name: encoder_settings(recipe, name).num_levels for name in recipe.encoders}
    except RecipeError:
        return links  # reported elsewhere
    for name, levels in num_levels.items():
        if levels > layers:
            message = (
                f"emits {levels} feature levels, one for each of the language model's first "
                f"layers, but language.model.num_layers is {layers}; emit fewer levels"
            )
            problems.append((("encoders", name, "model"), message))
        elif levels > 0:
            links[name] = links_of(name, language.pp, language.vpp, layers, levels)
    return links


def _grid(recipe: Recipe, module: str) -> GridSpec:
    """Return the grid of `module`, not yet placed, with one lane if `dp` is left out."""
    part = recipe.module(module)
    sizes = part.grid.model_dump(exclude={"dp", "rank_offset"})
    return GridSpec(module, dp=part.grid.dp or 1, engine=part.engine, **sizes)


def _derive_lanes(
    recipe: Recipe, grids: dict[str, GridSpec], world_size: int | None
) -> dict[str, GridSpec]:
    """Fill in the missing `dp`. Raises RecipeError if that is impossible."""
    missing = [name for name in grids if recipe.module(name).grid.dp is None]
    if world_size is None or not missing:
        return grids
    if len(missing) > 1:
        message = f"only one module may leave dp out; {' and '.join(missing)} do; give all but one"
        raise RecipeError(recipe.problem((*recipe.key_of(missing[-1]), "grid", "dp"), message))
    grid = grids[missing[0]]
    taken = {name: other.size for name, other in grids.items() if name != grid.module}
    remaining = world_size - sum(taken.values())
    if remaining < grid.lane_size or remaining % grid.lane_size:
        beside = " beside " + ", ".join(f"{name} {size}" for name, size in taken.items())
        fitting = sum(taken.values()) + max(1, round(remaining / grid.lane_size)) * grid.lane_size
        message = (
            f"cannot be derived: {max(0, remaining)} of {world_size} ranks remain"
            f"{beside if taken else ''}, and one lane of {grid.module} needs {grid.lane_size} "
            f"(tp {grid.tp} · cp {grid.cp} · pp {grid.pp}); start {fitting} ranks, or change the "
            f"grids"
        )
        raise RecipeError(recipe.problem((*recipe.key_of(grid.module), "grid", "dp"), message))
    return {**grids, grid.module: replace(grid, dp=remaining // grid.lane_size)}


def _place(recipe: Recipe, grids: dict[str, GridSpec]) -> dict[str, GridSpec]:
    """Place grids: at the recipe's offset, else in the lowest free block."""
    placed: dict[str, GridSpec] = {}
    for name, grid in grids.items():
        if (offset := recipe.module(name).grid.rank_offset) is not None:
            placed[name] = replace(grid, rank_offset=offset)
    for name, grid in grids.items():
        if name not in placed:
            taken = [other.ranks for other in placed.values()]
            starts = sorted({0, *(ranks.stop for ranks in taken)})
            free = (
                s for s in starts if all(s + grid.size <= r.start or r.stop <= s for r in taken)
            )
            placed[name] = replace(grid, rank_offset=next(free))
    return placed


_NOT_IN_ENCODERS = {
    "cp": "context parallelism",
    "vpp": "interleaved pipeline stages",
    "ep": "expert parallelism",
    "etp": "expert tensor parallelism",
}
# Axes that only Megatron has, and what to use instead.
_MEGATRON_ONLY = {
    "pp": "raise dp or tp, which shard the weights too",
    "vpp": "without pipeline stages there is nothing to interleave",
    "cp": "raise tp with sp, which splits long sequences too",
    "ep": "raise tp, which shares out experts too",
    "etp": "raise tp, which gives each rank whole experts",
}
Problems = Iterator[tuple[Location, str]]


def _engine_problems(recipe: Recipe, grid: GridSpec) -> Problems:
    """Yield errors of keys that the module's engine does not have."""
    key, part = recipe.key_of(grid.module), recipe.module(grid.module)
    replicas = (*key, "grid", "dp_replicate")
    if grid.module in recipe.generators and grid.tp > 1:
        message = f"got {grid.tp}, but generators cannot be split; raise dp, which shards weights"
        yield (*key, "grid", "tp"), message
    if grid.engine == "megatron":
        for axis, feature in _NOT_IN_ENCODERS.items() if grid.module != LANGUAGE else ():
            if (size := getattr(grid, axis)) > 1:
                message = f"got {size}, but {feature} in an encoder is not supported; set it to 1"
                yield (*key, "grid", axis), message
        for where, value, default in (
            (replicas, grid.dp_replicate, 1),
            ((*key, "reshard_after_forward"), part.reshard_after_forward, True),
            ((*key, "reduce_gradients"), part.reduce_gradients, "step"),
        ):
            if value != default:
                message = f"got {value}, a setting of engine: fsdp; remove it, or set engine: fsdp"
                yield where, message
        experts, ranks = grid.ep * grid.etp, grid.size // grid.pp
        if grid.module == LANGUAGE and ranks % experts:
            message = (
                f"got {grid.ep} with etp {grid.etp}, but ep · etp must divide the ranks of a "
                f"stage, tp · cp · dp = {ranks}"
            )
            yield (*key, "grid", "ep"), message
        return
    for axis, instead in _MEGATRON_ONLY.items():
        if (size := getattr(grid, axis)) > 1:
            message = f"got {size}, which only engine: megatron has; {instead}, or set that engine"
            yield (*key, "grid", axis), message
    if grid.dp % grid.dp_replicate:
        yield replicas, f"got {grid.dp_replicate}, but it must divide the lanes, dp {grid.dp}"
    if recipe.init_from is None and grid.module not in recipe.generators:
        message = "got fsdp, which runs the model in init_from; set init_from, or engine: megatron"
        yield (*key, "engine"), message
    if grid.module == LANGUAGE and (fp8 := recipe.train.fp8) != "none":
        message = f"got {fp8}, which needs language.engine: megatron; set it to none"
        yield ("train", "fp8"), message


def _colocation_problems(recipe: Recipe, layout: Layout) -> Problems:
    """Yield errors of colocated grids, which have exactly the language model's ranks."""
    stages = layout.language.pp if layout.language.vpp > 1 else 1
    for name in sorted(layout.colocated):
        grid, size, key = layout.grids[name], layout.language.size, recipe.key_of(name)
        if grid.size != size:
            message = (
                f"got {grid}, but a colocated module has all {size} ranks of the language model; "
                f"choose tp · dp = {size}, or leave dp out"
            )
            yield (*key, "grid"), message
        if recipe.module(name).grid.rank_offset is not None:
            message = "a colocated module has the ranks of the language model; remove rank_offset"
            yield (*key, "grid", "rank_offset"), message
        if name in layout.generators:
            if layout.language.pp > 1:
                message = (
                    f"got colocated, but language.grid.pp is {layout.language.pp}; a colocated "
                    f"generator needs pp 1; set placement: disjoint"
                )
                yield (*key, "placement"), message
            continue
        if grid.pp > 1:
            message = f"got {grid.pp}, but a colocated encoder runs on one stage; set it to 1"
            yield (*key, "grid", "pp"), message
        other = min(layout.colocated & layout.encoders.keys())
        group, first = (recipe.encoders[n].encode_group for n in (name, other))
        if group != first:
            message = f"got {group}, but encoders.{other} has {first}; give both the same"
            yield (*key, "encode_group"), message
        if group != "all" and group % stages:
            message = f"got {group}, needs a multiple of language.grid.pp {stages}, as vpp is not 1"
            yield (*key, "encode_group"), message


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _tiling_problems(recipe: Recipe, layout: Layout) -> Problems:
    """Yield errors of grids that do not use every rank of the world exactly once."""
    grids = {name: grid for name, grid in layout.grids.items() if name not in layout.colocated}
    places = ", ".join(f"{name} {_format_ranks(grid.ranks)}" for name, grid in grids.items())
    moved = [name for name in grids if recipe.module(name).grid.rank_offset]
    offset = (*recipe.key_of(moved[-1] if moved else LANGUAGE), "grid", "rank_offset")
    needed = sum(grid.size for grid in grids.values())
    if layout.world_size != needed:
        sizes = ", ".join(f"{name}: {grid}" for name, grid in grids.items())
        message = f"got {layout.world_size} ranks, but the grids need {needed} ({sizes}); "
        yield (LANGUAGE, "grid"), f"{message}start {needed}, or change dp"
    used = Counter(rank for grid in grids.values() for rank in grid.ranks)
    twice = sorted(rank for rank, times in used.items() if times > 1)
    unused = sorted(set(range(needed)) - used.keys())
    if twice:
        yield offset, f"{_format_ranks(twice)} would be used twice ({places}); remove rank_offset"
    elif unused and layout.world_size == needed:
        idle = f"{_format_ranks(unused)} of {needed} would be used by no module"
        yield offset, f"{idle} ({places}); remove rank_offset"


def _size_problems(recipe: Recipe, layout: Layout) -> Problems:
    """Yield errors of batch, sequence and run-ahead sizes."""
    train, language = recipe.train, layout.language
    step = train.micro_batch_size * language.dp
    if train.global_batch_size % step:
        nearby = max(1, round(train.global_batch_size / step)) * step
        message = (
            f"got {train.global_batch_size}, needs a multiple of {step} (train.micro_batch_size "
            f"{train.micro_batch_size} · language.grid.dp {language.dp}), such as {nearby}"
        )
        yield ("train", "global_batch_size"), message
    divisor = sequence_multiple(language.cp, language.tp, language.sp, fp8_multiple(train.fp8))
    if recipe.data.sequence_length % divisor:
        nearby = (recipe.data.sequence_length // divisor + 1) * divisor
        message = (
            f"got {recipe.data.sequence_length}, needs a multiple of {divisor} "
            f"(language.grid tp {language.tp}, sp {str(language.sp).lower()}, cp {language.cp}; "
            f"train.fp8 {train.fp8}), such as {nearby}"
        )
        yield ("data", "sequence_length"), message
    microbatches = max(1, train.global_batch_size // step)
    if language.vpp > 1 and language.pp == 1:
        message = f"got {language.vpp}, but interleaving needs pipeline stages; set pp to 2 or more"
        yield (LANGUAGE, "grid", "vpp"), message
    elif language.vpp > 1 and microbatches % language.pp:
        message = (
            f"gives {microbatches} microbatches per step, but with vpp {language.vpp} their number "
            f"must be a multiple of language.grid.pp {language.pp}"
        )
        yield ("train", "global_batch_size"), message
    needed = minimum_run_ahead(language.pp, language.vpp, microbatches, layout.ahead)
    for name, encoder in recipe.encoders.items():
        if name in layout.colocated or encoder.run_ahead == "auto":
            continue
        if encoder.run_ahead < needed:
            message = (
                f"got {encoder.run_ahead}, which would deadlock: language.grid.pp {language.pp} "
                f"with vpp {language.vpp}{', which runs ahead for a generator,' * layout.ahead} "
                f"needs at least {needed}; use auto"
            )
            yield ("encoders", name, "run_ahead"), message
