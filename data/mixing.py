"""Random permutations, and the mixing of sources by weight."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

_MOST_SORTED = 2**16
_ROUNDS = 8  # four in each direction: entries that were neighbours have nothing in common
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: np.ndarray, *salts: int) -> np.ndarray:
    """uint64 (n,) -> uint64 (n,): a well mixed hash of each value and all salts (splitmix64).

    A hash of our own, because NumPy does not promise equal random streams across its versions, and
    a resumed run must see the same order. Source: Steele, Lea, Flood, "Fast splittable pseudorandom
    number generators", 2014.
    """
    return _mixed(values, _state_of(salts))


def _state_of(salts: tuple[int, ...]) -> np.ndarray:
    state = np.zeros(1, dtype=np.uint64)
    for salt in salts:
        state = _finish(state + np.uint64(salt % 2**64) + _GOLDEN)
    return state


def _mixed(values: np.ndarray, state: np.ndarray) -> np.ndarray:
    return _finish(state + (values.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def _finish(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=128)
def permutation(size: int, *salts: int) -> _Sorted | _Feistel:
    """A random permutation of the numbers below ``size``, one for each choice of salts.

    `at(slots)` int64 (n,) are the numbers in these places; `slot_of(number)` is a number's place.
    """
    return (_Sorted if size <= _MOST_SORTED else _Feistel)(size, salts)


class _Sorted:
    def __init__(self, size: int, salts: tuple[int, ...]) -> None:
        order = np.argsort(mix64(np.arange(size), *salts), kind="stable")
        self._order = order.astype(np.uint16)  # many are kept

    def at(self, slots: np.ndarray) -> np.ndarray:
        return self._order[slots].astype(np.int64)

    def slot_of(self, number: int) -> int:
        return int(np.flatnonzero(self._order == number)[0])


class _Feistel:
    """By rounds in a grid of about as many rows as columns, with few cells more than numbers.

    A number that comes out as one of the cells in excess goes through the rounds again.
    """

    def __init__(self, size: int, salts: tuple[int, ...]) -> None:
        self._size = size
        self._states = [_state_of((*salts, number)) for number in range(_ROUNDS)]
        rows = math.isqrt(size - 1) + 1
        self._shape = rows, -(-size // rows)

    def at(self, slots: np.ndarray) -> np.ndarray:
        return self._moved(slots, 1)

    def slot_of(self, number: int) -> int:
        return int(self._moved(np.array([number]), -1)[0])

    def _moved(self, cells: np.ndarray, sign: int) -> np.ndarray:
        """Through all rounds; with the sign -1 through their inverses."""
        found = self._through_rounds(cells, sign)
        while (outside := np.flatnonzero(found >= self._size)).size:
            found[outside] = self._through_rounds(found[outside], sign)
        return found

    def _through_rounds(self, cells: np.ndarray, sign: int) -> np.ndarray:
        place = list(np.divmod(cells, self._shape[1]))  # row, column
        for number in range(_ROUNDS)[::sign]:
            own, other = number % 2, 1 - number % 2
            count = self._shape[own]
            way = _mixed(place[other], self._states[number]) % np.uint64(count)
            place[own] = (place[own] + sign * way.astype(np.int64)) % count
        return place[0] * self._shape[1] + place[1]


_SHUFFLED = 8  # turns in a row
_PHASE_STREAM, _SHUFFLE_STREAM = 3, 4
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)


@dataclass(frozen=True)
class _Node:
    """left, right: numbers of sources or of nodes. share, phase: of the left side, in 2^-64."""

    left: int
    right: int
    share: int
    phase: int


class Mixing:
    """Deals turns to sources by weight. weights: at least one above 0. seed: any integer."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._seed, self._num_sources = seed, len(weights)
        self._nodes: dict[int, _Node] = {}  # numbered after the sources
        waiting = [(Fraction(weight), number) for number, weight in enumerate(weights) if weight]
        heapq.heapify(waiting)
        while len(waiting) > 1:
            (left, first), (right, second) = heapq.heappop(waiting), heapq.heappop(waiting)
            number, share = self._num_sources + len(self._nodes), int(left / (left + right) * 2**64)
            phase = int(mix64(np.array([number]), seed, _PHASE_STREAM)[0])
            self._nodes[number] = _Node(first, second, share, phase)
            heapq.heappush(waiting, (left + right, number))
        self._root = waiting[0][1]

    def at(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """turns int64 (n,) -> (source int64 (n,), earlier turns of that source int64 (n,))."""
        if not self._nodes:
            return np.full(len(turns), self._root), turns
        groups, inverse = np.unique(turns // _SHUFFLED, return_inverse=True)
        together = groups[:, None] * _SHUFFLED + np.arange(_SHUFFLED)
        source, earlier = (own.reshape(-1, _SHUFFLED) for own in self._deal(together.ravel()))
        hashes = mix64(together.ravel(), self._seed, _SHUFFLE_STREAM).reshape(-1, _SHUFFLED)
        shuffled = np.take_along_axis(source, np.argsort(hashes, 1, kind="stable"), 1)
        # A source's own turns stay in order.
        before, after = (np.argsort(one, 1, kind="stable") for one in (source, shuffled))
        ordered = np.empty_like(earlier)
        np.put_along_axis(ordered, after, np.take_along_axis(earlier, before, 1), 1)
        place = inverse, turns % _SHUFFLED
        return shuffled[place], ordered[place]

    def counts(self, turns: int) -> np.ndarray:
        """int64 (sources,): turns of each source among the first ``turns``."""
        shuffled = turns // _SHUFFLED * _SHUFFLED
        found, todo = np.zeros(self._num_sources, np.int64), [(self._root, shuffled)]
        while todo:
            number, count = todo.pop()
            if (node := self._nodes.get(number)) is None:
                found[number] = count
            else:
                left = (count * node.share + node.phase) >> 64
                todo += [(node.left, left), (node.right, count - left)]
        rest, _ = self.at(np.arange(shuffled, turns))
        return found + np.bincount(rest, minlength=self._num_sources)

    def _deal(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Like `at`, before turns are shuffled."""
        source, earlier = np.empty_like(turns), np.empty_like(turns)
        todo = [(self._root, np.arange(len(turns)), turns)]
        while todo:
            number, place, own = todo.pop()
            if (node := self._nodes.get(number)) is None:
                source[place], earlier[place] = number, own
            elif len(own):
                before, after = (_dealt(node, upto) for upto in (own, own + 1))
                left = after > before
                todo.append((node.left, place[left], before[left]))
                todo.append((node.right, place[~left], (own - before)[~left]))
        return source, earlier


def _dealt(node: _Node, turns: np.ndarray) -> np.ndarray:
    """floor((turns · share + phase) / 2^64), int64 (n,): the 128 bits of the product in parts."""
    count, share = turns.astype(np.uint64), np.uint64(node.share)
    high, low = count >> _HALF, count & _LOW
    share_high, share_low = share >> _HALF, share & _LOW
    middle = high * share_low + (low * share_low >> _HALF)
    second = low * share_high + (middle & _LOW)
    whole = high * share_high + (middle >> _HALF) + (second >> _HALF)
    carry = count * share > ~np.uint64(node.phase)
    return (whole + carry).astype(np.int64)
