"""Which encoder lane encodes which item.

Any item may be encoded on any lane, because the plan routes rows. Items are assigned largest
first to the least loaded lane (longest processing time first; R. L. Graham, Bounds on
multiprocessing timing anomalies, 1969: at most 4/3 of the best possible maximum).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def assign_items(
    costs: Sequence[int] | NDArray,
    lanes: int,
    loads: Sequence[int] | NDArray | None = None,
    earlier: Sequence[int] | NDArray | None = None,
) -> NDArray[np.int64]:
    """(I,) costs -> (I,) lane of each item.

    loads: (lanes,) work that the lanes already have in the same go. earlier: (lanes,) work that
    they had before; it decides between lanes that are equally loaded, so that a single item does
    not always go to the same lane. Further ties go to the earlier item and the lower lane.
    """
    costs = np.asarray(costs, dtype=np.int64)
    assigned = np.zeros(costs.size, np.int64)
    if lanes == 1:
        return assigned
    start = np.zeros(lanes, np.int64) if loads is None else np.asarray(loads, np.int64)
    before = np.zeros(lanes, np.int64) if earlier is None else np.asarray(earlier, np.int64)
    heap = list(zip(start.tolist(), before.tolist(), range(lanes), strict=True))
    heapq.heapify(heap)
    for item in np.argsort(-costs, kind="stable").tolist():
        load, previous, lane = heap[0]
        assigned[item] = lane
        heapq.heapreplace(heap, (load + int(costs[item]), previous, lane))
    return assigned


def imbalance(costs: Sequence[int] | NDArray, assigned: NDArray[np.int64], lanes: int) -> float:
    """Largest lane load over the mean; 1.0 is perfect, also for no items at all."""
    loads = np.bincount(assigned, weights=np.asarray(costs, dtype=np.float64), minlength=lanes)
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean > 0 else 1.0
