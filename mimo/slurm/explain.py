"""Where every rank is, and what that saves: the text of `mimo launch --explain`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from mimo.config.phases import PhasedRecipe
from mimo.config.schema import Recipe
from mimo.model.memory import in_words
from mimo.parallel.grids import Layout
from mimo.slurm.placement import Placement, in_order, parts_of
from mimo.slurm.traffic import traffic


def explain(phased: PhasedRecipe, layouts: Sequence[Layout], placement: Placement) -> str:
    """A line for the ranks of each tensor-parallel group, and the bytes that cross nodes.

    layouts: of the phases, for which `placement` was made; each has its own tables.
    """
    hetjob = len(placement.components) > 1
    before = in_order(phased, layouts, hetjob)
    lines, first = list[str](), 0
    parts = parts_of(phased, layouts, hetjob)
    for part, component in zip(parts, placement.components, strict=True):
        nodes = _span(range(first, first + len(component.nodes)))
        of = f" of {part.name}" if hetjob else ""
        lines.append(
            f"node{'s' * (len(component.nodes) > 1)} {nodes}{of}: {len(part.ranks)} ranks, "
            f"up to {part.places} on a node"
        )
        first += len(component.nodes)
    for phase, layout in zip(phased.phases, layouts, strict=True):
        lines += ["", *([phase.title, ""] if phase.title else [])]
        lines += _table(_ranks(layout, placement.node_of()), "<><>>>>")
        lines += _split_groups(layout, placement.node_of())
        lines += ["", *_table(_bytes(phase.recipe, layout, before, placement), "<>>>")]
        lines.append("from above: of microbatches that are full, with rows of items as they may be")
    return "\n".join(lines) + "\n"


def _ranks(layout: Layout, node_of: Sequence[int]) -> Iterator[tuple[str, ...]]:
    yield "ranks", "node", "module", "lane", "tp", "cp", "pp"
    rows = []
    for name, grid in layout.grids.items():
        for first in range(grid.ranks.start, grid.ranks.stop, grid.tp):
            at, group = grid.coords(first), range(first, first + grid.tp)
            for node, members in groupby(group, lambda rank: node_of[rank]):
                own = list(members)
                tp = _span(range(own[0] - first, own[-1] - first + 1))
                here = (name, str(at.dp), tp, str(at.cp), str(at.pp))
                rows.append((own[0], (_span(range(own[0], own[-1] + 1)), str(node), *here)))
    for _, row in sorted(rows, key=lambda row: row[0]):
        yield row


def _split_groups(layout: Layout, node_of: Sequence[int]) -> Iterator[str]:
    """What ended up on several nodes though it should be on one."""
    nodes = np.array(node_of)
    for name, grid in layout.grids.items():
        groups = nodes[grid.ranks.start : grid.ranks.stop].reshape(-1, grid.tp)
        most = max(len(set(group)) for group in groups.tolist())
        if most > 1:
            yield (
                f"tp {grid.tp} of {name} is across {most} nodes, which have no room for a "
                f"tensor-parallel group; lower tp, or use larger nodes"
            )


def _bytes(
    recipe: Recipe, layout: Layout, before: Placement, after: Placement
) -> Iterator[tuple[str, ...]]:
    yield "bytes of a step", "in all", "across nodes in order", "as placed"
    old, new = np.array(before.node_of()), np.array(after.node_of())
    sums = np.zeros(3)
    for flow in traffic(recipe, layout):
        values = np.array([flow.total(), flow.across(old), flow.across(new)])
        sums += values
        yield (f"{flow.kind} {flow.name}", *_words(values))
    yield ("together", *_words(sums))


def _words(values: np.ndarray) -> list[str]:
    return [in_words(value) if value else "-" for value in values.tolist()]


def _span(numbers: range) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _table(rows: Iterator[tuple[str, ...]], sides: str) -> Iterator[str]:
    """Lines of columns that are flush left (`<`) or right (`>`)."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()
