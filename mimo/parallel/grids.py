"""Layouts: which rank does what, as pure integers, before any process group exists.

A grid is a block of consecutive ranks seen as `arange(size).view(pp, dp, cp, tp) + rank_offset`:
tp varies fastest, then cp, then dp, then pp. `mimo.parallel.build` places the grids of a recipe.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from mimo.config.schema import LANGUAGE, Recipe, Train
from mimo.runtime.ranks import Variable

_REPEATS = 4  # of the schedule's pattern, with its beginning and end


@dataclass(frozen=True)
class Link:
    """The bridge between a module and one stage of the language model: the one that needs the rows
    of an encoder, or the last one, which has those for a generator.

    levels: ascending; one message holds the rows of all. chunks: for each level the stage's chunk
    that needs it, ascending. Level 0 is the embeddings, for the first layer's input; level k is
    added after the k-th layer (DeepStack), by the chunk that owns that layer.
    """

    module: str
    stage: int = 0
    levels: tuple[int, ...] = (0,)
    chunks: tuple[int, ...] = (0,)

    @property
    def name(self) -> str:
        """Name in messages to users."""
        if self.levels == (0,):
            return self.module
        return f"{self.module} (levels {', '.join(map(str, self.levels))})"


class Coords(NamedTuple):
    """A rank's place on each axis of its grid; `dp` is its lane."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class GridSpec:
    """The axis sizes of one module, and the first of its consecutive ranks.

    engine: `megatron` or `fsdp`. dp_replicate: under fsdp, copies of the weights, each sharded over
    dp / dp_replicate lanes. ep, etp: for the experts of a sparse model, the ranks of a stage are
    seen as (copies, ep, etp), etp fastest, where ep ranks share out the experts and etp ranks
    split each of them.
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
    ep: int = 1
    etp: int = 1

    @property
    def lane_size(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def size(self) -> int:
        return self.lane_size * self.dp

    @property
    def expert_copies(self) -> int:
        """Ranks of a stage with the same part of the same experts."""
        return self.size // (self.pp * self.ep * self.etp)

    @property
    def ranks(self) -> range:
        return range(self.rank_offset, self.rank_offset + self.size)

    def rank(self, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        return self.rank_offset + tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def coords(self, rank: int) -> Coords:
        assert rank in self.ranks, f"{self.module} has no rank {rank}"
        rest, tp = divmod(rank - self.rank_offset, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coords(dp=dp, pp=pp, cp=cp, tp=tp)

    def __str__(self) -> str:
        """For example `tp 2 · cp 1 · pp 2 · dp 1 = 4 ranks`."""
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        experts = f" (ep {self.ep} · etp {self.etp})" if self.ep * self.etp > 1 else ""
        return f"tp {self.tp} · cp {self.cp} · pp {self.pp} · dp {self.dp} = {ranks}{experts}"


@dataclass(frozen=True)
class Layout:
    """Every module's grid; disjoint ones together use each of the `world_size` ranks once.

    colocated: encoders and generators that run on the language model's ranks.
    links: for encoders that emit feature levels, one per stage that needs any. They follow from
        the models, so comparisons of layouts ignore them.
    blocks: number of blocks into which the lanes of each module are cut. Rows go only between a
        block of a disjoint module's lanes and the same block of the language model's.
    """

    language: GridSpec
    encoders: dict[str, GridSpec]
    world_size: int
    colocated: frozenset[str] = frozenset()
    links: dict[str, tuple[Link, ...]] = field(default_factory=dict, compare=False)
    blocks: int = 1
    generators: dict[str, GridSpec] = field(default_factory=dict)

    def links_of(self, module: str) -> tuple[Link, ...]:
        """Bridges of a module: of a generator, one to the language model's last stage; of an
        encoder without levels, one to the first.
        """
        if module in self.generators:
            return (Link(module, self.language.pp - 1, chunks=(self.language.vpp - 1,)),)
        return self.links.get(module, (Link(module),))

    def blocks_of(self, module: str) -> int:
        """Number of blocks of lanes between which a module's rows do not travel.

        A generator whose lanes they do not divide has one.
        """
        is_whole = module in self.colocated or self.item_grids[module].dp % self.blocks
        return 1 if is_whole else self.blocks

    @property
    def item_grids(self) -> dict[str, GridSpec]:
        """The modules that work on items, by name: encoders, then generators."""
        return {**self.encoders, **self.generators}

    @property
    def grids(self) -> dict[str, GridSpec]:
        """All modules by name: encoders, the language model, generators; as in the recipe."""
        return {**self.encoders, LANGUAGE: self.language, **self.generators}

    @property
    def ahead(self) -> int:
        """Microbatches that the language model runs ahead, as if a generator were one more stage.

        Interleaved schedules keep Megatron's warm-up; a colocated generator runs in the forward.
        """
        return int(self.language.vpp == 1 and not self.colocated >= self.generators.keys())

    def modules_of(self, rank: int) -> tuple[str, ...]:
        return tuple(name for name, grid in self.grids.items() if rank in grid.ranks)


def encode_group(recipe: Recipe) -> int | None:
    """Return the microbatches that colocated encoders encode in one go; None for all."""
    colocated = [e.encode_group for e in recipe.encoders.values() if e.placement == "colocated"]
    return min((group for group in colocated if isinstance(group, int)), default=None)


def num_microbatches(recipe: Recipe, layout: Layout) -> int:
    """Return the microbatches per step, equal on every lane of the language model."""
    return recipe.train.global_batch_size // (recipe.train.micro_batch_size * layout.language.dp)


def run_ahead(recipe: Recipe, layout: Layout, encoder: str) -> int:
    """Return the run-ahead of `encoder`; 'auto' is one more than needed, so that sides overlap."""
    value = recipe.encoders[encoder].run_ahead
    return value if value != "auto" else _least_run_ahead(recipe, layout) + 1


def posted_ahead(recipe: Recipe, layout: Layout, encoder: str) -> int:
    """Return how many microbatches ahead the language model posts its receives.

    With fewer, sends pile up on the encoder's device; with more, receives wait for gradients.
    """
    return run_ahead(recipe, layout, encoder) - _least_run_ahead(recipe, layout)


def _least_run_ahead(recipe: Recipe, layout: Layout) -> int:
    language, microbatches = layout.language, num_microbatches(recipe, layout)
    return minimum_run_ahead(language.pp, language.vpp, microbatches, layout.ahead)


def segment_multiple(cp: int) -> int:
    """Return the multiple for the tokens of each packed segment, which has 2·cp chunks."""
    return 2 * cp if cp > 1 else 1


def sequence_multiple(cp: int, tp: int, sp: bool, tokens_on_rank: int = 1) -> int:
    """Return the multiple for the tokens of each whole sequence, packed or not.

    Sequence parallelism cuts a context-parallel rank's share into tp parts. tokens_on_rank: the
    multiple for the tokens that a rank holds.
    """
    parts = tp if sp else 1
    return math.lcm(segment_multiple(cp) * parts, tokens_on_rank * cp * parts)


def links_of(encoder: str, pp: int, vpp: int, num_layers: int, num_levels: int) -> tuple[Link, ...]:
    """Return links for the embeddings and `num_levels` further levels, in the order of stages.

    Megatron splits the layers evenly: chunk c of stage s is the (c·pp + s)-th part.
    """
    assert num_levels <= num_layers, f"{num_levels} levels for {num_layers} layers"
    per_chunk = max(1, num_layers // (pp * vpp))
    # Layers that do not divide evenly are refused elsewhere.
    parts = [min(layer // per_chunk, pp * vpp - 1) for layer in range(num_levels)]
    stages, chunks = [0, *(part % pp for part in parts)], [0, *(part // pp for part in parts)]
    links = []
    for stage in sorted(set(stages)):
        levels = [level for level, owner in enumerate(stages) if owner == stage]
        links.append(Link(encoder, stage, tuple(levels), tuple(chunks[n] for n in levels)))
    return tuple(links)


def minimum_run_ahead(pp: int, vpp: int, microbatches: int, ahead: int = 0) -> int:
    """Return the fewest microbatches that a disjoint encoder sends before it waits for gradients.

    With fewer, the encoder waits for the gradients of a microbatch, and the language model for the
    rows of a later one. The number follows from the order in which Megatron's schedule (1F1B, or
    interleaved) runs the first chunk of the first stage, which takes rows first and returns
    gradients last. ahead: microbatches that the language model itself runs ahead (`Layout.ahead`).
    """
    # The order repeats every pp microbatches.
    microbatches = min(microbatches, _REPEATS * (pp + ahead))
    table = [
        chunk
        for first in range(0, microbatches, pp)
        for chunk in range(vpp)
        for _ in range(first, min(first + pp, microbatches))
    ]
    later_stages = pp - 1
    warmup = later_stages + ahead if vpp == 1 else later_stages * 2 + (vpp - 1) * pp
    warmup = min(warmup, len(table))
    received = table[:warmup].count(0)
    returned = needed = 0
    for step, chunk in enumerate(table):
        if warmup + step < len(table):
            received += table[warmup + step] == 0
        if chunk == vpp - 1:  # backward runs the chunks in reverse
            needed = max(needed, received - 1 - returned)
            returned += 1
    return needed


def overlap_of(train: Train, on_gpu: bool) -> tuple[bool, bool]:
    """Return whether sums of gradients, and gathers of weights, overlap with computation.

    `auto` is yes on GPUs. On a CPU the exchange would compete for cores.
    """
    reduce = on_gpu if train.overlap_grad_reduce == "auto" else train.overlap_grad_reduce
    gather = train.overlap_param_gather
    if gather == "auto":
        gather = reduce and train.distributed_optimizer
    elif gather:
        reduce = True
    return reduce, gather


def variables_of(layout: Layout, rank: int) -> tuple[Variable, ...]:
    """Return environment variables of this rank that depend on its place in the layout.

    At an end of a disjoint module's bridge kernels load at the start: loading one at its first use
    may wait for a transfer that is posted ahead, whose sender may wait for the kernel.

    With one hardware queue the exchange inside a tensor-parallel layer starts before the matrix
    product that it overlaps with. But one wait blocks all streams, so ranks with transfers posted
    ahead keep several queues.
    """
    grids = [layout.grids[name] for name in layout.modules_of(rank)]
    if _at_end_of_bridge(layout, rank):
        return (Variable("CUDA_MODULE_LOADING", "EAGER"),)
    posts_ahead = any(grid.cp > 1 or grid.engine == "fsdp" for grid in grids)
    if posts_ahead or all(grid.tp == 1 for grid in grids):
        return ()
    return (Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)


def _at_end_of_bridge(layout: Layout, rank: int) -> bool:
    """Whether rows travel between this rank and those of a disjoint module."""
    language = layout.language
    stage = language.coords(rank).pp if rank in language.ranks else None
    return any(
        (rank in grid.ranks and grid.coords(rank).pp == grid.pp - 1)
        or any(link.stage == stage for link in layout.links_of(name))
        for name, grid in layout.item_grids.items()
        if name not in layout.colocated
    )
