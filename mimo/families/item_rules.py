"""How a language family treats the tokens that stand for items.

Letters: T packed tokens of a lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from data.batch import PackedLane


@dataclass(frozen=True)
class ItemRules:
    """A family's choice.

    positions: "mrope", where the rows of an item lie on a grid of time, height and width, or
    "plain", where each is one more than the previous token's. bidirectional: whether the tokens of
    one item see each other in both directions.
    """

    positions: Literal["mrope", "plain"]
    bidirectional: bool

    def position_ids(self, lane: PackedLane) -> np.ndarray:
        """(3, T) int64; plain positions are the same three times."""
        if self.positions == "mrope":
            return lane.position_ids
        plain = np.concatenate([np.arange(length, dtype=np.int64) for length in lane.lengths])
        return np.tile(plain, (3, 1))

    def seen_whole(self, lane: PackedLane) -> tuple[tuple[int, int], ...]:
        """(start, length) in the lane of each item whose tokens all see each other."""
        return lane.items if self.bidirectional else ()
