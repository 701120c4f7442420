"""Which rank does what: every module's grid as pure integers, before any process group exists.

A grid is a block of consecutive ranks seen as `arange(size).view(pp, dp, cp, tp) + rank_offset`:
tp varies fastest, then cp, then dp, then pp. Disjoint encoders come first, then the language
model, unless a recipe gives `rank_offset`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple

from mimo.bounds import MAX_RANKS
from mimo.errors import RecipeError
from mimo.families.registry import num_language_layers, num_levels
from mimo.layout.levels import Link, level_places, links_of, minimum_run_ahead
from mimo.layout.padding import sequence_multiple
from mimo.recipe.schema import Encoder, Grid, Language, Recipe
from mimo.recipe.unsupported import refusals

LANGUAGE = "language"


class Coords(NamedTuple):
    """A rank's place on each axis of its grid; `dp` is its lane."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class GridSpec:
    """The axis sizes of one module, and the first of its consecutive ranks."""

    module: str
    tp: int = 1
    sp: bool = False
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    rank_offset: int = 0

    @property
    def lane_size(self) -> int:
        """Ranks of one DP replica."""
        return self.tp * self.cp * self.pp

    @property
    def size(self) -> int:
        """Ranks of the module."""
        return self.lane_size * self.dp

    @property
    def ranks(self) -> range:
        """The module's ranks, as global ids."""
        return range(self.rank_offset, self.rank_offset + self.size)

    def rank(self, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The global id of the rank at these coordinates. Raises IndexError outside the grid."""
        for axis, index in (("dp", dp), ("pp", pp), ("cp", cp), ("tp", tp)):
            if not 0 <= index < getattr(self, axis):
                raise IndexError(f"{self.module}: {axis} {index} is not in {self}")
        return self.rank_offset + tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def coords(self, rank: int) -> Coords:
        """The coordinates of a global rank. Raises IndexError for a rank of another module."""
        if rank not in self.ranks:
            raise IndexError(f"{self.module}: rank {rank} is not in {self}")
        rest, tp = divmod(rank - self.rank_offset, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coords(dp=dp, pp=pp, cp=cp, tp=tp)

    def __str__(self) -> str:
        """For example `tp 2 · cp 1 · pp 2 · dp 1 = 4 ranks`."""
        plural = "" if self.size == 1 else "s"
        return (
            f"tp {self.tp} · cp {self.cp} · pp {self.pp} · dp {self.dp} = {self.size} rank{plural}"
        )


@dataclass(frozen=True)
class Layout:
    """Every module's grid; disjoint ones together use each of the `world_size` ranks once.

    colocated: names of the encoders that run on the language model's ranks.
    links: of the encoders that emit feature levels, one per stage that needs any. They follow from
        the models, so layouts are equal without them.
    """

    language: GridSpec
    encoders: dict[str, GridSpec]
    world_size: int
    colocated: frozenset[str] = frozenset()
    links: dict[str, tuple[Link, ...]] = field(default_factory=dict, compare=False)

    def links_of(self, encoder: str) -> tuple[Link, ...]:
        """The bridges of an encoder; without levels, one to the language model's first stage."""
        return self.links.get(encoder, (Link(encoder),))

    @property
    def grids(self) -> dict[str, GridSpec]:
        """All modules by name: the encoders in the recipe's order, then the language model."""
        return {**self.encoders, LANGUAGE: self.language}

    def modules_of(self, rank: int) -> tuple[str, ...]:
        """The modules that `rank` holds a part of."""
        return tuple(name for name, grid in self.grids.items() if rank in grid.ranks)


def build_layout(recipe: Recipe, world_size: int | None = None) -> Layout:
    """Place every module of `recipe` on its ranks.

    With a `world_size` one module may leave `dp` out: it gets the ranks that remain. Without one,
    a missing `dp` is 1 and the world is as large as the grids need.

    Raises RecipeError with one line per finding: grids that overlap, leave ranks unused or need
    another number of ranks, batch and sequence sizes that do not divide, a run-ahead that would
    deadlock, and what this version does not support yet.
    """
    problems = [recipe.problem(*found) for found in refusals(recipe.model_dump())]
    if world_size is not None and not 1 <= world_size <= MAX_RANKS:
        raise RecipeError(f"world size: got {world_size}, needs 1 to {MAX_RANKS}", *problems)
    colocated = {n for n, encoder in recipe.encoders.items() if encoder.placement == "colocated"}
    names = [name for name in (*recipe.encoders, LANGUAGE) if name not in colocated]
    num_problems = len(problems)
    grids = {name: _grid(name, _module(recipe, name).grid) for name in names}
    if sum(grid.size for grid in grids.values()) > MAX_RANKS:  # before anything is enumerated
        culprit = max(grids, key=lambda name: grids[name].size)
        message = f"got {grids[culprit]}, but all grids together have at most {MAX_RANKS}"
        raise RecipeError(recipe.problem((*_key(culprit), "grid"), message), *problems)
    grids = _derive_lanes(recipe, grids, world_size, problems)
    if len(problems) > num_problems:
        raise RecipeError(*problems)
    grids = _place(recipe, grids)
    needed = sum(grid.size for grid in grids.values())
    grids |= {name: _on_language(recipe, name, grids[LANGUAGE]) for name in colocated}
    layout = Layout(
        language=grids[LANGUAGE],
        encoders={name: grids[name] for name in recipe.encoders},
        world_size=world_size or needed,
        colocated=frozenset(colocated),
        links=_links(recipe, grids[LANGUAGE], problems),
    )
    problems += _tiling_problems(recipe, layout)
    problems += _colocation_problems(recipe, layout)
    problems += _size_problems(recipe, layout)
    if problems:
        raise RecipeError(*problems)
    return layout


def num_microbatches(recipe: Recipe, layout: Layout) -> int:
    """Microbatches per step, equal on every lane of the language model."""
    return recipe.train.global_batch_size // (recipe.train.micro_batch_size * layout.language.dp)


def run_ahead(recipe: Recipe, layout: Layout, encoder: str) -> int:
    """The run-ahead of `encoder`; 'auto' is one more than needed, so that both sides overlap."""
    value = recipe.encoders[encoder].run_ahead
    if value != "auto":
        return value
    language, microbatches = layout.language, num_microbatches(recipe, layout)
    return minimum_run_ahead(language.pp, language.vpp, microbatches) + 1


def _links(recipe: Recipe, language: GridSpec, problems: list[str]) -> dict[str, tuple[Link, ...]]:
    """By encoder with feature levels, its bridges; too many levels are added to `problems`."""
    links, layers = {}, num_language_layers(recipe)
    for name in recipe.encoders:
        levels = num_levels(recipe, name)
        if layers is not None and levels > layers:
            problems.append(
                recipe.problem(
                    ("encoders", name, "model"),
                    f"emits {levels} feature levels, one for each of the language model's first "
                    f"layers, but language.model.num_layers is {layers}; emit fewer levels",
                )
            )
        elif layers is not None and levels > 0:
            places = level_places(language.pp, language.vpp, layers, levels)
            links[name] = links_of(name, places)
    return links


def _key(module: str) -> tuple[str, ...]:
    return (LANGUAGE,) if module == LANGUAGE else ("encoders", module)


def _module(recipe: Recipe, name: str) -> Language | Encoder:
    return recipe.language if name == LANGUAGE else recipe.encoders[name]


def _grid(module: str, grid: Grid) -> GridSpec:
    """The axes of `module`, with one lane where `dp` is left out, not placed yet."""
    return GridSpec(
        module, tp=grid.tp, sp=grid.sp, cp=grid.cp, pp=grid.pp, vpp=grid.vpp, dp=grid.dp or 1
    )


def _derive_lanes(
    recipe: Recipe, grids: dict[str, GridSpec], world_size: int | None, problems: list[str]
) -> dict[str, GridSpec]:
    """`grids` with every `dp` filled in; a reason why one cannot be is added to `problems`."""
    missing = [name for name in grids if _module(recipe, name).grid.dp is None]
    if world_size is None or not missing:
        return grids
    if len(missing) > 1:
        keys = " and ".join(".".join((*_key(name), "grid", "dp")) for name in missing)
        problems.append(
            recipe.problem(
                (*_key(missing[-1]), "grid", "dp"),
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
                (*_key(grid.module), "grid", "dp"),
                f"cannot be derived: {max(0, remaining)} of {world_size} ranks remain"
                f"{beside if taken else ''}, and one lane of {grid.module} needs "
                f"{grid.lane_size} (tp {grid.tp} · cp {grid.cp} · pp {grid.pp}); "
                f"start {fitting} ranks, or change the grids",
            )
        )
        return grids
    return {**grids, grid.module: replace(grid, dp=remaining // grid.lane_size)}


def _place(recipe: Recipe, grids: dict[str, GridSpec]) -> dict[str, GridSpec]:
    """Grids with offsets: given ones stand, each other module takes the lowest free block."""
    placed: dict[str, GridSpec] = {}
    for name, grid in grids.items():
        if (offset := _module(recipe, name).grid.rank_offset) is not None:
            placed[name] = replace(grid, rank_offset=offset)
    for name, grid in grids.items():
        if name not in placed:
            starts = sorted({0, *(other.ranks.stop for other in placed.values())})
            blocks = (replace(grid, rank_offset=start) for start in starts)
            placed[name] = next(
                block
                for block in blocks
                if not any(_overlap(block, other) for other in placed.values())
            )
    return placed


def _on_language(recipe: Recipe, name: str, language: GridSpec) -> GridSpec:
    """The grid of a colocated encoder: the language model's ranks, axes of its own."""
    given = recipe.encoders[name].grid
    grid = _grid(name, given)
    lanes = given.dp or max(1, language.size // grid.lane_size)
    return replace(grid, dp=lanes, rank_offset=language.rank_offset)


def _colocation_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Colocated grids that are not made of exactly the language model's ranks."""
    for name in sorted(layout.colocated):
        grid, size = layout.encoders[name], layout.language.size
        if grid.size != size:
            yield recipe.problem(
                (*_key(name), "grid"),
                f"got {grid}, but a colocated encoder has all {size} ranks of the language model; "
                f"choose tp · dp = {size}, or leave dp out",
            )
        if grid.pp > 1:
            yield recipe.problem(
                (*_key(name), "grid", "pp"),
                f"got {grid.pp}, but a colocated encoder runs on one stage; set it to 1",
            )
        if recipe.encoders[name].grid.rank_offset is not None:
            yield recipe.problem(
                (*_key(name), "grid", "rank_offset"),
                "a colocated encoder stands where the language model does; remove rank_offset",
            )
        group, first = (
            recipe.encoders[n].encode_group for n in (name, sorted(layout.colocated)[0])
        )
        if group != first:
            yield recipe.problem(
                (*_key(name), "encode_group"),
                f"got {group}, but encoders.{sorted(layout.colocated)[0]} has {first}; colocated "
                f"encoders share their groups, give both the same",
            )
        stages = layout.language.pp if layout.language.vpp > 1 else 1
        if group != "all" and group % stages:
            yield recipe.problem(
                (*_key(name), "encode_group"),
                f"got {group}, needs a multiple of language.grid.pp {stages}, because its stages "
                f"are interleaved",
            )


def _overlap(one: GridSpec, other: GridSpec) -> range:
    """The ranks that both grids use."""
    start = max(one.ranks.start, other.ranks.start)
    return range(start, max(start, min(one.ranks.stop, other.ranks.stop)))


def _text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _tiling_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Grids that overlap, or do not use every rank of the world exactly once."""
    grids = {name: grid for name, grid in layout.grids.items() if name not in layout.colocated}
    places = ", ".join(f"{name} {_text(grid.ranks)}" for name, grid in grids.items())
    moved = [name for name in grids if _module(recipe, name).grid.rank_offset]
    culprit = moved[-1] if moved else LANGUAGE
    overlaps = [_overlap(one, other) for one, other in combinations(grids.values(), 2)]
    needed = sum(grid.size for grid in grids.values())
    if layout.world_size != needed:
        sizes = ", ".join(f"{name}: {grid}" for name, grid in grids.items())
        yield recipe.problem(
            (LANGUAGE, "grid"),
            f"got {layout.world_size} ranks, but the grids need {needed} ({sizes}); "
            f"start {needed}, or change dp",
        )
    for shared in filter(None, overlaps):
        yield recipe.problem(
            (*_key(culprit), "grid", "rank_offset"),
            f"{_text(shared)} would be used twice ({places}), but disjoint grids share none; "
            f"remove rank_offset",
        )
    if layout.world_size == needed and not any(overlaps):
        unused = _unused(grids.values(), needed)
        if unused:
            yield recipe.problem(
                (*_key(culprit), "grid", "rank_offset"),
                f"{_text(unused)} of {needed} would be used by no module ({places}); "
                f"remove rank_offset",
            )


def _unused(grids: Iterable[GridSpec], needed: int) -> list[int]:
    """The first and the last of `needed` ranks that no grid has; grids do not overlap."""
    placed = sorted((grid.ranks for grid in grids), key=lambda ranks: ranks.start)
    starts = [0, *(ranks.stop for ranks in placed)]
    stops = [*(min(ranks.start, needed) for ranks in placed), needed]
    gaps = [range(*pair) for pair in zip(starts, stops, strict=True) if pair[0] < pair[1]]
    return sorted({gaps[0][0], gaps[-1][-1]}) if gaps else []


def _size_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Batch, sequence and run-ahead sizes that the layout cannot work with."""
    train, language = recipe.train, layout.language
    step = train.micro_batch_size * language.dp
    if train.global_batch_size % step:
        nearby = max(1, round(train.global_batch_size / step)) * step
        yield recipe.problem(
            ("train", "global_batch_size"),
            f"got {train.global_batch_size}, needs a multiple of {step} (train.micro_batch_size "
            f"{train.micro_batch_size} · language.grid.dp {language.dp}), such as {nearby}",
        )
    divisor = sequence_multiple(language.cp, language.tp, language.sp)
    if recipe.data.sequence_length % divisor:
        nearby = (recipe.data.sequence_length // divisor + 1) * divisor
        yield recipe.problem(
            ("data", "sequence_length"),
            f"got {recipe.data.sequence_length}, needs a multiple of {divisor} "
            f"(language.grid tp {language.tp}, sp {str(language.sp).lower()}, cp {language.cp}), "
            f"such as {nearby}",
        )
    microbatches = max(1, train.global_batch_size // step)
    if language.vpp > 1:
        yield from _interleaving_problems(recipe, language, microbatches)
    needed = minimum_run_ahead(language.pp, language.vpp, microbatches)
    for name, encoder in recipe.encoders.items():
        if name in layout.colocated or encoder.run_ahead == "auto":
            continue
        if encoder.run_ahead < needed:
            yield recipe.problem(
                ("encoders", name, "run_ahead"),
                f"got {encoder.run_ahead}, which would deadlock: language.grid.pp {language.pp} "
                f"with vpp {language.vpp} needs at least {needed}; use auto",
            )


def _interleaving_problems(recipe: Recipe, language: GridSpec, microbatches: int) -> Iterator[str]:
    if language.pp == 1:
        yield recipe.problem(
            (LANGUAGE, "grid", "vpp"),
            f"got {language.vpp}, but interleaving needs pipeline stages; set pp to 2 or more",
        )
    elif microbatches % language.pp:
        yield recipe.problem(
            ("train", "global_batch_size"),
            f"gives {microbatches} microbatches per step, but with vpp {language.vpp} their number "
            f"must be a multiple of language.grid.pp {language.pp}",
        )
