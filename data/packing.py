"""Random permutations, mixing of sources by weight, and packing of samples by budget."""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

_MOST_SORTED = 2**16
_ROUNDS = 8  # four in each direction: entries that were neighbours have nothing in common
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: np.ndarray, *salts: int) -> np.ndarray:
    """Hash each value of uint64 (n,) together with all salts (splitmix64); uint64 (n,).

    NumPy does not promise equal streams across versions, but a resumed run needs the same order.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
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
def permutation(size: int, *salts: int) -> "_Sorted | _Feistel":
    """Return a random permutation of the numbers below ``size``, a different one for other salts.

    `at(slots)` int64 (n,) are the numbers in these slots; `slot_of(number)` is a number's slot.
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
    """A Feistel network on a grid; a number that lands in a spare cell passes through again."""

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
        """Apply all rounds; with the sign -1 their inverses."""
        moved = self._through_rounds(cells, sign)
        while (outside := np.flatnonzero(moved >= self._size)).size:
            moved[outside] = self._through_rounds(moved[outside], sign)
        return moved

    def _through_rounds(self, cells: np.ndarray, sign: int) -> np.ndarray:
        place = list(np.divmod(cells, self._shape[1]))  # row, column
        for number in range(_ROUNDS)[::sign]:
            axis, other = number % 2, 1 - number % 2
            count = self._shape[axis]
            way = _mixed(place[other], self._states[number]) % np.uint64(count)
            place[axis] = (place[axis] + sign * way.astype(np.int64)) % count
        return place[0] * self._shape[1] + place[1]


_SHUFFLED = 8  # turns in a row
_PHASE_STREAM, _SHUFFLE_STREAM = 3, 4


@dataclass(frozen=True)
class _Node:
    left: int  # number of a source or node
    right: int
    share: int  # of the left one, in units of 2^-64, as is the phase
    phase: int


class Mixing:
    """Deals turns to sources by weight. weights: above 0. seed: any integer."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._seed, self._num_sources = seed, len(weights)
        self._nodes: dict[int, _Node] = {}  # numbered after the sources
        waiting = [(Fraction(weight), number) for number, weight in enumerate(weights)]
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
        source, earlier = (part.reshape(-1, _SHUFFLED) for part in self._deal(together.ravel()))
        hashes = mix64(together.ravel(), self._seed, _SHUFFLE_STREAM).reshape(-1, _SHUFFLED)
        shuffled = np.take_along_axis(source, np.argsort(hashes, 1, kind="stable"), 1)
        # A source's own turns stay in order.
        before, after = (np.argsort(order, 1, kind="stable") for order in (source, shuffled))
        ordered = np.empty_like(earlier)
        np.put_along_axis(ordered, after, np.take_along_axis(earlier, before, 1), 1)
        place = inverse, turns % _SHUFFLED
        return shuffled[place], ordered[place]

    def counts(self, turns: int) -> np.ndarray:
        """int64 (sources,): turns of each source among the first ``turns``."""
        shuffled = turns // _SHUFFLED * _SHUFFLED
        counts, todo = np.zeros(self._num_sources, np.int64), [(self._root, shuffled)]
        while todo:
            number, count = todo.pop()
            if (node := self._nodes.get(number)) is None:
                counts[number] = count
            else:
                left = (count * node.share + node.phase) >> 64
                todo += [(node.left, left), (node.right, count - left)]
        rest, _ = self.at(np.arange(shuffled, turns))
        return counts + np.bincount(rest, minlength=self._num_sources)

    def _deal(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `at` does, before turns are shuffled."""
        source, earlier = np.empty_like(turns), np.empty_like(turns)
        todo = [(self._root, np.arange(len(turns)), turns)]
        while todo:
            number, place, earlier_turns = todo.pop()
            if (node := self._nodes.get(number)) is None:
                source[place], earlier[place] = number, earlier_turns
            elif len(earlier_turns):
                before, after = (_dealt(node, upto) for upto in (earlier_turns, earlier_turns + 1))
                left = after > before
                todo.append((node.left, place[left], before[left]))
                todo.append((node.right, place[~left], (earlier_turns - before)[~left]))
        return source, earlier


