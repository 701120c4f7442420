"""Assigns items to encoder lanes.

Each item goes to the least loaded lane, largest item first (longest processing time first; R. L.
Graham, Bounds on multiprocessing timing anomalies, 1969: at most 4/3 of the best possible maximum).
The rule is sequential. But until a lane that got an item is the least loaded again, the next items
go to the next lanes, whatever they cost. Such rounds of items are assigned at once.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FEW_LANES = 64


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
    if lanes < _FEW_LANES:  # short rounds: a heap is faster
        heap = list(zip(start.tolist(), before.tolist(), range(lanes), strict=True))
        heapq.heapify(heap)
        for item, cost in zip(items.tolist(), costs[items].tolist(), strict=True):
            load, previous, lane = heap[0]
            assigned[item] = lane
            heapq.heapreplace(heap, (load + cost, previous, lane))
        return assigned
    ranked = np.argsort(before, kind="stable")  # of equally loaded lanes, the first is taken
    load = start[ranked]
    while items.size:
        lane = np.argsort(load, kind="stable")[: items.size]
        cost = costs[items[: lane.size]]
        again = np.minimum.accumulate(load[lane] + cost)[:-1] <= load[lane[1:]]
        count = int(again.argmax()) + 1 if again.any() else lane.size
        load[lane[:count]] += cost[:count]
        assigned[items[:count]] = ranked[lane[:count]]
        items = items[count:]
    return assigned


def imbalance(loads: NDArray) -> float:
    """(..., lanes) loads -> the mean over "..." of largest over mean load; 1.0 is perfect.

    Lanes without any load count as perfect.
    """
    largest, mean = loads.max(axis=-1), loads.mean(axis=-1)
    return float(np.divide(largest, mean, out=np.ones_like(mean), where=mean > 0).mean())
