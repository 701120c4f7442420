"""Memory for rows that arrive on a CPU, used again as soon as nobody holds it.

A fresh buffer of some tens of megabytes is mapped page by page while it fills, which takes as long
as the transfer itself. A device's own allocator keeps its memory.

Letters: n rows, H hidden.
"""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch
from torch import Tensor

_LEAST_BYTES = 1 << 20  # smaller buffers come from the heap, whose pages stay mapped
_MOST_FREE = 4  # blocks that are kept, unused, when another one is taken


class RowMemory:
    """Hands out uninitialised buffers of rows; one end of a bridge has one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[np.ndarray] = []

    def empty(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """(n, H) on the device, not initialised.

        Its memory is free again when the last tensor that shares it is gone, views and what
        autograd has saved included.
        """
        num_bytes = num_rows * hidden_size * dtype.itemsize
        if self.device.type != "cpu" or num_bytes < _LEAST_BYTES:
            return torch.empty(num_rows, hidden_size, dtype=dtype, device=self.device)
        block = self._take(num_bytes)
        lease = block[:num_bytes]  # a separate object, which the tensor's storage keeps alive
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.from_numpy(lease).view(dtype).view(num_rows, hidden_size)

    def _take(self, num_bytes: int) -> np.ndarray:
        # A lease may end at any moment, on any thread that collects garbage: blocks that come back
        # meanwhile go to a list of their own.
        free, self._free = self._free, []
        fitting = [block for block in free if block.nbytes >= num_bytes]
        if fitting:
            taken = min(fitting, key=len)
        else:  # microbatches differ in size: a little more fits most of the next ones too
            taken = np.empty(math.ceil(num_bytes * 1.125), np.uint8)
        rest = sorted((block for block in free if block is not taken), key=len)
        self._free.extend(rest[-_MOST_FREE:])
        return taken

    def _give_back(self, block: np.ndarray) -> None:
        self._free.append(block)