def _dealt(node: _Node, turns: np.ndarray) -> np.ndarray:
    """floor((turns · share + phase) / 2^64), int64 (n,). The product may have 128 bits."""
    return ((turns.astype(object) * node.share + node.phase) >> 64).astype(np.int64)


_ANY = 2**62
_NUMBERS = 2**32  # more than samples in a step
Sizes = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""positions (n,) -> tokens (n,) and rows (n,) of the samples there, int64."""


@dataclass(frozen=True)
class Used:
    """The part of the order of samples that a run has used, whatever its batches were."""

    samples: int = 0
    passed_over: tuple[int, ...] = ()  # ascending: unused positions before the last used one

    @property
    def end(self) -> int:
        return self.samples + len(self.passed_over)

    def unused(self, count: int) -> np.ndarray:
        """The first ``count`` unused positions, ascending."""
        earlier = np.array(self.passed_over[:count], np.int64)
        return np.concatenate((earlier, np.arange(self.end, self.end + count - len(earlier))))

    def with_packs(self, packs: Sequence[np.ndarray]) -> "Used":
        """Return the state after these packs of unused samples are used, too."""
        taken = np.concatenate(packs)
        end = max(self.end, int(taken.max()) + 1)
        before = np.concatenate((np.array(self.passed_over, np.int64), np.arange(self.end, end)))
        left = before[~np.isin(before, taken)]
        assert end - len(left) == self.samples + len(taken), "a sample is used twice"
        return Used(end - len(left), tuple(left.tolist()))


@dataclass(frozen=True)
class TokenBudget:
    """The limits of a pack."""

    tokens: int  # of its samples together
    rows: int | None = None  # of their items together; None for any number
    window: int = 512  # unused samples from which a pack is chosen


def packs_of_samples(used: Used, num_packs: int, samples: int) -> list[np.ndarray]:
    """Return the next packs of ``samples`` each, in order."""
    return list(used.unused(num_packs * samples).reshape(num_packs, samples))


def packs_of_tokens(
    used: Used, num_packs: int, budget: TokenBudget, sizes: Sizes, padded: bool = False
) -> list[np.ndarray]:
    """Return the next packs within ``budget``; several calls give the same packs as one.

    sizes: of samples, by position; no sample may exceed the budget. padded: count each sample with
    the length of its pack's longest.
    """
    window = _Window(used, budget, sizes)
    next_pack = window.next_padded_pack if padded else window.next_pack
    return [np.array(next_pack(), np.int64) for _ in range(num_packs)]


def sort_by_length(packs: Sequence[np.ndarray], tokens: np.ndarray) -> list[np.ndarray]:
    """Return equally large packs of the same samples, each with samples of similar length.

    tokens: (n,) lengths of the samples, pack by pack.
    """
    samples = np.concatenate(packs)[np.argsort(-tokens, kind="stable")]
    return [np.sort(pack) for pack in samples.reshape(len(packs), -1)]


class _Window:
    """The unused samples from which packs are chosen.

    Samples are numbered by position. The search by length uses one integer per sample, its key:
    most tokens last, the earliest of equals last. A sample then costs about a microsecond, less
    than one call of NumPy.
    """

    def __init__(self, used: Used, budget: TokenBudget, sizes: Sizes) -> None:
        self.budget, self.sizes = budget, sizes
        self._max_rows = _ANY if budget.rows is None else budget.rows
        self._end = used.end  # of what was looked up
        self._position: list[int] = []  # by number, as the next four
        self._tokens: list[int] = []
        self._rows: list[int] = []
        self._key: list[int] = []
        self._taken: list[bool] = []
        self._oldest = self._entered = self._waiting = 0
        self._by_length: list[int] = []  # ascending: the keys of those that wait
        self._rows_by_length: list[int] = []  # beside them
        self._look_up(np.array(used.passed_over, np.int64))

    def next_pack(self) -> list[int]:
        """Return ascending positions, which leave the window."""
        self._fill()
        budget, taken, by_length = self.budget.tokens, self._taken, self._by_length
        all_tokens, all_rows, rows_by_length = self._tokens, self._rows, self._rows_by_length
        tokens, rows, pack = budget, self._max_rows, []
        # The oldest, until half of the budget is used.
        self._oldest = n = taken.index(False, self._oldest)
        assert all_tokens[n] <= tokens and all_rows[n] <= rows, (
            f"position {self._position[n]}: {all_tokens[n]} tokens, {all_rows[n]} rows, "
            f"more than {self.budget}"
        )
        while n < self._entered and 2 * tokens > budget:
            if not taken[n] and all_tokens[n] <= tokens and all_rows[n] <= rows:
                i = bisect_left(by_length, self._key[n])
                del by_length[i], rows_by_length[i]
                tokens, rows, taken[n] = tokens - all_tokens[n], rows - all_rows[n], True
                pack.append(n)
            n += 1
        # Best fit. Less and less fits, so what did not fit once need not be tried again.
        i = bisect_right(by_length, tokens * _NUMBERS)
        while i > 0:
            i -= 1
            if rows_by_length[i] <= rows:
                n = -by_length[i] % _NUMBERS
                del by_length[i], rows_by_length[i]
                tokens, rows, taken[n] = tokens - all_tokens[n], rows - all_rows[n], True
                pack.append(n)
                i = bisect_right(by_length, tokens * _NUMBERS, 0, i)
        self._waiting -= len(pack)
        return [self._position[n] for n in sorted(pack)]

    def next_padded_pack(self) -> list[int]:
        """Return positions of the oldest sample and the next shorter ones that fit with padding."""
        self._fill()
        self._oldest = n = self._taken.index(False, self._oldest)
        i, count = bisect_left(self._by_length, self._key[n]), self.budget.tokens // self._tokens[n]
        rows, pack = self._max_rows, []
        while i >= 0 and len(pack) < count:
            if self._rows_by_length[i] <= rows:
                n = -self._by_length[i] % _NUMBERS
                del self._by_length[i], self._rows_by_length[i]
                rows, self._taken[n] = rows - self._rows[n], True
                pack.append(n)
            i -= 1
        self._waiting -= len(pack)
        return [self._position[n] for n in sorted(pack)]

    def _fill(self) -> None:
        keys, by_length, beside = self._key, self._by_length, self._rows_by_length
        for n in range(self._entered, self._entered + self.budget.window - self._waiting):
            if n == len(keys):
                self._look_up(np.arange(self._end, self._end + max(self.budget.window, n)))
            i = bisect_left(by_length, keys[n])
            by_length.insert(i, keys[n])
            beside.insert(i, self._rows[n])
        self._entered += self.budget.window - self._waiting
        self._waiting = self.budget.window

    def _look_up(self, positions: np.ndarray) -> None:
        tokens, rows = self.sizes(positions)
        number = np.arange(len(self._taken), len(self._taken) + len(positions))
        self._position += positions.tolist()
        self._tokens += tokens.tolist()
        self._rows += rows.tolist()
        self._key += (tokens * _NUMBERS - number).tolist()
        self._taken += [False] * len(positions)
        self._end = max(self._end, int(positions.max(initial=-1)) + 1)


def deal(costs: np.ndarray, lanes: int) -> np.ndarray:
    """Deal packs to microbatches and lanes by (n,) costs: numbers (n / lanes, lanes).

    Packs of about the same cost run at the same time: sorted by cost, each microbatch takes the
    next ``lanes``. Its most expensive pack goes to the lane with the least cost so far.
    """
    microbatches = np.argsort(-costs, kind="stable").reshape(-1, lanes)
    dealt = np.empty_like(microbatches)
    loads = np.zeros(lanes, costs.dtype)
    for packs, row in zip(microbatches, dealt, strict=True):
        row[np.argsort(loads, kind="stable")] = packs
        loads += costs[row]
    return dealt
