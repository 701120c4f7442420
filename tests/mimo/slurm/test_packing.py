"""Units of ranks on the least nodes, compared with the best of all packings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mimo.slurm.packing import Units, least_nodes, pack

# Of 2,000 such cases five were not the best of all; the worst of them was 5 % above it.
WORST = 1.15


def across(units: Units, node_of: Sequence[int]) -> float:
    """Bytes between nodes, counted pair by pair."""
    found = 0.0
    for (a, b), weight in zip(units.pairs, units.num_bytes, strict=True):
        found += weight * (node_of[a] != node_of[b])
    for a, b in combinations(range(len(node_of)), 2):
        found += units.gives[a] @ units.takes[b] * (node_of[a] != node_of[b])
    return float(found)


def packings(sizes: Sequence[int], places: int, num_nodes: int) -> Iterator[list[int]]:
    """All of them, but for the numbers of the nodes."""
    node_of, free = [0] * len(sizes), [places] * num_nodes

    def rest(unit: int, used: int) -> Iterator[list[int]]:
        if unit == len(sizes):
            yield node_of
            return
        for node in range(min(used + 1, num_nodes)):
            if free[node] >= sizes[unit]:
                free[node] -= sizes[unit]
                node_of[unit] = node
                yield from rest(unit + 1, max(used, node + 1))
                free[node] += sizes[unit]

    yield from rest(0, 0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Units, int]:
    """Two groups of units with rings of bytes inside each, and an exchange between them."""
    places = draw(st.integers(2, 8))
    groups = []
    for _ in range(2):
        size = draw(st.sampled_from([s for s in (1, 2, 3, 4) if s <= places]))
        groups.append((size, draw(st.integers(1, 2)), draw(st.integers(1, 3))))
    sizes, pairs, num_bytes = [], list[tuple[int, int]](), list[float]()
    for size, rows, columns in groups:
        grid = np.arange(rows * columns).reshape(rows, columns) + len(sizes)
        sizes += [size] * grid.size
        for axis in (0, 1):
            ring = np.stack([grid, np.roll(grid, -1, axis)], -1).reshape(-1, 2)
            own = [pair for pair in ring.tolist() if pair[0] != pair[1]]
            pairs += own
            num_bytes += [float(draw(st.sampled_from([1, 3, 10, 100])))] * len(own)
    first = np.arange(len(sizes)) < groups[0][1] * groups[0][2]
    senders, receivers = np.array(sizes) * first, np.array(sizes) * ~first
    weight = draw(st.sampled_from([0.1, 1.0, 10.0]))
    units = Units(
        sizes=np.array(sizes),
        pairs=np.array(pairs, np.int64).reshape(-1, 2),
        num_bytes=np.array(num_bytes),
        gives=weight * np.column_stack([senders, receivers]),
        takes=np.column_stack([receivers, senders]),
    )
    return units, places


@settings(max_examples=60, derandomize=True)
@given(cases())
def test_a_packing_uses_the_least_nodes_and_is_close_to_the_best_of_all(
    case: tuple[Units, int],
) -> None:
    units, places = case
    sizes, node_of = units.sizes.tolist(), pack(units, places)
    num_nodes = int(node_of.max()) + 1
    assert np.bincount(node_of, units.sizes).max() <= places
    assert num_nodes == least_nodes(units.sizes, places)
    assert not any(True for _ in packings(sizes, places, num_nodes - 1))
    best = min(across(units, one) for one in packings(sizes, places, num_nodes))
    assert across(units, node_of.tolist()) <= WORST * best + 1e-6


@settings(max_examples=60, derandomize=True)
@given(cases(), st.randoms(use_true_random=False))
def test_a_packing_is_never_worse_than_the_one_it_is_given(case, random) -> None:
    units, places = case
    num_nodes = least_nodes(units.sizes, places)
    some = islice(packings(units.sizes, places, num_nodes), 500)
    start = np.array(random.choice([list(one) for one in some]))
    found = pack(units, places, start)
    assert across(units, found.tolist()) <= across(units, start.tolist()) * (1 + 1e-9) + 1e-9


def brute_least(sizes: list[int], places: int) -> int:
    """By filling a node with every set that has the first unit."""
    if not sizes:
        return 0
    first, rest = sizes[0], sizes[1:]
    found = len(sizes)
    for count in range(len(rest) + 1):
        for chosen in set(combinations(rest, count)):
            if first + sum(chosen) <= places:
                left = list(rest)
                for size in chosen:
                    left.remove(size)
                found = min(found, 1 + brute_least(left, places))
    return found


@settings(max_examples=100)
@example([4, 3, 3, 2, 2, 2], 8)  # the largest first needs three
@example([2, 2, 2, 2, 3, 3], 7)  # any size first needs three
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=6), st.integers(4, 8))
def test_least_nodes_is_the_least(sizes: list[int], places: int) -> None:
    assert least_nodes(np.array(sizes), places) == brute_least(sorted(sizes), places)


def test_the_same_units_are_packed_the_same_way() -> None:
    ring = np.stack([np.arange(24), np.roll(np.arange(24), -1)], -1)
    none = np.zeros((24, 0))
    units = Units(np.ones(24, int), ring, np.ones(24), none, none)
    first, second = pack(units, 8), pack(units, 8)
    assert first.tolist() == second.tolist() == [n // 8 for n in range(24)]
