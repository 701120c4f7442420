"""Bytes that ranks send each other in a step, from recipe and layout alone.

Estimates from above, as those of memory: microbatches are full (`Recipe.longest_microbatch`), and
all of their tokens are rows of items, as far as `data.rows_per_microbatch` lets them. They say what
to place near what; no time follows from them.

In a ring of n ranks with B bytes each, a rank sends its neighbour (n-1)/n · B to gather or to
reduce-scatter, and twice as much for both, an all-reduce. With b bytes of a number, per step:

- tp: B is a rank's tokens · width · b, two all-reduces for each layer forward, two backward, and
  two more for what is computed again. With sequence parallelism each is a gather and a scatter.
- cp: keys and values of a rank's tokens, n-1 times forward; these and their gradients backward.
- pp: hidden states of a rank's tokens between neighbours, and back their gradients; gradients of
  tied embeddings between the first stage and the last.
- dp: gradients of a stage's weights over dp · cp, summed on all ranks; or, with a distributed
  optimizer, scattered, and the weights gathered. FSDP2 gathers weights for each pass.
- bridge: rows · levels · width · b forward, and as much backward if the encoder learns. Any lane
  of a block may encode an item, so each sender has an equal share for each receiver.

Rings join ranks in the order of their group, as gloo's do: 16 ranks on two nodes cross between them
at two of 16 hops. NCCL visits a node's ranks one after another, so that its rings cross at most
there; an average over all pairs would say that half of the bytes do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mimo.config.schema import Recipe
from mimo.families.registry import encoder_settings, language_settings
from mimo.families.wire import DTYPES
from mimo.model.roles import gradient_bytes, inputs_per_row, parameters_by_role
from mimo.parallel.connections import bridge_ends
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout, num_microbatches


@dataclass(frozen=True)
class Pairs:
    """Ranks that exchange messages of one kind, such as `tp` of `language`.

    pairs: (E, 2) ranks. num_bytes: (E,) that both send each other in a step.
    """

    kind: str
    name: str
    pairs: np.ndarray
    num_bytes: np.ndarray

    def total(self) -> float:
        """Bytes of all pairs."""
        return float(self.num_bytes.sum())

    def across(self, node_of: np.ndarray) -> float:
        """Bytes between ranks on different nodes. node_of: (ranks,)."""
        first, second = node_of[self.pairs].T
        return float(self.num_bytes[first != second].sum())


@dataclass(frozen=True)
class Bridge:
    """Each sender with each receiver of its block, of which a rank may be both.

    ends: senders (s,) and receivers (r,) of each block. num_bytes: of a pair.
    """

    kind: str
    name: str
    ends: Sequence[tuple[np.ndarray, np.ndarray]]
    num_bytes: float

    def total(self) -> float:
        """Bytes between different ranks."""
        pairs = (len(a) * len(b) - len(np.intersect1d(a, b)) for a, b in self.ends)
        return self.num_bytes * sum(pairs)

    def across(self, node_of: np.ndarray) -> float:
        """Bytes between ranks on different nodes. node_of: (ranks,)."""
        size, pairs = int(node_of.max()) + 1, 0
        for ends in self.ends:
            here = [np.bincount(node_of[own], minlength=size) for own in ends]
            pairs += len(ends[0]) * len(ends[1]) - int(here[0] @ here[1])
        return self.num_bytes * pairs


Traffic = Sequence[Pairs | Bridge]


def traffic(recipe: Recipe, layout: Layout) -> Traffic:
    """All that ranks send each other in a step, by kind and module; what nobody sends is left out.

    Raises RecipeError if a module's settings are wrong.
    """
    found: list[Pairs | Bridge] = []
    for name, grid in layout.grids.items():
        found += _Module(recipe, layout, name, grid).pairs()
        found += _sums(recipe, layout, name)
    for name in layout.encoders:
        found += _bridges(recipe, layout, name)
    return [one for one in found if one.total() > 0]


def _ring(ranks: np.ndarray, axis: int) -> np.ndarray:
    """(E, 2) each rank with the next one along an axis; nothing along one of a single rank."""
    if ranks.shape[axis] == 1:
        return np.zeros((0, 2), np.int64)
    return np.stack([ranks, np.roll(ranks, -1, axis)], -1).reshape(-1, 2)


def _ranks(grid: GridSpec) -> np.ndarray:
    """(pp, dp, cp, tp) ranks."""
    own = np.arange(grid.rank_offset, grid.rank_offset + grid.size)
    return own.reshape(grid.pp, grid.dp, grid.cp, grid.tp)


def _each(kind: str, name: str, pairs: np.ndarray, num_bytes: float) -> Pairs:
    return Pairs(kind, name, pairs, np.full(len(pairs), num_bytes))


def _rows(recipe: Recipe) -> int:
    """Most rows of a lane's microbatch."""
    longest = recipe.longest_microbatch
    return min(recipe.data.rows_per_microbatch or longest, longest)


