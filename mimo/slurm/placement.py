"""Which node each rank of a job runs on; what a rank does, `mimo.parallel.grids` has said already.

Ranks are placed in units that never part: the ranks of a tensor-parallel group, as far as a node
has room for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mimo.config.cluster import Cluster
from mimo.config.phases import PhasedRecipe
from mimo.errors import RecipeError
from mimo.parallel.grids import LANGUAGE, Layout
from mimo.slurm.packing import Units, least_nodes, pack
from mimo.slurm.traffic import Pairs, Traffic, traffic


@dataclass(frozen=True)
class Component:
    """Nodes of one kind; a heterogeneous job has two: `encoders`, then `language`; others `all`.

    nodes: the ranks of each node, ascending.
    """

    name: str
    nodes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Placement:
    """The nodes of a job. Rank 0 is on the first."""

    components: tuple[Component, ...]

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Of all components."""
        return tuple(node for component in self.components for node in component.nodes)

    def node_of(self) -> tuple[int, ...]:
        """The node of each rank, counted over all components."""
        found = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        return tuple(found[rank] for rank in range(len(found)))


@dataclass(frozen=True)
class Part:
    """Ranks of nodes of one kind. places: ranks that a node has room for."""

    name: str
    ranks: range
    places: int


def parts_of(
    phased: PhasedRecipe, layouts: Sequence[Layout], hetjob: bool = False
) -> tuple[Part, ...]:
    """The components of a job. layouts: of the phases.

    Raises RecipeError if phases have different numbers of ranks, or if a heterogeneous job cannot
    be told apart into disjoint encoders and the rest.
    """
    size, recipe = layouts[0].world_size, phased.phases[0].recipe
    for phase, layout in zip(phased.phases, layouts, strict=True):
        if layout.world_size != size:
            message = (
                f"got {layout.world_size} ranks, but {phased.phases[0].title} has {size}, and all "
                f"phases run on the ranks of one job; change dp"
            )
            raise RecipeError(phase.recipe.problem((LANGUAGE, "grid"), message))
    cluster: Cluster = recipe.cluster
    if not hetjob:
        return (Part("all", range(size), cluster.places_per_node),)
    first = 0
    for phase, layout in zip(phased.phases, layouts, strict=True):
        start = layout.language.rank_offset
        disjoint = [name for name in layout.encoders if name not in layout.colocated]
        if not disjoint:
            message = (
                "a heterogeneous job has its disjoint encoders on other nodes, but no encoder is "
                "disjoint; set placement: disjoint in one, or leave --hetjob and "
                "cluster.encoder_nodes out"
            )
            raise RecipeError(phase.recipe.problem(("encoders",), message))
        if layout.language.ranks.stop != size:
            message = (
                f"got {start}, but the ranks of a heterogeneous job's encoders come before those "
                f"of its language model; remove rank_offset"
            )
            key = (LANGUAGE, "grid", "rank_offset")
            raise RecipeError(phase.recipe.problem(key, message))
        if first and start != first:
            message = (
                f"leaves {start} ranks to encoders, but in {phased.phases[0].title} they are "
                f"{first}, and all phases run on the nodes of one job; change dp"
            )
            raise RecipeError(phase.recipe.problem((LANGUAGE, "grid"), message))
        first = start
    return (
        Part("encoders", range(first), cluster.places_per_encoder_node),
        Part("language", range(first, size), cluster.places_per_node),
    )


def in_order(phased: PhasedRecipe, layouts: Sequence[Layout], hetjob: bool = False) -> Placement:
    """Ranks simply in order, what SLURM does without being told. Raises like `parts_of`."""
    return Placement(
        tuple(
            Component(part.name, tuple(tuple(one) for one in _cut(part.ranks, part.places)))
            for part in parts_of(phased, layouts, hetjob)
        )
    )


def place(phased: PhasedRecipe, layouts: Sequence[Layout], hetjob: bool = False) -> Placement:
    """The least nodes that hold all units, with few bytes between them.

    layouts: of the phases, which count alike. Raises like `parts_of`.
    """
    flows = [
        flow
        for phase, layout in zip(phased.phases, layouts, strict=True)
        for flow in traffic(phase.recipe, layout)
    ]
    return Placement(
        tuple(
            Component(part.name, _placed(units_of(layouts, part), flows, part))
            for part in parts_of(phased, layouts, hetjob)
        )
    )


