"""A pass of a loader over the samples, in a process of its own that is watched; and a check.

What a loader takes is counted over its whole tree of processes while its queues are in steady
state: one pass comes first that is not timed, and more would follow.
"""

from __future__ import annotations

import multiprocessing
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import psutil
import torch

from data.media.images import ImageProcessor
from mimo.bench.data_ours import our_batches
from mimo.bench.data_theirs import RIVALS, Backend
from mimo.bench.data_workload import Batch, Workload
from mimo.layout.hosts import SHARED_MEMORY

_LOOK_SECONDS = 0.1  # between two looks at the memory
_OWN_MEMORY = re.compile(r"Pss_(?:Anon|File):\s+(\d+) kB")


@dataclass(frozen=True)
class Contestant:
    """Ours, or a rival with one of the backends of transformers' image processor."""

    loader: str = "ours"
    backend: Backend | None = None

    def __str__(self) -> str:
        """For example `webdataset, pil`."""
        return self.loader if self.backend is None else f"{self.loader}, {self.backend}"

    def batches(self, workload: Workload, num_workers: int) -> Iterator[Batch]:
        """Without end."""
        torch.set_num_threads(1)  # as in workers; else one rival's process would use all cores
        warnings.filterwarnings("ignore", "'pin_memory' argument")  # there may be no device
        if self.backend is None:
            return our_batches(workload, num_workers)
        return RIVALS[self.loader](workload, num_workers, self.backend)


@dataclass(frozen=True)
class Pass:
    """What a pass over all samples took, of all processes together.

    num_bytes: handed over for the device. samples: how many different ones there were.
    peak_bytes: of memory, that in /dev/shm included.
    """

    seconds: float
    processor_seconds: float
    num_bytes: int
    samples: int
    peak_bytes: int = 0


def timed_pass(contestant: Contestant, workload: Workload, num_workers: int) -> Pass:
    """One pass, after one that is not timed."""

    def run() -> Pass:
        batches = contestant.batches(workload, num_workers)
        num_bytes, keys = 0, set[str]()
        for _ in islice(batches, workload.num_batches):
            pass
        started, used = time.perf_counter(), _processor_seconds()
        for batch in islice(batches, workload.num_batches):
            num_bytes += batch.num_bytes
            keys.update(batch.keys)
        seconds, used = time.perf_counter() - started, _processor_seconds() - used
        return Pass(seconds, used, num_bytes, len(keys))

    found, peak = watched(run)
    return replace(found, peak_bytes=peak)


def difference(rival: Contestant, workload: Workload) -> tuple[float, int]:
    """Largest difference of a pixel's value to ours, and samples with other tokens.

    For a process of its own.
    """
    wire, ours = ImageProcessor().wire, {}
    for batch in islice(Contestant().batches(workload, 0), workload.num_batches):
        ours |= {key: (ids, pixels) for key, ids, pixels in batch.samples()}
    largest, others = 0.0, set(ours)
    for batch in islice(rival.batches(workload, 0), workload.num_batches):
        for key, ids, pixels in batch.samples():
            if torch.equal(ids, ours[key][0]):
                others.discard(key)
            values = torch.from_numpy(wire.values(ours[key][1].numpy()))
            largest = max(largest, float((values - pixels).abs().max()))
    return largest, len(others)


def watched[T](function: Callable[[], T]) -> tuple[T, int]:
    """What it returns in a fork, and the most memory that the fork and its children had together.

    Raises RuntimeError if it fails, which it says itself.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(function()))
    before, peak = _shared_memory(), 0
    process.start()
    sender.close()
    while not receiver.poll(_LOOK_SECONDS):
        own = sum(map(_own_memory, _tree(process.pid)))
        peak = max(peak, own + _shared_memory() - before)
    try:
        return receiver.recv(), peak
    except EOFError:
        raise RuntimeError("a process of the benchmark failed") from None
    finally:
        process.join()


def _tree(pid: int | None = None) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _processor_seconds() -> float:
    """Of this process and all below it."""
    total = 0.0
    for process in _tree():
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # of users and system, of ended children too
    return total


def _own_memory(process: psutil.Process) -> int:
    """Bytes; of what several processes share, each has a part. Without shared memory."""
    with suppress(OSError):
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        return 1024 * sum(map(int, _OWN_MEMORY.findall(text)))
    return 0


def _shared_memory() -> int:
    return shutil.disk_usage(SHARED_MEMORY).used