class _Module:
    """Activations of a module. tokens: of a lane in a step."""

    def __init__(self, recipe: Recipe, layout: Layout, name: str, grid: GridSpec) -> None:
        self.recipe, self.name, self.grid = recipe, name, grid
        self.part, self.size = recipe.module(name), DTYPES[recipe.train.precision].itemsize
        microbatches = num_microbatches(recipe, layout)
        self.passes_back = True
        if name == LANGUAGE:
            self.settings = language_settings(recipe)
            self.tokens = float(microbatches * recipe.longest_microbatch)
        else:
            self.settings = encoder_settings(recipe, name)
            rows = microbatches * layout.language.dp * _rows(recipe) / grid.dp
            self.tokens = rows * inputs_per_row(recipe, name)
            self.passes_back = self.part.freeze is False or self.part.lora is not None

    def pairs(self) -> Iterator[Pairs]:
        """tp, cp and pp."""
        grid, ranks = self.grid, _ranks(self.grid)
        layers, tokens = self.settings.num_layers / grid.pp, self.tokens / grid.cp
        again = self.passes_back and self.part.recompute == "full"
        hidden = tokens * self.settings.hidden_size * self.size
        reduces = 2 * (1 + self.passes_back + again) * layers
        num_bytes = reduces * 2 * (grid.tp - 1) / grid.tp * hidden
        yield _each("tp", self.name, _ring(ranks, 3), num_bytes)
        if grid.cp > 1:  # the language model's alone
            language = language_settings(self.recipe)
            heads = max(1, language.num_query_groups // grid.tp)
            keys = tokens * 2 * heads * language.head_size * self.size
            num_bytes = (grid.cp - 1) * (3 + again) * layers * keys
            yield _each("cp", self.name, _ring(ranks, 2), num_bytes)
        if grid.pp > 1:
            yield self._stages(ranks, hidden / (grid.tp if grid.sp else 1))

    def _stages(self, ranks: np.ndarray, hidden: float) -> Pairs:
        """Chunk by chunk along the stages, and from the last stage to the first in between."""
        there_and_back, vpp = hidden * (1 + self.passes_back), self.grid.vpp
        pairs = np.stack([ranks, np.roll(ranks, -1, 0)], -1)  # (pp, dp, cp, tp, 2)
        num_bytes = np.full(pairs.shape[:-1], there_and_back * vpp)
        num_bytes[-1] = there_and_back * (vpp - 1)
        language = language_settings(self.recipe)
        learns = self.name == LANGUAGE and self.part.freeze is False and self.part.lora is None
        if learns and language.tie_word_embeddings:
            size = language.padded_vocab_size(1) * language.hidden_size / self.grid.tp
            num_bytes[-1] += 2 * size * gradient_bytes(self.recipe.train)
        return Pairs("pp", self.name, pairs.reshape(-1, 2), num_bytes.reshape(-1))


def _sums(recipe: Recipe, layout: Layout, name: str) -> Iterator[Pairs]:
    """Sums of gradients over the lanes, and weights that are gathered."""
    grid, train = layout.grids[name], recipe.train
    wide, size = gradient_bytes(train), DTYPES[train.precision].itemsize
    if grid.engine == "fsdp":
        yield from _cut_over_lanes(recipe, layout, grid)
        return
    ranks, lanes = _ranks(grid).reshape(grid.pp, -1, grid.tp), grid.dp * grid.cp
    pairs, num_bytes = [], []
    for role in parameters_by_role(recipe, layout):
        if role.module == name and role.gradients:
            first, last = (grid.coords(role.ranks[end]).pp for end in (0, -1))
            own = _ring(ranks[first : last + 1], 1)
            moved = 2 * role.gradients
            if train.distributed_optimizer:
                moved = role.gradients * (1 + size / wide)
            pairs.append(own)
            num_bytes.append(np.full(len(own), (lanes - 1) / lanes * moved))
    if pairs:
        yield Pairs("dp", name, np.concatenate(pairs), np.concatenate(num_bytes))


def _cut_over_lanes(recipe: Recipe, layout: Layout, grid: GridSpec) -> Iterator[Pairs]:
    """FSDP2: a rank gathers weights, scatters gradients, and sums its share over the replicas."""
    name, copies = grid.module, grid.dp_replicate
    # Uncut, as Megatron would keep them.
    alone = replace(grid, engine="megatron", dp=1, dp_replicate=1)
    language, encoders = (alone, {}) if name == LANGUAGE else (layout.language, {name: alone})
    uncut = replace(layout, language=language, encoders=encoders)
    (role,) = (r for r in parameters_by_role(recipe, uncut) if r.module == name)
    shares = grid.dp // copies
    ranks = _ranks(grid).reshape(copies, shares, grid.tp)
    passes = num_microbatches(recipe, layout)
    if name in layout.colocated:
        group = recipe.encoders[name].encode_group
        passes = 1 if group == "all" else -(-passes // group)
    part, reductions = recipe.module(name), 1
    # What a backward has gathered stays for the next forward.
    gathers = passes + 1 if part.reshard_after_forward else 1
    if part.reduce_gradients == "microbatch":
        gathers, reductions = passes * (2 if part.reshard_after_forward else 1), passes
    moved = gathers * role.weights + reductions * role.gradients
    yield _each("dp", name, _ring(ranks, 1), (shares - 1) / shares * moved)
    summed = 2 * (copies - 1) / copies * role.gradients / shares
    yield _each("dp", name, _ring(ranks, 0), summed)


def _bridges(recipe: Recipe, layout: Layout, name: str) -> Iterator[Bridge]:
    """One for each stage that needs rows of the encoder."""
    language, bridge = layout.language, recipe.bridge
    wire = recipe.train.precision if bridge.wire_dtype == "auto" else bridge.wire_dtype
    rows = num_microbatches(recipe, layout) * language.dp * _rows(recipe)
    row = language_settings(recipe).hidden_size * DTYPES[wire].itemsize
    copies = language.tp * language.cp if bridge.delivery == "replicated" else 1
    for link in layout.links_of(name):
        ends = [(np.array(a), np.array(b)) for a, b in bridge_ends(layout, link)]
        times = copies + recipe.encoders[name].trains  # a gradient comes back once
        pairs = sum(len(senders) * len(receivers) for senders, receivers in ends)
        num_bytes = rows * row * len(link.levels) * times / pairs
        yield Bridge("bridge", link.name, ends, num_bytes)
