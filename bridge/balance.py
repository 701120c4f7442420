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


def assign_items(costs: Sequence[int] | NDArray, lanes: int) -> NDArray[np.int64]:
    """(I,) costs -> (I,) lane of each item; ties go to the earlier item and the lower lane."""
    costs = np.asarray(costs, dtype=np.int64)
    assigned = np.zeros(costs.size, np.int64)
    if lanes == 1:
        return assigned
    loads = [(0, lane) for lane in range(lanes)]
    for item in np.argsort(-costs, kind="stable").tolist():
        load, lane = loads[0]
        assigned[item] = lane
        heapq.heapreplace(loads, (load + int(costs[item]), lane))
    return assigned


def imbalance(costs: Sequence[int] | NDArray, assigned: NDArray[np.int64], lanes: int) -> float:
    """Largest lane load over the mean; 1.0 is perfect, also for no items at all."""
    loads = np.bincount(assigned, weights=np.asarray(costs, dtype=np.float64), minlength=lanes)
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean > 0 else 1.0
