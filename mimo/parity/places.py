"""Which tokens, patches and rows of all samples a rank holds in a call, as plain integers.

Letters: T packed tokens of a lane, n of them on a rank, P patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.index.reader import SampleReader
from mimo.engines.megatron.groups import ProcessGroupCollection
from mimo.engines.megatron.segments import zigzag_indices
from mimo.step.plan import StepPlan

NOTHING = -1  # padding


class Places:
    """Rows of the whole tensors, in the order of the samples, of what a step's plan packs."""

    def __init__(self, reader: SampleReader, plan: StepPlan) -> None:
        index = reader.index
        items = range(index.num_items)
        self._plan = plan
        self._token_start = _starts(index.column("token_length"))
        self._row_start = _starts(index.column("item_rows"))
        self._patch_start = _starts([int(np.prod(reader.plan(item).grid)) for item in items])

    def tokens(self, microbatch: int, lane: int, length: int) -> np.ndarray:
        """(T,) rows of the tokens of a lane, which has ``length`` of them."""
        samples = self._plan.microbatches[microbatch].samples
        found = np.full(length, NOTHING)
        for i in samples.samples_of_lane(lane).tolist():
            start, count = int(samples.start[i]), int(samples.length[i])
            first = int(self._token_start[int(samples.sample[i])])
            found[start : start + count] = np.arange(first, first + count)
        return found

    def items(self, microbatches: Sequence[int], encoder: str, lane: int) -> list[int]:
        """The items that a lane of an encoder encodes in one call, in order."""
        found: list[int] = []
        for m in microbatches:
            planned = self._plan.microbatches[m]
            mine = planned.encoders[encoder].of_lane(lane)
            found += planned.samples.item[mine].tolist()
        return found

    def patches(self, items: Sequence[int]) -> np.ndarray:
        """(P,) places of the patches of these items."""
        return _stretches(self._patch_start, items)

    def rows(self, items: Sequence[int]) -> np.ndarray:
        """(N,) places of the rows of these items."""
        return _stretches(self._row_start, items)


def held_tokens(count: int, lengths: tuple[int, ...], groups: ProcessGroupCollection) -> np.ndarray:
    """Places in the lane (n,) of the ``count`` tokens of a tensor that this rank has.

    They are all tokens, its context-parallel share, or its sequence-parallel share of that.
    lengths: of the segments, padded.
    """
    total, cp = sum(lengths), groups.cp.size()
    if count == total:
        return np.arange(total)
    held = np.arange(total)
    if cp > 1:
        held = zigzag_indices(lengths, cp, groups.cp.rank()).numpy()
    if count == len(held):
        return held
    assert count * groups.tp.size() == len(held), f"{count} of {total} tokens"
    return held[groups.tp.rank() * count :][:count]


def held_part(count: int, total: int, parts: int, part: int) -> np.ndarray:
    """Places (n,) of the ``count`` patches or rows of a tower that a rank has, including blanks.

    parts, part: over how many ranks they are split, and the number of this part. Blanks come after
    the first ``total``.
    """
    start = part * count if parts > 1 else 0
    held = np.arange(start, start + count)
    return np.where(held < total, held, NOTHING)


def _starts(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.cumsum([0, *sizes])


def _stretches(starts: np.ndarray, items: Sequence[int]) -> np.ndarray:
    parts = [np.arange(starts[item], starts[item + 1]) for item in items]
    return np.concatenate([np.zeros(0, np.int64), *parts])
