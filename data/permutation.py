"""Hashes of numbers, and permutations that follow from them: any entry of one by itself.

Up to 2^16 entries are sorted by their hashes. More of them are permuted without a table, by a
Feistel network: entries are cells of a grid, and a round moves every cell along its row, or along
its column, by a hash of the other coordinate. So it costs the same for any number of entries.
"""

from __future__ import annotations

import math
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
