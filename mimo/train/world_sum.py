"""The one small collective per step over the whole world.

Gradient norm, loss and the next step's unreadable samples travel together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mimo.device import local_device


def sum_over_world(values: Sequence[float]) -> list[float]:
    """Element-wise sum over all ranks, in fp64; every rank calls it with as many values."""
    total = torch.tensor(list(values), dtype=torch.float64, device=local_device())
    dist.all_reduce(total)
    return total.tolist()
