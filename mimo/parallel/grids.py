"""Which rank does what: every module's grid as pure integers, before any process group exists.

A grid is a block of consecutive ranks seen as `arange(size).view(pp, dp, cp, tp) + rank_offset`:
tp varies fastest, then cp, then dp, then pp. `mimo.parallel.build` places the grids of a recipe.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from mimo.config.schema import LANGUAGE, Recipe
from mimo.parallel.levels import Link, minimum_run_ahead


class Coords(NamedTuple):
    """A rank's place on each axis of its grid; `dp` is its lane."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class GridSpec:
    """The axis sizes of one module, and the first of its consecutive ranks.

    engine: `megatron` or `fsdp`. dp_replicate: under fsdp, copies of the weights; the dp lanes of
    each copy, dp / dp_replicate of them, share it out.
    """

    module: str
    tp: int = 1
    sp: bool = False
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    rank_offset: int = 0
    engine: str = "megatron"
    dp_replicate: int = 1

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
    links: for encoders that emit feature levels, one per stage that needs any. They follow from
        the models, so they do not count when layouts are compared.
    blocks: of lanes, the same number of disjoint encoders and of the language model. Rows go from a
        block of an encoder's lanes to that block of the language model's alone.
    """

    language: GridSpec
    encoders: dict[str, GridSpec]
    world_size: int
    colocated: frozenset[str] = frozenset()
    links: dict[str, tuple[Link, ...]] = field(default_factory=dict, compare=False)
    blocks: int = 1

    def links_of(self, encoder: str) -> tuple[Link, ...]:
        """The bridges of an encoder; without levels, one to the language model's first stage."""
        return self.links.get(encoder, (Link(encoder),))

    def blocks_of(self, encoder: str) -> int:
        """The blocks of lanes between which an encoder's rows do not go."""
        return 1 if encoder in self.colocated else self.blocks

    @property
    def grids(self) -> dict[str, GridSpec]:
        """All modules by name: the encoders in the recipe's order, then the language model."""
        return {**self.encoders, LANGUAGE: self.language}

    def modules_of(self, rank: int) -> tuple[str, ...]:
        """The modules of which `rank` holds a part."""
        return tuple(name for name, grid in self.grids.items() if rank in grid.ranks)


def encode_group(recipe: Recipe) -> int | None:
    """Microbatches that colocated encoders encode in one go; None for all."""
    return min(
        (
            encoder.encode_group
            for encoder in recipe.encoders.values()
            if encoder.placement == "colocated" and encoder.encode_group != "all"
        ),
        default=None,
    )


def num_microbatches(recipe: Recipe, layout: Layout) -> int:
    """Microbatches per step, equal on every lane of the language model."""
    return recipe.train.global_batch_size // (recipe.train.micro_batch_size * layout.language.dp)


def run_ahead(recipe: Recipe, layout: Layout, encoder: str) -> int:
    """The run-ahead of `encoder`; 'auto' is one more than needed, so that the sides overlap."""
    value = recipe.encoders[encoder].run_ahead
    if value != "auto":
        return value
    return _least_run_ahead(recipe, layout) + 1


def posted_ahead(recipe: Recipe, layout: Layout, encoder: str) -> int:
    """Microbatches whose rows the language model asks for before it needs them.

    As many as the encoder works ahead beyond the least. With fewer, the encoder's device could hold
    sends that nobody has asked for yet; with more, this one's receives that wait for its gradients.
    """
    return run_ahead(recipe, layout, encoder) - _least_run_ahead(recipe, layout)


def _least_run_ahead(recipe: Recipe, layout: Layout) -> int:
    language, microbatches = layout.language, num_microbatches(recipe, layout)
    return minimum_run_ahead(language.pp, language.vpp, microbatches)


def segment_multiple(cp: int) -> int:
    """The multiple for the tokens of each segment of a packed sequence: it has 2·cp chunks."""
    return 2 * cp if cp > 1 else 1


def sequence_multiple(cp: int, tp: int, sp: bool, tokens_on_rank: int = 1) -> int:
    """The multiple for the tokens of each whole sequence, packed or not.

    Sequence parallelism cuts a context-parallel rank's share of the sequence into tp parts.
    tokens_on_rank: the multiple for the part of it that a rank holds.
    """
    parts = tp if sp else 1
    return math.lcm(segment_multiple(cp) * parts, tokens_on_rank * cp * parts)
