"""Scale a layout down but keep its character, in pure integers.

Every axis above 1 stays above 1. Placements, SP, interleaving and the kind of lane ratio between
each encoder or generator and the language model stay. A layout that still needs too many ranks is
covered by several layouts, each with some of the parallel axes.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

from mimo.parallel.grids import LANGUAGE, GridSpec, Layout

Axis = tuple[str, str]
"""A module and one of its axes, such as ("language", "tp")."""

_AXES = ("tp", "cp", "pp", "dp")
_EXPERT_AXES = ("ep", "etp")
_SMALL = (2, 3, 4)  # sizes to try for an axis above 1, before its actual size
_FEW_LANES = range(2, 9)  # of a disjoint module


class Part(NamedTuple):
    """A layout with some of the parallel axes of another, the others set to 1."""

    axes: frozenset[Axis]
    layout: Layout

    @property
    def name(self) -> str:
        """For example `language.tp · vision.dp`."""
        return " · ".join(".".join(axis) for axis in sorted(self.axes)) or "no parallel axis"


class Cover(NamedTuple):
    """Layouts that cover a larger one; uncovered: pairs of axes that no layout has together."""

    parts: list[Part]
    uncovered: list[tuple[Axis, Axis]]


def lane_ratio(module_lanes: int, language_lanes: int) -> str:
    """Return the kind of lane ratio, which determines how rows and gradients are routed."""
    if module_lanes == language_lanes:
        return "equal"
    if module_lanes % language_lanes == 0:
        return "fan-in"
    if language_lanes % module_lanes == 0:
        return "fan-out"
    return "non-dividing, " + ("more" if module_lanes > language_lanes else "fewer")


def place(
    language: GridSpec,
    modules: Mapping[str, GridSpec],
    colocated: Collection[str],
    in_blocks: bool = False,
    generators: Collection[str] = (),
) -> Layout:
    """Return a layout of these grids without gaps.

    Disjoint modules stand in the order of their offsets; where these are equal, encoders come
    first and generators last. modules: all but the language model. in_blocks: with the fewest
    blocks of lanes above one, if the lanes can be divided. generators: names of the modules that
    are generators.
    """
    encoders = {name: grid for name, grid in modules.items() if name not in generators}
    grids, start = {**encoders, LANGUAGE: language, **modules}, 0
    disjoint = [name for name in grids if name not in colocated]
    for name in sorted(disjoint, key=lambda name: grids[name].rank_offset):
        grids[name] = replace(grids[name], rank_offset=start)
        start = grids[name].ranks.stop
    language = grids.pop(LANGUAGE)
    for name in colocated:
        grids[name] = replace(grids[name], rank_offset=language.rank_offset)
    placed = {name: grids.pop(name) for name in generators}
    layout = Layout(language, grids, start, frozenset(colocated), generators=placed)
    return replace(layout, blocks=_fewest_blocks(layout)) if in_blocks else layout


def parallel_axes(layout: Layout) -> tuple[Axis, ...]:
    """Return the axes above 1, without dp of colocated modules: it follows from other axes."""
    return tuple(
        (name, axis)
        for name, grid in layout.grids.items()
        for axis in (*_AXES, *_EXPERT_AXES)
        if getattr(grid, axis) > 1 and not (axis == "dp" and name in layout.colocated)
    )


def keep_axes(layout: Layout, axes: frozenset[Axis]) -> Layout | None:
    """Set all axes but ``axes`` to 1; None if experts or a colocated module do not fit then.

    Axes of experts get their smallest size, which may fit where the whole does not.
    """

    def reduced(grid: GridSpec) -> GridSpec:
        sizes = {axis: getattr(grid, axis) if (grid.module, axis) in axes else 1 for axis in _AXES}
        sizes |= {
            axis: size if (grid.module, axis) in axes else 1
            for axis, size in _smallest_expert_axes(grid).items()
        }
        grid = replace(grid, **sizes, dp_replicate=_replicas(grid, sizes["dp"]) or 1)
        return replace(grid, sp=grid.sp and grid.tp > 1, vpp=grid.vpp if grid.pp > 1 else 1)

    language = reduced(layout.language)
    if not _experts_fit(language):
        return None
    modules = {name: reduced(grid) for name, grid in layout.item_grids.items()}
    for name in layout.colocated:
        lanes, rest = divmod(language.size, modules[name].tp)
        if rest:
            return None
        copies = _replicas(layout.item_grids[name], lanes) or 1
        modules[name] = replace(modules[name], dp=lanes, dp_replicate=copies)
    return _placed_like(layout, language, modules)


def shrink(layout: Layout) -> Layout:
    """Return the layout of the same kind with the smallest size above 1 of each axis above 1."""
    language, candidates = layout.language, {}
    for sizes in product(*(_sizes(getattr(language, axis)) for axis in _AXES)):
        axes = dict(zip(_AXES, sizes, strict=True))
        if (copies := _replicas(language, axes["dp"])) is None:
            continue
        axes |= _smallest_expert_axes(language)
        candidate = replace(language, **axes, vpp=min(language.vpp, 2), dp_replicate=copies)
        if not _experts_fit(candidate):
            continue
        modules = {name: _shrink_module(layout, name, candidate) for name in layout.item_grids}
        fitting = {name: grid for name, grid in modules.items() if grid is not None}
        if len(fitting) == len(modules):
            placed = _placed_like(layout, candidate, fitting)
            candidates[placed.world_size, sum(sizes), sizes] = placed
    return candidates[min(candidates)]  # the layout's sizes are among them


def _placed_like(layout: Layout, language: GridSpec, modules: Mapping[str, GridSpec]) -> Layout:
    return place(language, modules, layout.colocated, layout.blocks > 1, layout.generators)


def cover(layout: Layout, max_ranks: int) -> Cover:
    """Return maximal sets of axes whose shrunk layout fits. Raises ValueError naming the others."""
    axes, parts = parallel_axes(layout), []
    for count in range(len(axes), -1, -1):
        for chosen in map(frozenset, combinations(axes, count)):
            if any(chosen <= part.axes for part in parts):
                continue
            reduced = keep_axes(layout, chosen)
            if reduced is not None and (small := shrink(reduced)).world_size <= max_ranks:
                parts.append(Part(chosen, small))
    missing = [axis for axis in axes if not any(axis in part.axes for part in parts)]
    if missing:
        names = ", ".join(".grid.".join(axis) for axis in missing)
        raise ValueError(f"no layout with {names} fits into {max_ranks} ranks")
    if not parts:
        needed = shrink(layout).world_size
        raise ValueError(f"the modules need {needed} ranks, but got {max_ranks}")
    pairs = combinations(axes, 2)
    return Cover(parts, [pair for pair in pairs if not any(part.axes >= {*pair} for part in parts)])


def _smallest_expert_axes(grid: GridSpec) -> dict[str, int]:
    """Return the smallest size above 1 of each axis of experts above 1: a prime factor."""
    sizes = {axis: getattr(grid, axis) for axis in _EXPERT_AXES}
    return {a: next((f for f in range(2, n) if n % f == 0), n) for a, n in sizes.items()}


def _experts_fit(grid: GridSpec) -> bool:
    return grid.size // grid.pp % (grid.ep * grid.etp) == 0


def _sizes(size: int) -> tuple[int, ...]:
    return (1,) if size == 1 else tuple(sorted({*_SMALL, size}))


def _shrink_module(layout: Layout, name: str, language: GridSpec) -> GridSpec | None:
    """Return a module's smallest grid that fits this language grid; None if there is none."""
    grid = layout.item_grids[name]
    kind = lane_ratio(grid.dp, layout.language.dp)
    blocks = 1 if layout.blocks_of(name) == 1 else _fewest_blocks(layout)

    def is_same_kind(tp: int, dp: int) -> bool:
        same_axes = (tp > 1, dp > 1) == (grid.tp > 1, grid.dp > 1)
        has_replicas = _replicas(grid, dp) is not None
        has_blocks = math.gcd(dp, language.dp) % blocks == 0
        return same_axes and has_replicas and has_blocks and lane_ratio(dp, language.dp) == kind

    def resized(tp: int, dp: int) -> GridSpec:
        return replace(grid, tp=tp, dp=dp, dp_replicate=_replicas(grid, dp) or 1)

    if name in layout.colocated:
        size = language.size
        fits = [tp for tp in range(1, size + 1) if size % tp == 0 and is_same_kind(tp, size // tp)]
        return resized(fits[0], size // fits[0]) if fits else None
    tp, cp, pp = (min(getattr(grid, axis), 2) for axis in ("tp", "cp", "pp"))
    lanes = [dp for dp in (1, *_FEW_LANES, grid.dp) if is_same_kind(tp, dp)]
    if not lanes:
        return None
    return replace(resized(tp, lanes[0]), cp=cp, pp=pp, vpp=min(grid.vpp, 2))


def _fewest_blocks(layout: Layout) -> int:
    """Return the fewest blocks above one that divide the lanes of disjoint encoders; else 1."""
    disjoint = [grid for name, grid in layout.encoders.items() if name not in layout.colocated]
    lanes = math.gcd(layout.language.dp, *(grid.dp for grid in disjoint)) if disjoint else 1
    return next((number for number in range(2, lanes + 1) if lanes % number == 0), 1)


def _replicas(grid: GridSpec, lanes: int) -> int | None:
    """Return the fewest copies of the weights of the grid's kind: one, one per lane, or fewer."""
    if grid.dp_replicate == 1:
        return 1
    if grid.dp_replicate == grid.dp:
        return lanes
    return next((copies for copies in range(2, lanes) if lanes % copies == 0), None)
