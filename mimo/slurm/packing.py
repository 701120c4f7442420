"""Packs units of ranks into the least nodes, so that few bytes cross between nodes.

Units that exchange most are joined to clusters first. A node is then grown cluster by cluster, by
what each exchanges with those on it; and clusters, at last units, change places as long as that
keeps more bytes inside nodes. All of it is bounded and comes out the same every time.
`tests/mimo/slurm/test_packing.py` compares it with the best of all packings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise, permutations, product
from operator import mul, sub
from typing import Any

import numpy as np

_MAX_TRIES = 40_000  # of units changing places: a few seconds
_MAX_TARGETS = 4
_MAX_SEARCHED = 16  # nodes
_MAX_FILLINGS = 500
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Units:
    """What is packed: sizes (U,) in ranks, and the bytes that two units exchange.

    These are num_bytes (E,) for pairs (E, 2), and for all units a and b gives[a] · takes[b], which
    is the same as gives[b] · takes[a]; both are (U, Z).
    """

    sizes: np.ndarray
    pairs: np.ndarray
    num_bytes: np.ndarray
    gives: np.ndarray
    takes: np.ndarray

    def joined(self, cluster_of: np.ndarray) -> Units:
        """Clusters as units. cluster_of: (U,)."""
        sizes, gives, takes = (
            np.zeros((cluster_of.max() + 1, *own.shape[1:]), own.dtype)
            for own in (self.sizes, self.gives, self.takes)
        )
        for total, own in ((sizes, self.sizes), (gives, self.gives), (takes, self.takes)):
            np.add.at(total, cluster_of, own)
        return Units(sizes, cluster_of[self.pairs], self.num_bytes, gives, takes)

    def inside(self, node_of: np.ndarray) -> float:
        """Bytes within nodes, but for a constant. node_of: (U,)."""
        nodes, (first, second) = self.joined(node_of), node_of[self.pairs].T
        return float(self.num_bytes[first == second].sum() + (nodes.gives * nodes.takes).sum() / 2)


def fits(counts: Mapping[int, int], free: Mapping[int, int]) -> bool:
    """Whether so many units of each size go into so many nodes with each number of free places.

    Tries the sizes in every order, the largest first, each into the fullest nodes; of sizes that
    divide one another the first order is as good as any. For others a few nodes are searched.
    """
    sizes = sorted((size for size, count in counts.items() if count), reverse=True)
    orders = permutations(sizes) if len(sizes) <= 4 else (sizes,)
    if any(_fits_in(order, counts, free) for order in orders):
        return True
    nodes = sorted(Counter(free).elements())
    if len(nodes) > _MAX_SEARCHED or all(large % small == 0 for large, small in pairwise(sizes)):
        return False
    return _search(sizes, [counts[size] for size in sizes], nodes)


def _search(sizes: Sequence[int], counts: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether units fit, by all ways to fill node after node; no after `_MAX_FILLINGS`.

    sizes, counts: of units, beside each other. nodes: free places of each.
    """
    room = [*accumulate(reversed(nodes), initial=0)][::-1]  # in a node and those after it
    tried, waiting = set[tuple[Any, ...]](), [(tuple(counts), 0)]
    while waiting and len(tried) < _MAX_FILLINGS:
        left, node = state = waiting.pop()
        if not any(left):
            return True
        if state in tried or sum(map(mul, left, sizes)) > room[node]:
            continue
        tried.add(state)
        most = [min(count, nodes[node] // size) for count, size in zip(left, sizes, strict=True)]
        for chosen in product(*(range(count + 1) for count in most)):
            free, rest = nodes[node] - sum(map(mul, chosen, sizes)), tuple(map(sub, left, chosen))
            # One that leaves room for a unit is never better than the same with that unit.
            if free >= 0 and not any(map(free.__ge__, compress(sizes, rest))):
                waiting.append((rest, node + 1))
    return False


def _fits_in(order: Sequence[int], counts: Mapping[int, int], free: Mapping[int, int]) -> bool:
    free = Counter(free)
    for size in order:
        count = counts[size]
        for places in sorted(places for places in free if places >= size):
            each = places // size
            filled, rest = divmod(min(count, free[places] * each), each)
            count -= filled * each + rest
            free[places] -= filled + (rest > 0)
            free[places - each * size] += filled
            if rest:
                free[places - rest * size] += 1
        if count:
            return False
    return True


def least_nodes(sizes: np.ndarray, places: int) -> int:
    """The least nodes of so many places that hold units of these sizes, none larger than that."""
    counts = Counter(sizes.tolist())
    found = -(-int(sizes.sum()) // places)
    while not fits(counts, {places: found}):
        found += 1
    return found


def pack(units: Units, places: int, start: np.ndarray | None = None) -> np.ndarray:
    """The node of each unit, (U,). start: a packing that must not be better than the result."""
    num_nodes = least_nodes(units.sizes, places)
    found = []
    for cluster_of in _clusters(units, places, num_nodes):
        packing = _Packing(units.joined(cluster_of), places, num_nodes)
        if packing.grow():
            packing.improve()
            found.append(packing.node_of[cluster_of])
    if start is not None and start.max() < num_nodes:
        found.append(start)
    best = _Packing(units, places, num_nodes)
    best.node_of = max(found, key=units.inside).copy()
    best.improve()
    return best.node_of


def _clusters(units: Units, places: int, num_nodes: int) -> Iterator[np.ndarray]:
    """The cluster of each unit, (U,): first each alone, then ever larger ones.

    Pairs are joined by falling bytes, if a node holds the result and all still fit. There is one
    clustering for each number of bytes that is different from the others.
    """
    members = [[unit] for unit in range(len(units.sizes))]
    cluster_of, sizes = list(range(len(members))), units.sizes.tolist()
    yield np.array(cluster_of)
    counts, last, changed = Counter(sizes), 0.0, False
    first, second = np.sort(units.pairs, 1).T
    for pair in np.lexsort((second, first, -units.num_bytes)).tolist():
        if changed and units.num_bytes[pair] < last * (1 - 1e-3):
            yield np.unique(cluster_of, return_inverse=True)[1]
            changed = False
        last = units.num_bytes[pair]
        a, b = sorted((cluster_of[first[pair]], cluster_of[second[pair]]))
        size = sizes[a] + sizes[b]
        if a == b or size > places:
            continue
        joined = counts - Counter([sizes[a], sizes[b]]) + Counter([size])
        if fits(joined, {places: num_nodes}):
            counts, sizes[a], changed = joined, size, True
            for unit in members[b]:
                cluster_of[unit] = a
            members[a] += members[b]
    if changed:
        yield np.unique(cluster_of, return_inverse=True)[1]


class _Packing:
    """Units on their way to nodes. node_of: (U,), -1 for none yet."""

    def __init__(self, units: Units, places: int, num_nodes: int) -> None:
        self.units, self.places, self.num_nodes = units, places, num_nodes
        self.sizes: list[int] = units.sizes.tolist()
        self.node_of = np.full(len(self.sizes), -1)
        self.takes: list[list[float]] = units.takes.tolist()
        self.gives = [[(z, b) for z, b in enumerate(row) if b] for row in units.gives.tolist()]
        self.near: list[dict[int, float]] = [{} for _ in self.sizes]
        for (a, b), weight in zip(units.pairs.tolist(), units.num_bytes.tolist(), strict=True):
            if a != b:
                self.near[a][b] = self.near[a].get(b, 0.0) + weight
                self.near[b][a] = self.near[b].get(a, 0.0) + weight

    def grow(self) -> bool:
        """Fill node after node, by bytes for each rank of a unit; whether all found a place."""
        units, left = self.units, Counter(self.sizes)
        waiting: dict[tuple[float, ...], list[int]] = {}  # alike but for their neighbours
        rows = np.column_stack([units.sizes, units.gives, units.takes]).tolist()
        for unit in reversed(range(len(rows))):
            waiting.setdefault(tuple(rows[unit]), []).append(unit)
        for node in range(self.num_nodes):
            others = {self.places: self.num_nodes - node - 1}
            free, taken, beside = self.places, np.zeros(units.takes.shape[1]), dict[int, float]()
            while (best := self._next(free, others, left, taken, beside, waiting)) is not None:
                gain, size, unit = best[0], best[1], -best[2]
                if free < self.places and gain <= 0 and fits(left, others):
                    break
                self.node_of[unit] = node
                free, taken = free - size, taken + units.takes[unit]
                left[size] -= 1
                beside.pop(unit, None)
                for other, weight in self.near[unit].items():
                    if self.node_of[other] < 0:
                        beside[other] = beside.get(other, 0.0) + weight
        return bool((self.node_of >= 0).all())

    def _next(
        self,
        free: int,
        others: Mapping[int, int],
        left: Counter[int],
        taken: np.ndarray,
        beside: Mapping[int, float],
        waiting: Mapping[tuple[float, ...], list[int]],
    ) -> tuple[float, int, int] | None:
        """The unit to add to a node, as gain, size and minus its number; the rest must fit."""
        candidates = dict(beside)
        for alike in waiting.values():
            while alike and self.node_of[alike[-1]] >= 0:
                alike.pop()
            if alike:
                candidates.setdefault(alike[-1], 0.0)
        best = None
        for unit, near in candidates.items():
            size = self.sizes[unit]
            gain = (near + float(self.units.gives[unit] @ taken)) / size
            if size > free or (best is not None and (gain, size, -unit) <= best):
                continue
            if fits(left - Counter([size]), Counter(others) + Counter([free - size])):
                best = gain, size, -unit
        return best

    def improve(self) -> None:
        """Units go to nodes with which they exchange more, which give up others for them."""
        members: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for unit, node in enumerate(self.node_of.tolist()):
            members[node].append(unit)
        tries, changed = _MAX_TRIES, True
        while changed and tries > 0:
            changed, takes = False, self.units.joined(self.node_of).takes
            for unit in range(len(self.sizes)):
                for target in self._targets(unit, takes):
                    tries -= 1
                    if self._moves(unit, target, members):
                        changed = True
                        break
                if tries <= 0:
                    return

    def _targets(self, unit: int, takes: np.ndarray) -> list[int]:
        """Nodes with which a unit exchanges most. takes: of the nodes."""
        pulls = takes @ self.units.gives[unit]
        for other, weight in self.near[unit].items():
            pulls[self.node_of[other]] += weight
        pulls[self.node_of[unit]] = 0.0
        found = np.argsort(-pulls, kind="stable")[:_MAX_TARGETS]
        return [node for node in found.tolist() if pulls[node] > 0]

    def _moves(self, unit: int, target: int, members: list[list[int]]) -> bool:
        """Move a unit to a node, and others back for it, if that keeps more bytes inside nodes."""
        source, sizes = int(self.node_of[unit]), self.sizes
        rest, there = [other for other in members[source] if other != unit], members[target]
        free = self.places - sum(sizes[other] for other in rest)
        missing = sizes[unit] + sum(sizes[other] for other in there) - self.places
        joined = [*there, unit]
        loss = {other: self._bytes(other, joined) - self._bytes(other, rest) for other in there}
        back = []
        for other in sorted(there, key=lambda other: (loss[other] / sizes[other], other)):
            if missing > 0 and sizes[other] <= free:
                back.append(other)
                free, missing = free - sizes[other], missing - sizes[other]
        won, lost = self._bytes(unit, there), self._bytes(unit, rest)
        # What goes back together is not lost.
        together = sum(self._bytes(other, back) for other in back)
        more = won - lost + together - sum(loss[other] for other in back)
        if missing > 0 or more <= (won + lost) * _ROUNDING:
            return False
        members[source] = [*rest, *back]
        members[target] = [other for other in joined if other not in back]
        self.node_of[unit], self.node_of[back] = target, source
        return True

    def _bytes(self, unit: int, others: Sequence[int]) -> float:
        """Between a unit and others."""
        found, near, gives, takes = 0.0, self.near[unit], self.gives[unit], self.takes
        for other in others:
            if other != unit:
                found += near.get(other, 0.0)
                for column, give in gives:
                    found += give * takes[other][column]
        return found
