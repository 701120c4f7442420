"""Packs units of ranks into the least nodes, so that few bytes cross between nodes.

A node is grown unit by unit, by what each would exchange with those on it; then units change
places as long as that keeps more bytes inside nodes. Both are bounded, and come out the same every
time. `tests/mimo/cluster/test_packing.py` compares them with the best of all packings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

_MAX_TRIES = 40_000  # of units changing places: a second or two
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Units:
    """What is packed, and what it exchanges.

    sizes: (U,) ranks of each. pairs: (E, 2) units with num_bytes (E,) between them.
    senders, receivers: (X, U) ranks at the ends of each exchange in which every sender has
    weights (X,) bytes for every receiver.
    """

    sizes: np.ndarray
    pairs: np.ndarray
    num_bytes: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    weights: np.ndarray


def fits(counts: Mapping[int, int], free: Mapping[int, int]) -> bool:
    """Whether so many units of each size go into so many nodes with each number of free places.

    Tries the sizes in every order, the largest first, each into the fullest nodes; of sizes that
    divide one another the first order is as good as any.
    """
    sizes = sorted((size for size, count in counts.items() if count), reverse=True)
    orders = permutations(sizes) if len(sizes) <= 4 else (sizes,)
    return any(_fits_in(order, counts, free) for order in orders)


def _fits_in(order: Sequence[int], counts: Mapping[int, int], free: Mapping[int, int]) -> bool:
    free = Counter(free)
    for size in order:
        count = counts[size]
        for places in sorted(places for places in free if places >= size):
            if not count:
                break
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
    whole = _Packing(units, places, num_nodes)
    found = []
    for cluster_of in _clusters(units, places, num_nodes):
        packing = _Packing(_joined(units, cluster_of), places, num_nodes)
        if (grown := packing.grown()) is not None:
            found.append(np.array(packing.improved(grown))[cluster_of].tolist())
    if start is not None and int(start.max()) < num_nodes:
        found.append(start.tolist())
    return np.array(whole.improved(max(found, key=whole.inside)))


def _joined(units: Units, cluster_of: np.ndarray) -> Units:
    """Clusters as units."""
    count = int(cluster_of.max()) + 1

    def add(values: np.ndarray) -> np.ndarray:
        return np.bincount(cluster_of, values, count).astype(np.int64)

    shape = (len(units.weights), count)
    return Units(
        sizes=add(units.sizes),
        pairs=cluster_of[units.pairs],
        num_bytes=units.num_bytes,
        senders=np.array([add(own) for own in units.senders]).reshape(shape),
        receivers=np.array([add(own) for own in units.receivers]).reshape(shape),
        weights=units.weights,
    )


def _clusters(units: Units, places: int, num_nodes: int) -> Iterator[np.ndarray]:
    """The cluster of each unit, (U,): first each alone, then ever larger ones.

    Pairs are joined by falling bytes, if a node holds the result and all still fit. There is one
    clustering for each number of bytes that is different from the others.
    """
    cluster_of = list(range(len(units.sizes)))
    yield np.array(cluster_of)
    members = [[unit] for unit in cluster_of]
    sizes: list[int] = units.sizes.tolist()
    counts = Counter(sizes)
    first, second = np.sort(units.pairs, 1).T
    order = np.lexsort((second, first, -units.num_bytes))
    last, changed = None, False
    for pair in order.tolist():
        weight = float(units.num_bytes[pair])
        if last is not None and weight < last * (1 - 1e-3) and changed:
            yield np.unique(cluster_of, return_inverse=True)[1]
            changed = False
        last = weight
        a, b = sorted((cluster_of[first[pair]], cluster_of[second[pair]]))
        size = sizes[a] + sizes[b]
        if a == b or size > places:
            continue
        joined = counts - Counter([sizes[a]]) - Counter([sizes[b]]) + Counter([size])
        if not fits(joined, {places: num_nodes}):
            continue
        counts, sizes[a], changed = joined, size, True
        for unit in members[b]:
            cluster_of[unit] = a
        members[a] += members[b]
    if changed:
        yield np.unique(cluster_of, return_inverse=True)[1]


class _Packing:
    def __init__(self, units: Units, places: int, num_nodes: int) -> None:
        self.units, self.places, self.num_nodes = units, places, num_nodes
        self.sizes: list[int] = units.sizes.tolist()
        self.near: list[dict[int, float]] = [{} for _ in self.sizes]
        for (a, b), weight in zip(units.pairs.tolist(), units.num_bytes.tolist(), strict=True):
            if a != b:
                self.near[a][b] = self.near[a].get(b, 0.0) + weight
                self.near[b][a] = self.near[b].get(a, 0.0) + weight
        # Units of a class are alike but for their neighbours.
        self.sends, self.receives = units.senders.T.tolist(), units.receivers.T.tolist()
        self.weights: list[float] = units.weights.tolist()
        own = zip(self.sizes, self.sends, self.receives, strict=True)
        self.classes = [(size, *sent, *received) for size, sent, received in own]

    def inside(self, node_of: Sequence[int]) -> float:
        """Bytes within nodes."""
        nodes, units = np.array(node_of), self.units
        first, second = nodes[units.pairs].T
        found = float(units.num_bytes[first == second].sum())
        for sent, received, weight in zip(
            units.senders, units.receivers, units.weights, strict=True
        ):
            here = [np.bincount(nodes, own, self.num_nodes) for own in (sent, received)]
            found += float(weight * (here[0] @ here[1]))
        return found

    def grown(self) -> list[int] | None:
        """Node after node, each from the largest unit left, by bytes for each of a unit's ranks."""
        node_of = [-1] * len(self.sizes)
        left = Counter(self.sizes)
        waiting: dict[tuple[float, ...], list[int]] = {}
        for unit in reversed(range(len(self.sizes))):
            waiting.setdefault(self.classes[unit], []).append(unit)
        for node in range(self.num_nodes):
            free, members = self.places, list[int]()
            beside: dict[int, float] = {}
            while True:
                candidates = dict(beside)
                for alike in waiting.values():
                    while alike and node_of[alike[-1]] >= 0:
                        alike.pop()
                    if alike:
                        candidates.setdefault(alike[-1], 0.0)
                best = None
                for unit, near in candidates.items():
                    if (size := self.sizes[unit]) > free:
                        continue
                    gain = (near + self.exchanged(unit, members)) / size
                    key = (gain, size, -unit)
                    if best is None or key > best:
                        rest, others = left.copy(), self.num_nodes - node - 1
                        rest[size] -= 1
                        if fits(rest, Counter({self.places: others}) + Counter({free - size: 1})):
                            best = key
                if best is None:
                    break
                unit = -best[2]
                if (
                    members
                    and best[0] <= 0
                    and fits(left, {self.places: self.num_nodes - node - 1})
                ):
                    break
                node_of[unit], free = node, free - self.sizes[unit]
                left[self.sizes[unit]] -= 1
                members.append(unit)
                beside.pop(unit, None)
                for other, weight in self.near[unit].items():
                    if node_of[other] < 0:
                        beside[other] = beside.get(other, 0.0) + weight
        return None if -1 in node_of else node_of

    def exchanged(self, unit: int, members: Sequence[int]) -> float:
        """Bytes of exchanges between a unit and others."""
        found = 0.0
        for x, weight in enumerate(self.weights):
            sent, received = self.sends[unit][x], self.receives[unit][x]
            if sent or received:
                for other in members:
                    found += weight * (
                        sent * self.receives[other][x] + received * self.sends[other][x]
                    )
        return found

    def kept(self, members: Sequence[int]) -> float:
        """Bytes within one node."""
        found = 0.0
        for number, unit in enumerate(members):
            found += self.attached(unit, members[:number])
        return found

    def attached(self, unit: int, members: Sequence[int]) -> float:
        """Bytes between a unit and others."""
        near = self.near[unit]
        return sum(near.get(o, 0.0) for o in members if o != unit) + self.exchanged(
            unit, [o for o in members if o != unit]
        )

    def improved(self, node_of: list[int]) -> list[int]:
        """Units go to nodes with which they exchange more, which give up others for them."""
        members: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for unit, node in enumerate(node_of):
            members[node].append(unit)
        node_of, tries, changed = list(node_of), _MAX_TRIES, True
        while changed and tries > 0:
            changed = False
            for unit in range(len(node_of)):
                for target in self.targets(unit, node_of, members):
                    tries -= 1
                    if self.moved(unit, target, node_of, members):
                        changed = True
                        break
                if tries <= 0:
                    break
        return node_of

    def targets(
        self, unit: int, node_of: Sequence[int], members: Sequence[Sequence[int]]
    ) -> list[int]:
        """Nodes of a unit's neighbours, and of those that it has most exchanges with."""
        pulls: dict[int, float] = {}
        for other, weight in self.near[unit].items():
            pulls[node_of[other]] = pulls.get(node_of[other], 0.0) + weight
        if any(self.sends[unit]) or any(self.receives[unit]):
            for node in range(min(self.num_nodes, 64)):
                if (pull := self.exchanged(unit, members[node])) > 0:
                    pulls[node] = pulls.get(node, 0.0) + pull
        pulls.pop(node_of[unit], None)
        return sorted(pulls, key=lambda node: (-pulls[node], node))[:8]

    def moved(self, unit: int, target: int, node_of: list[int], members: list[list[int]]) -> bool:
        """Whether the unit went to the target, since that keeps more bytes inside nodes."""
        source = node_of[unit]
        here, there = members[source], members[target]
        free_here = self.places - sum(self.sizes[o] for o in here) + self.sizes[unit]
        missing = self.sizes[unit] - (self.places - sum(self.sizes[o] for o in there))
        given: list[int] = []
        loss = {o: self.attached(o, there) - self.attached(o, here) for o in there}
        for other in sorted(there, key=lambda o: (loss[o] / self.sizes[o], o)):
            if missing <= 0:
                break
            if self.sizes[other] <= free_here:
                given.append(other)
                missing -= self.sizes[other]
                free_here -= self.sizes[other]
        if missing > 0:
            return False
        new_here = [o for o in here if o != unit] + given
        new_there = [o for o in there if o not in given] + [unit]
        before = self.kept(here) + self.kept(there)
        if self.kept(new_here) + self.kept(new_there) <= before * (1 + _ROUNDING):
            return False
        members[source], members[target] = new_here, new_there
        node_of[unit] = target
        for other in given:
            node_of[other] = source
        return True
