"""Assigns items to encoder lanes.

Each item goes to the least loaded lane, largest item first (longest processing time first; R. L.
Graham, Bounds on multiprocessing timing anomalies, 1969: at most 4/3 of the best possible maximum).
"""

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

    loads: (lanes,) work that the lanes have already in this microbatch. earlier: (lanes,) work of
    earlier ones; it decides between equally loaded lanes, so that single items do not all go to the
    same lane. Further ties go to the earlier item and the lower lane.
    """
    costs = np.asarray(costs, dtype=np.int64)
    assigned = np.zeros(costs.size, np.int64)
    if lanes == 1:
        return assigned
    start = np.zeros(lanes, np.int64) if loads is None else np.asarray(loads, np.int64)
    before = np.zeros(lanes, np.int64) if earlier is None else np.asarray(earlier, np.int64)
    items = np.argsort(-costs, kind="stable")
    heap = list(zip(start.tolist(), before.tolist(), range(lanes), strict=True))
    heapq.heapify(heap)
    for item, cost in zip(items.tolist(), costs[items].tolist(), strict=True):
        load, previous, lane = heap[0]
        assigned[item] = lane
        heapq.heapreplace(heap, (load + cost, previous, lane))
    return assigned


def imbalance(loads: NDArray) -> float:
    """(..., lanes) loads -> the mean over "..." of largest over mean load; 1.0 is perfect.

    Lanes without any load count as perfect.
    """
    largest, mean = loads.max(axis=-1), loads.mean(axis=-1)
    return float(np.divide(largest, mean, out=np.ones_like(mean), where=mean > 0).mean())
