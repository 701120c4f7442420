"""Which samples share a sequence: so many, or as many as fit into a budget of tokens.

A pack is the samples of one sequence: their positions in the order of samples, ascending. Packs
follow from the order and from what is used of it, and from nothing that depends on ranks or lanes.

By budget, packs are filled by best fit, among the first so many unused samples of the order (the
window). The oldest of them go first, until half of the budget is used; then, again and again, the
longest that still fits. A budget counts tokens of samples: what a layout pads them to, less than
two tokens of a sample on each context-parallel rank, comes on top.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_ANY = 2**62
_NUMBERS = 2**32  # more than samples in a step
Sizes = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""positions (n,) -> tokens (n,) and rows (n,) of the samples there, int64."""


@dataclass(frozen=True)
class Used:
    """How much of the order of samples a run has used, whatever its batches were.

    samples: how many. passed_over: ascending positions of unused samples before the last used one.
    """

    samples: int = 0
    passed_over: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position after the last used one."""
        return self.samples + len(self.passed_over)

    def unused(self, count: int) -> np.ndarray:
        """The first ``count`` unused positions, ascending."""
        earlier = np.array(self.passed_over[:count], np.int64)
        return np.concatenate((earlier, np.arange(self.end, self.end + count - len(earlier))))

    def with_packs(self, packs: Sequence[np.ndarray]) -> Used:
        """The same once these packs of unused samples are used, too."""
        taken = np.concatenate(packs)
        end = max(self.end, int(taken.max()) + 1)
        before = np.concatenate((np.array(self.passed_over, np.int64), np.arange(self.end, end)))
        left = before[~np.isin(before, taken)]
        assert end - len(left) == self.samples + len(taken), "a sample is used twice"
        return Used(end - len(left), tuple(left.tolist()))


@dataclass(frozen=True)
class TokenBudget:
    """What fits into a pack.

    tokens: of its samples together. rows: of their items together, None for any number. window:
    unused samples among which a pack is put together.
    """

    tokens: int
    rows: int | None = None
    window: int = 512


def packs_of_samples(used: Used, num_packs: int, samples: int) -> list[np.ndarray]:
    """The next packs, of ``samples`` each, in order."""
    return list(used.unused(num_packs * samples).reshape(num_packs, samples))


def packs_of_tokens(
    used: Used, num_packs: int, budget: TokenBudget, sizes: Sizes
) -> list[np.ndarray]:
    """The next packs within ``budget``; taken in several calls, they are the same.

    sizes: of any samples; none may be larger than the budget.
    """
    window = _Window(used, budget, sizes)
    return [np.array(window.next_pack(), np.int64) for _ in range(num_packs)]


class _Window:
    """The unused samples among which packs are put together.

    Samples have numbers in order of position. What is searched by length is one integer a sample,
    its key: most tokens last, and of equally many the earliest. So a sample costs about a
    microsecond, less than one call of NumPy.
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
        """Positions, ascending; they leave the window."""
        self._fill()
        budget, taken, by_length = self.budget.tokens, self._taken, self._by_length
        all_tokens, all_rows, rows_by_length = self._tokens, self._rows, self._rows_by_length
        tokens, rows, pack = budget, self._max_rows, []
        # The oldest, until half of the budget is used.
        self._oldest = one = taken.index(False, self._oldest)
        assert all_tokens[one] <= tokens and all_rows[one] <= rows, (
            f"position {self._position[one]}: {all_tokens[one]} tokens, {all_rows[one]} rows, "
            f"more than {self.budget}"
        )
        while one < self._entered and 2 * tokens > budget:
            if not taken[one] and all_tokens[one] <= tokens and all_rows[one] <= rows:
                i = bisect_left(by_length, self._key[one])
                del by_length[i], rows_by_length[i]
                tokens, rows, taken[one] = tokens - all_tokens[one], rows - all_rows[one], True
                pack.append(one)
            one += 1
        # Best fit. Less and less fits, so what did not fit once need not be tried again.
        i = bisect_right(by_length, tokens * _NUMBERS)
        while i > 0:
            i -= 1
            if rows_by_length[i] <= rows:
                one = -by_length[i] % _NUMBERS
                del by_length[i], rows_by_length[i]
                tokens, rows, taken[one] = tokens - all_tokens[one], rows - all_rows[one], True
                pack.append(one)
                i = bisect_right(by_length, tokens * _NUMBERS, 0, i)
        self._waiting -= len(pack)
        return [self._position[one] for one in sorted(pack)]

    def _fill(self) -> None:
        keys, by_length, beside = self._key, self._by_length, self._rows_by_length
        for one in range(self._entered, self._entered + self.budget.window - self._waiting):
            if one == len(keys):
                self._look_up(np.arange(self._end, self._end + max(self.budget.window, one)))
            key = keys[one]
            i = bisect_left(by_length, key)
            by_length.insert(i, key)
            beside.insert(i, self._rows[one])
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
    """(n,) costs of packs -> (n / lanes, lanes): the pack of each microbatch and lane.

    Packs that cost about the same run at the same time: sorted by cost, each microbatch takes the
    next ``lanes``. Its most expensive pack goes to the lane that has had least so far.
    """
    microbatches = np.argsort(-costs, kind="stable").reshape(-1, lanes)
    dealt = np.empty_like(microbatches)
    loads = np.zeros(lanes, costs.dtype)
    for packs, row in zip(microbatches, dealt, strict=True):
        row[np.argsort(loads, kind="stable")] = packs
        loads += costs[row]
    return dealt
