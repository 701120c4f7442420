"""Which source has which turn: exact shares of any window of turns, each turn by itself.

Sources are the leaves of a Huffman tree. A node deals its turns to its two sides: of the first m,
the left side gets floor(m · share + phase). So in any window a side has less than one turn more or
less than its share of its node's, and a node's own error reaches a side by that side's share. In a
Huffman tree, where a node's uncle weighs as much as the node at least, these sum to less than 3.4
turns for any number of sources of any weights.

Even turns alone would follow a rhythm: of two equal sources, one of two lanes would get all of one.
So every 8 turns in a row are shuffled, which adds 2 · 8 · w · (1 - w), at most 4: a source with the
share w of all weights has w · W turns in any window of W, give or take less than 8.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from data.permutation import mix64

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
