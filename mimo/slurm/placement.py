"""The node of each rank, and the table of it that `mimo launch --explain` prints.

Ranks are placed in order. The ranks of a tensor-parallel group stay on one node: a group that does
not fit into the rest of a node begins the next one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from mimo.config.phases import PhasedRecipe
from mimo.errors import RecipeError
from mimo.parallel.grids import LANGUAGE, Layout


@dataclass(frozen=True)
class Component:
    """Nodes of one kind: `encoders` and `language` in a heterogeneous job, `all` in any other.

    Disjoint generators are on the nodes of the language model.

    places: ranks that a node has room for. nodes: the ranks of each node, ascending.
    """

    name: str
    places: int
    nodes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Placement:
    """The nodes of a job, in the order of their ranks."""

    components: tuple[Component, ...]

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(node for component in self.components for node in component.nodes)

    def node_of(self) -> tuple[int, ...]:
        """Return the node of each rank, counted over all components."""
        return tuple(number for number, node in enumerate(self.nodes) for _ in node)


def place(phased: PhasedRecipe, layouts: Sequence[Layout], hetjob: bool = False) -> Placement:
    """Place the ranks of a job in order, with whole tensor-parallel groups where a node has room.

    Raises RecipeError if phases have different numbers of ranks, or if a heterogeneous job has no
    disjoint encoders whose ranks come first.
    """
    cluster, size = phased.phases[0].recipe.cluster, layouts[0].world_size
    for phase, layout in zip(phased.phases, layouts, strict=True):
        if layout.world_size != size:
            ranks = f"got {layout.world_size} ranks, but {phased.phases[0].title} has {size}"
            message = f"{ranks}, and all phases run on the ranks of one job; change dp"
            raise RecipeError(phase.recipe.problem((LANGUAGE, "grid"), message))
    if not hetjob:
        return Placement((_component("all", range(size), cluster.places_per_node, layouts),))
    first = _num_encoder_ranks(phased, layouts)
    places = cluster.places_per_encoder_node
    encoders = _component("encoders", range(first), places, layouts)
    places = cluster.places_per_node
    return Placement((encoders, _component("language", range(first, size), places, layouts)))


def _num_encoder_ranks(phased: PhasedRecipe, layouts: Sequence[Layout]) -> int:
    """Count the ranks of disjoint encoders, which precede those of all other modules."""
    first = 0
    for phase, layout in zip(phased.phases, layouts, strict=True):
        others = {n: g.rank_offset for n, g in layout.grids.items() if n not in layout.encoders}
        earliest = min(others, key=lambda name: others[name])
        start, disjoint = others[earliest], layout.encoders.keys() - layout.colocated
        if not disjoint:
            message = (
                "a heterogeneous job has its disjoint encoders on other nodes, but no encoder is "
                "disjoint; set placement: disjoint, or leave out --hetjob and cluster.encoder_nodes"
            )
            raise RecipeError(phase.recipe.problem(("encoders",), message))
        if start != sum(layout.encoders[name].size for name in disjoint):
            message = f"got {start}, but a heterogeneous job's encoders come before; remove it"
            key = (*phase.recipe.key_of(earliest), "grid", "rank_offset")
            raise RecipeError(phase.recipe.problem(key, message))
        if first and start != first:
            ranks = f"leaves {start} ranks to encoders, but {phased.phases[0].title} {first}"
            message = f"{ranks}, and all phases run on the nodes of one job; change dp"
            raise RecipeError(phase.recipe.problem((LANGUAGE, "grid"), message))
        first = start
    return first


def _component(name: str, ranks: range, places: int, layouts: Sequence[Layout]) -> Component:
    nodes: list[list[int]] = []
    for unit in _units(layouts, ranks, places):
        if not nodes or len(nodes[-1]) + len(unit) > places:
            nodes.append([])
        nodes[-1] += unit
    return Component(name, places, tuple(map(tuple, nodes)))


def _units(layouts: Sequence[Layout], ranks: range, places: int) -> Iterator[range]:
    """Yield the ranks of a component as units that stay on one node, in order.

    A unit holds whole groups of all modules if a node has room for it, else the language model's. A
    group that no node holds is cut into pieces of ``places`` ranks.
    """
    grids = [layout.language for layout in layouts]
    grids += [grid for layout in layouts for grid in layout.item_grids.values()]
    starts = set(ranks)
    for grid in grids:
        inner = set[int]()  # ranks that follow another one of their group, on the same node
        for first in grid.ranks[:: grid.tp]:
            inner.update(rank for rank in range(first, first + grid.tp) if (rank - first) % places)
        if all(len(unit) <= places for unit in _split(ranks, starts - inner)):
            starts -= inner
    return _split(ranks, starts)


def _split(ranks: range, starts: set[int]) -> Iterator[range]:
    bounds = [*sorted(starts | {ranks.start}), ranks.stop]
    return (range(*pair) for pair in pairwise(bounds))


def split_groups(layouts: Sequence[Layout], placement: Placement) -> list[str]:
    """Name the tensor-parallel groups that no node holds, one line for each module."""
    node_of, lines = placement.node_of(), list[str]()
    for name, grid in ((name, grid) for layout in layouts for name, grid in layout.grids.items()):
        groups = (node_of[first : first + grid.tp] for first in grid.ranks[:: grid.tp])
        num_nodes = max(len(set(group)) for group in groups)
        if num_nodes > 1:
            lines.append(
                f"tp {grid.tp} of {name} is across {num_nodes} nodes, which have no room for a "
                f"tensor-parallel group; lower tp, or use larger nodes"
            )
    return [*dict.fromkeys(lines)]


def explain(phased: PhasedRecipe, layouts: Sequence[Layout], placement: Placement) -> str:
    """Return tables of rank, node, module, lane, tp, cp and pp, one for each phase."""
    lines, first = list[str](), 0
    for component in placement.components:
        last, num_ranks = first + len(component.nodes) - 1, sum(map(len, component.nodes))
        where, most = f"nodes {_span(first, last)}, {component.name}", component.places
        lines.append(f"{where}: {num_ranks} ranks, up to {most} on a node")
        first = last + 1
    for phase, layout in zip(phased.phases, layouts, strict=True):
        lines += ["", *([phase.title, ""] if phase.title else [])]
        lines += _aligned([*_rows(layout, placement.node_of())])
    return "\n".join([*lines, *split_groups(layouts, placement)]) + "\n"


def _rows(layout: Layout, node_of: Sequence[int]) -> Iterator[tuple[str, ...]]:
    yield "ranks", "node", "module", "lane", "tp", "cp", "pp"
    rows = []
    for name, grid in layout.grids.items():
        for first in grid.ranks[:: grid.tp]:
            at, group = grid.coords(first), range(first, first + grid.tp)
            for node, members in groupby(group, lambda rank: node_of[rank]):
                ranks = list(members)
                tp = _span(ranks[0] - first, ranks[-1] - first)
                cells = (_span(ranks[0], ranks[-1]), str(node), name, str(at.dp), tp)
                rows.append((ranks[0], (*cells, str(at.cp), str(at.pp))))
    yield from (row for _, row in sorted(rows, key=lambda row: row[0]))


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, "<><>>>>", widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()