def num_nodes(phased: PhasedRecipe, layouts: Sequence[Layout], hetjob: bool = False) -> int:
    """Nodes that `place` needs, of all components. Raises like `parts_of`."""
    return sum(
        least_nodes(np.array([len(unit) for unit in units_of(layouts, part)]), part.places)
        for part in parts_of(phased, layouts, hetjob)
    )


def _placed(units: Sequence[range], flows: Traffic, part: Part) -> tuple[tuple[int, ...], ...]:
    """The nodes of a part, in order of their first ranks. Traffic with other parts is the same
    wherever ranks are.
    """
    unit_of = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
    ordered = np.arange(len(part.ranks)) // part.places  # the node of each rank in order
    node_of = pack(_loads(units, unit_of, flows, part), part.places, _whole(ordered, unit_of))
    nodes: dict[int, list[int]] = {}
    for unit, node in zip(units, node_of.tolist(), strict=True):
        nodes.setdefault(node, []).extend(unit)
    return tuple(sorted(tuple(sorted(node)) for node in nodes.values()))


def _whole(node_of: np.ndarray, unit_of: np.ndarray) -> np.ndarray | None:
    """The nodes of units by those of ranks; None if a unit is on two of them."""
    firsts = np.flatnonzero(np.diff(unit_of, prepend=-1))
    found = node_of[firsts]
    return found if np.array_equal(found[unit_of], node_of) else None


def _loads(units: Sequence[range], unit_of: np.ndarray, flows: Traffic, part: Part) -> Units:
    """What the units of a part exchange with each other."""
    first, last = part.ranks.start, part.ranks.stop
    pairs, num_bytes = [np.zeros((0, 2), np.int64)], [np.zeros(0)]
    gives, takes = [np.zeros((len(units), 0))], [np.zeros((len(units), 0))]
    for flow in flows:
        if isinstance(flow, Pairs):
            here = ((flow.pairs >= first) & (flow.pairs < last)).all(1)
            pairs.append(unit_of[flow.pairs[here] - first])
            num_bytes.append(flow.num_bytes[here])
            continue
        for block in flow.ends:
            ends = []
            for ranks in block:
                own = unit_of[ranks[(ranks >= first) & (ranks < last)] - first]
                ends.append(np.bincount(own, minlength=len(units)))
            gives.append(np.column_stack(ends) * flow.num_bytes)
            takes.append(np.column_stack(ends[::-1]))
    sizes = np.array([len(unit) for unit in units])
    return Units(sizes, *map(np.concatenate, (pairs, num_bytes)), *map(np.hstack, (gives, takes)))


def _cut(ranks: range, size: int) -> Iterator[range]:
    for first in range(0, len(ranks), size):
        yield ranks[first : first + size]


def units_of(layouts: Sequence[Layout], part: Part) -> list[range]:
    """The ranks of a part as units that never part, in order.

    Where two modules on the same ranks have tensor-parallel groups of different sizes, a unit holds
    whole groups of both, if a node holds it; else the language model's come first. Of a group that
    no node holds, a unit has as many ranks as one does, the last one the rest.
    """
    grids = [layout.language for layout in layouts]
    grids += [grid for layout in layouts for grid in layout.encoders.values()]
    last = part.ranks.stop - part.ranks.start - 1
    joined = np.zeros(max(last, 0), bool)  # whether a rank and the next one are in one unit
    for grid in grids:
        own = joined.copy()
        for group in _cut(grid.ranks, grid.tp):
            for piece in _cut(group, part.places):
                if piece[0] in part.ranks:
                    first = piece[0] - part.ranks.start
                    own[first : first + len(piece) - 1] = True
        if all(len(unit) <= part.places for unit in _runs(own, part.ranks)):
            joined = own
    return list(_runs(joined, part.ranks))


def _runs(joined: np.ndarray, ranks: range) -> Iterator[range]:
    ends = [*(np.flatnonzero(~joined) + 1).tolist(), len(ranks)]
    first = 0
    for end in ends:
        yield ranks[first:end]
        first = end
