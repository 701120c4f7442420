"""Which samples share a sequence: so many, or as many as fit into a budget of tokens.

A pack is the samples of one sequence: their positions in the order of samples, ascending. Packs
follow from the order and from what is used of it, and from nothing that depends on ranks or lanes.

By budget, packs are filled by best fit, among the first so many unused samples of the order (the
window). The oldest of them go first, until half of the budget is used; then, again and again, the
longest that still fits. So none is left over for long, and hardly any room is lost.

A budget counts tokens of samples. What a layout pads them to comes on top: it is less than two
tokens of a sample on each context-parallel rank, and other layouts have the same packs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_ANY = 2**62
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
        left = np.setdiff1d(before, taken)
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
    """The unused samples among which packs are put together."""

    def __init__(self, used: Used, budget: TokenBudget, sizes: Sizes) -> None:
        self.budget, self.sizes = budget, sizes
        self._max_rows = _ANY if budget.rows is None else budget.rows
        self._end = used.end  # of what was looked up
        self._looked_up: list[tuple[int, int, int]] = []  # last first: (position, tokens, rows)
        self._waiting: list[tuple[int, int, int]] = []  # by position: the same
        self._by_length: list[tuple[int, int, int]] = []  # ascending: (tokens, -position, rows)
        self._look_up(np.array(used.passed_over, np.int64))

    def next_pack(self) -> list[int]:
        """Positions, ascending; they leave the window."""
        while len(self._waiting) < self.budget.window:
            if not self._looked_up:
                self._look_up(np.arange(self._end, self._end + self.budget.window))
                self._end += self.budget.window
            self._add(*self._looked_up.pop())
        tokens, rows = self.budget.tokens, self._max_rows
        oldest = self._waiting[0]
        assert oldest[1] <= tokens and oldest[2] <= rows, f"{oldest} is larger than {self.budget}"
        pack = []
        # The oldest, until half of the budget is used.
        i = 0
        while i < len(self._waiting) and 2 * tokens > self.budget.tokens:
            one = self._waiting[i]
            if one[1] <= tokens and one[2] <= rows:
                self._remove(*one)
                pack.append(one[0])
                tokens, rows = tokens - one[1], rows - one[2]
            else:
                i += 1
        # Best fit. Less and less fits, so what did not fit once need not be tried again.
        i = len(self._by_length)
        while (i := min(i, bisect_right(self._by_length, (tokens, 1)))) > 0:
            i -= 1
            length, negative, own_rows = self._by_length[i]
            if own_rows <= rows:
                self._remove(-negative, length, own_rows)
                pack.append(-negative)
                tokens, rows = tokens - length, rows - own_rows
        return sorted(pack)

    def _look_up(self, positions: np.ndarray) -> None:
        tokens, rows = self.sizes(positions)
        found = zip(positions.tolist(), tokens.tolist(), rows.tolist(), strict=True)
        self._looked_up = list(found)[::-1]

    def _add(self, position: int, tokens: int, rows: int) -> None:
        self._waiting.append((position, tokens, rows))
        insort(self._by_length, (tokens, -position, rows))

    def _remove(self, position: int, tokens: int, rows: int) -> None:
        del self._waiting[bisect_left(self._waiting, (position,))]
        del self._by_length[bisect_left(self._by_length, (tokens, -position, rows))]


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
