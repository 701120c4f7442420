"""How a rank decodes: by itself or in worker processes, and with which ranks it shares the work.

The ranks of an encoder lane that are on one host need the same items, those of a language lane the
same texts. Each is decoded by one of them and handed to the others.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from data.handover import HandoverFolder, arrays_in
from data.index.reader import SampleReader
from data.workers import WorkerPool
from mimo.config.schema import Recipe
from mimo.parallel.connections import SHARED_MEMORY, Host, find_host
from mimo.parallel.grids import LANGUAGE, Layout

logger = logging.getLogger(__name__)

_MIB = 2**20
_COPIED_BYTES = 64 * 1024  # smaller files are not worth a mapping, of which a process has 65,530
_TRIES_PER_TIMEOUT = 4  # a worker that hangs twice is noticed before other ranks give up


class Decoding:
    """A rank's means to decode, for one run; a context manager.

    readers: of all splits. host: None for a rank that decodes alone. num_workers: 0 decodes in the
    thread of the loader. worker_seconds: that a worker may take for one item or text.
    peer_seconds: how long to wait for another rank's.
    """

    def __init__(
        self,
        readers: Sequence[SampleReader],
        layout: Layout,
        rank: int,
        host: Host | None = None,
        num_workers: int = 0,
        ahead_bytes: int = 0,
        worker_seconds: float = 150.0,
        peer_seconds: float = 600.0,
    ) -> None:
        self.readers, self.layout, self.rank = tuple(readers), layout, rank
        self.ahead_bytes = ahead_bytes
        self.worker_seconds, self.peer_seconds = worker_seconds, peer_seconds
        self._here = (rank,) if host is None else host.ranks
        self.num_loaders = 0  # the same on all ranks, so that their files have the same names
        self.folder = Path()  # of the files that are handed over, where any are
        self.pool: WorkerPool | None = None  # None: decode in this process
        self._handover: HandoverFolder | None = None
        shares = any(len(self.sharers(name)) > 1 for name in layout.modules_of(rank))
        if host is not None and (num_workers or shares):
            self._handover = HandoverFolder(_root(host, ahead_bytes), host.job)
            self.folder = self._handover.path
            self._processes = WorkerPool(self.folder, self.readers, num_workers)
            self.pool = self._processes if num_workers else None

    def sharers(self, module: str) -> list[int]:
        """The ranks of this host that need the items or texts of a module that this one needs."""
        grid = self.layout.grids[module]
        lane, stages = grid.coords(self.rank).dp, range(grid.pp if module == LANGUAGE else 1)
        places = {rank: grid.coords(rank) for rank in self._here if rank in grid.ranks}
        found = [rank for rank, at in places.items() if at.dp == lane and at.pp in stages]
        return found if self.rank in found else []  # a later stage of an encoder needs none

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handover is not None:
            self._processes.close()
            self._handover.close()


def open_decoding(
    recipe: Recipe, layout: Layout, rank: int, readers: Sequence[SampleReader]
) -> Decoding:
    """As the recipe says; every rank of the world calls it, together."""
    data, host = recipe.data, find_host()
    workers = data.workers
    if workers is None:  # a rank's own threads need a core, too
        workers = max(0, host.cores_per_rank - 1)
    logger.info("decodes in up to %d workers; ranks of this host: %s", workers, host.ranks)
    seconds, ahead_bytes = recipe.bridge.timeout_seconds, data.prefetch_mib * _MIB
    worker_seconds = data.worker_timeout_seconds or seconds / _TRIES_PER_TIMEOUT
    return Decoding(readers, layout, rank, host, workers, ahead_bytes, worker_seconds, seconds)


def _root(host: Host, ahead_bytes: int) -> Path:
    """Where the folder is made: the same on all ranks of a host."""
    needed = len(host.ranks) * max(ahead_bytes, 64 * _MIB)
    if host.free_bytes >= needed:
        return SHARED_MEMORY
    other = Path(tempfile.gettempdir())
    logger.warning(
        "%s has %d MiB free, %d ranks of this host may need %d MiB: decoded data are handed over "
        "through %s, which is slower on a disk; start the container with a larger --shm-size, or "
        "lower data.prefetch_mib",
        SHARED_MEMORY,
        host.free_bytes // _MIB,
        len(host.ranks),
        needed // _MIB,
        other,
    )
    return other


def read_arrays(path: Path) -> list[np.ndarray]:
    """The arrays of a file that was handed over; large ones are mapped, and outlive its name."""
    size = path.stat().st_size
    if size < _COPIED_BYTES:
        return arrays_in(np.fromfile(path, np.uint8))
    # torch's mapping, unlike Python's, keeps no descriptor open.
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return arrays_in(mapped.numpy())
