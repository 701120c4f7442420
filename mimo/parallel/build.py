"""Places the modules of a recipe on ranks.

Disjoint encoders come first, then the language model, unless a recipe gives `rank_offset`.
"""

import math
from dataclasses import replace

from mimo.config.bounds import MAX_RANKS
from mimo.config.schema import Recipe, key_of, refusals
from mimo.config.source import dotted
from mimo.errors import RecipeError
from mimo.families.registry import encoder_settings, language_settings
from mimo.parallel.checks import layout_problems
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.parallel.levels import Link, links_of


def build_layout(recipe: Recipe, world_size: int | None = None) -> Layout:
    """Place every module of `recipe` on its ranks.

    With a `world_size`, one module may leave out `dp`: it gets the remaining ranks. Without one, a
    missing `dp` is 1 and the world is as large as the grids need.

    Raises RecipeError with one line per finding: grids that overlap, leave ranks unused or need
    another number of ranks, batch and sequence sizes that do not divide, a run-ahead that would
    deadlock, and what this version does not support yet.
    """
    problems = [*refusals(recipe)]
    if world_size is not None and not 1 <= world_size <= MAX_RANKS:
        raise RecipeError(f"world size: got {world_size}, needs 1 to {MAX_RANKS}", *problems)
    colocated = {n for n, encoder in recipe.encoders.items() if encoder.placement == "colocated"}
    names = [name for name in (*recipe.encoders, LANGUAGE) if name not in colocated]
    num_problems = len(problems)
    grids = {name: _grid(recipe, name) for name in names}
    if sum(grid.size for grid in grids.values()) > MAX_RANKS:  # before anything is enumerated
        culprit = max(grids, key=lambda name: grids[name].size)
        message = f"got {grids[culprit]}, but all grids together have at most {MAX_RANKS}"
        raise RecipeError(recipe.problem((*key_of(culprit), "grid"), message), *problems)
    grids = _derive_lanes(recipe, grids, world_size, problems)
    if len(problems) > num_problems:
        raise RecipeError(*problems)
    grids = _place(recipe, grids)
    blocks = _blocks(grids, recipe.bridge.block_ranks) if len(grids) > 1 else 1
    needed = sum(grid.size for grid in grids.values())
    language = grids[LANGUAGE]
    for name in colocated:  # the language model's ranks, but the encoder's axes
        grid = _grid(recipe, name)
        lanes = recipe.encoders[name].grid.dp or max(1, language.size // grid.lane_size)
        grids[name] = replace(grid, dp=lanes, rank_offset=language.rank_offset)
    layout = Layout(
        language=language,
        encoders={name: grids[name] for name in recipe.encoders},
        world_size=world_size or needed,
        colocated=frozenset(colocated),
        links=_links(recipe, language, problems),
        blocks=blocks,
    )
    problems += layout_problems(recipe, layout)
    if problems:
        raise RecipeError(*problems)
    return layout


def _blocks(grids: dict[str, GridSpec], most_ranks: int) -> int:
    """The fewest blocks of lanes with so few ranks at an end of a bridge; else the most.

    grids: the language model's and those of disjoint encoders.
    """
    lanes = math.gcd(*(grid.dp for grid in grids.values()))
    ranks = max(grid.size // grid.pp for grid in grids.values())
    possible = [number for number in range(1, lanes + 1) if lanes % number == 0]
    return next((one for one in possible if ranks <= one * most_ranks), lanes)


def _links(recipe: Recipe, language: GridSpec, problems: list[str]) -> dict[str, tuple[Link, ...]]:
    """The bridges of each encoder with feature levels; too many levels are added to `problems`."""
    links = {}
    try:
        layers = language_settings(recipe).num_layers
        found = {name: encoder_settings(recipe, name).num_levels for name in recipe.encoders}
    except RecipeError:
        return links  # reported elsewhere
    for name, levels in found.items():
        if levels > layers:
            problems.append(
                recipe.problem(
                    ("encoders", name, "model"),
                    f"emits {levels} feature levels, one for each of the language model's first "
                    f"layers, but language.model.num_layers is {layers}; emit fewer levels",
                )
            )
        elif levels > 0:
            links[name] = links_of(name, language.pp, language.vpp, layers, levels)
    return links


def _grid(recipe: Recipe, module: str) -> GridSpec:
    """The grid of `module`, not yet placed, with one lane if `dp` is left out."""
    part = recipe.module(module)
    grid = part.grid
    return GridSpec(
        module,
        tp=grid.tp,
        sp=grid.sp,
        cp=grid.cp,
        pp=grid.pp,
        vpp=grid.vpp,
        dp=grid.dp or 1,
        dp_replicate=grid.dp_replicate,
        engine=part.engine,
    )


def _derive_lanes(
    recipe: Recipe, grids: dict[str, GridSpec], world_size: int | None, problems: list[str]
) -> dict[str, GridSpec]:
    """`grids` with every `dp` filled in; where that is impossible, `problems` gets the reason."""
    missing = [name for name in grids if recipe.module(name).grid.dp is None]
    if world_size is None or not missing:
        return grids
    if len(missing) > 1:
        keys = " and ".join(dotted((*key_of(name), "grid", "dp")) for name in missing)
        problems.append(
            recipe.problem(
                (*key_of(missing[-1]), "grid", "dp"),
                f"only one module may leave dp out; missing are {keys}; give all but one",
            )
        )
        return grids
    grid = grids[missing[0]]
    taken = {name: other.size for name, other in grids.items() if name != grid.module}
    remaining = world_size - sum(taken.values())
    if remaining < grid.lane_size or remaining % grid.lane_size:
        beside = " beside " + ", ".join(f"{name} {size}" for name, size in taken.items())
        fitting = sum(taken.values()) + max(1, round(remaining / grid.lane_size)) * grid.lane_size
        problems.append(
            recipe.problem(
                (*key_of(grid.module), "grid", "dp"),
                f"cannot be derived: {max(0, remaining)} of {world_size} ranks remain"
                f"{beside if taken else ''}, and one lane of {grid.module} needs "
                f"{grid.lane_size} (tp {grid.tp} · cp {grid.cp} · pp {grid.pp}); "
                f"start {fitting} ranks, or change the grids",
            )
        )
        return grids
    return {**grids, grid.module: replace(grid, dp=remaining // grid.lane_size)}


def _place(recipe: Recipe, grids: dict[str, GridSpec]) -> dict[str, GridSpec]:
    """Grids with offsets: given offsets stand, every other module takes the lowest free block."""
    placed: dict[str, GridSpec] = {}
    for name, grid in grids.items():
        if (offset := recipe.module(name).grid.rank_offset) is not None:
            placed[name] = replace(grid, rank_offset=offset)
    for name, grid in grids.items():
        if name not in placed:
            starts = sorted({0, *(other.ranks.stop for other in placed.values())})
            placed[name] = next(
                block
                for block in (replace(grid, rank_offset=start) for start in starts)
                if all(
                    block.ranks.stop <= other.ranks.start or other.ranks.stop <= block.ranks.start
                    for other in placed.values()
                )
            )
    return placed
