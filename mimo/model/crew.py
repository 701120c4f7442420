"""What a rank needs of a step, and who decodes it: which rank, in a worker or right here."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np

from bridge import assign_items
from data.handover import write_arrays
from data.index.reader import SampleReader, UnreadableSample, plans_of_items
from data.worker_process import ITEM, TEXT, WITH_NURSERY, decode
from data.workers import Worker
from mimo.model.decoding import Decoding, read_arrays
from mimo.model.step_plan import PlannedMicrobatch
from mimo.parallel.grids import LANGUAGE

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 20  # of a text's arrays
_TRIES = 2
_MOST_ENDS = 10  # whatever they were


@dataclass
class Task:
    """One text or item to decode.

    number, sample: its number, and its sample's, in the microbatch. address: its number in its
    index. by: the rank that decodes it. num_bytes: about so many. path: of the file in which a
    worker or another rank hands it over. shared: with other ranks. ends: how workers ended that
    were at it.
    """

    step: int
    reader: SampleReader
    kind: str
    microbatch: int
    number: int
    sample: int
    source: int
    address: int
    by: int
    num_bytes: int
    path: Path
    shared: bool
    ends: list[str] = field(default_factory=list)

    def error(self, reason: str) -> UnreadableSample:
        """What is said when it cannot be decoded; names shard, key and item."""
        index, sample, file = self.reader.index, self.address, None
        if self.kind == ITEM:
            sample = index.sample_of_item(self.address)
            file = index.files_of_part(self.address)[0] - index.files_of_sample(sample).start
        return UnreadableSample(index.shard_of(sample), index.key(sample), file, reason)


def tasks_of_step(
    step: int,
    prefix: str,
    microbatches: Sequence[PlannedMicrobatch],
    readers: Sequence[SampleReader],
    decoding: Decoding,
) -> Iterator[Task]:
    """All texts and items that this rank needs, in order of use. prefix: of the names of files.

    What several ranks of the host need is shared out by its cost, equally on all of them.
    """
    layout, rank = decoding.layout, decoding.rank
    sharers = {module: decoding.sharers(module) for module in layout.modules_of(rank)}
    loads = {module: np.zeros(len(ranks), np.int64) for module, ranks in sharers.items()}
    for m, planned in enumerate(microbatches):
        samples = planned.samples
        for module, ranks in sharers.items():
            if not ranks:
                continue
            lane = layout.grids[module].coords(rank).dp
            if module == LANGUAGE:
                kind, number = TEXT, samples.samples_of_lane(lane)
                sample, address, cost = number, samples.sample[number], samples.length[number]
            else:
                kind, number = ITEM, planned.encoders[module].of_lane(lane)
                sample, address = samples.item_sample[number], samples.item[number]
                cost = samples.item_cost[number]
            sharer = assign_items(cost, len(ranks), loads[module])
            np.add.at(loads[module], sharer, cost)
            source = samples.source[sample]
            if kind == TEXT:
                sizes = (cost * _TOKEN_BYTES).tolist()
            else:
                wires = [readers[0].processors[media].wire for media in samples.media]
                patch_bytes = [wire.width * wire.dtype.itemsize for wire in wires]
                media = samples.item_media[number].tolist()
                plans = plans_of_items(readers, source, address)
                sizes = [
                    math.prod(plan.grid) * patch_bytes[one]
                    for one, plan in zip(media, plans, strict=True)
                ]
            columns = (own.tolist() for own in (number, sample, source, address, sharer))
            for n, i, s, at, by, num_bytes in zip(*columns, sizes, strict=True):
                path = decoding.folder / f"{prefix}.{step}.{m}.{kind}.{n}"
                own = readers[s], kind, m, n, i, s, at, ranks[by], num_bytes, path, len(ranks) > 1
                yield Task(step, *own)


Outcome = tuple[Task, list[np.ndarray] | UnreadableSample]


class Crew:
    """Those who work for one loader; used by its thread alone. What is shared is in its file."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding, self._pool = decoding, decoding.pool
        self._busy: dict[Connection, tuple[Worker, Task, float]] = {}
        self._again: deque[Task] = deque()
        self._done: list[Outcome] = []

    def begin(self, task: Task) -> bool:
        """Begin with a task; False if nobody is free."""
        if self._pool is None:
            try:
                outcome = decode(task.reader, task.kind, task.address)
                if task.shared:
                    write_arrays(task.path, outcome)
            except UnreadableSample as error:
                outcome = error.with_traceback(None)  # its frames hold the sample's data
            self._end(task, outcome)
            return True
        worker = self._pool.take()
        if worker is None:
            return False
        self._busy[worker.pipe] = (worker, task, time.monotonic())
        reader = self._decoding.readers.index(task.reader)
        with suppress(OSError):  # it has died just now, as its pipe will say
            worker.pipe.send((reader, task.kind, task.address, task.path))
        return True

    def finished(self, woken: Connection, pause_seconds: float) -> list[Outcome]:
        """What has been decoded by now; waits for it for a moment, or until there is a message."""
        ready = wait([woken, *self._busy], 0 if self._done else pause_seconds)
        for pipe in ready:
            if pipe is woken:
                woken.recv_bytes()
            else:
                self._hear(*self._busy.pop(pipe)[:2])  # pyright: ignore[reportArgumentType]
        limit = self._decoding.worker_seconds
        for worker, task, since in list(self._busy.values()):
            if time.monotonic() - since > limit:
                self._busy.pop(worker.pipe)
                self._kill(worker)
                self._ended(task, f"did not answer for {limit:g} s and was ended")
        while self._again and self.begin(self._again[0]):
            self._again.popleft()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End whoever still works."""
        for worker, *_ in self._busy.values():
            self._kill(worker)
        self._busy.clear()

    def _hear(self, worker: Worker, task: Task) -> None:
        """Take a worker's answer, or what its end says. Raises what was raised there."""
        assert self._pool is not None, "workers come from a pool"
        try:
            answer, value = worker.pipe.recv()
        except (EOFError, OSError):
            self._ended(task, self._pool.bury(worker))
            return
        self._pool.give_back(worker)
        if answer == "failed":
            raise value
        if answer == "unreadable":
            self._end(task, UnreadableSample(*value))
            return
        self._end(task, read_arrays(task.path))
        if not task.shared:
            task.path.unlink()

    def _ended(self, task: Task, how: str) -> None:
        """A worker ended over a task: another one tries; if that ends too, it is unreadable."""
        task.ends.append(how)
        own = len(task.ends) - task.ends.count(WITH_NURSERY)  # that the task may have caused
        if own < _TRIES and len(task.ends) < _MOST_ENDS:
            self._again.append(task)
            logger.warning("a decode worker %s; another one tries: %s", how, task.error("again"))
            return
        self._end(
            task,
            task.error(f"{len(task.ends)} workers ended over it: one {', one '.join(task.ends)}"),
        )

    def _end(self, task: Task, outcome: list[np.ndarray] | UnreadableSample) -> None:
        if isinstance(outcome, UnreadableSample) and task.shared:
            write_arrays(task.path, ())  # the others must not wait for it
        self._done.append((task, outcome))

    def _kill(self, worker: Worker) -> None:
        assert self._pool is not None, "workers come from a pool"
        with suppress(ProcessLookupError):  # it ended with the process that started it
            os.kill(worker.pid, signal.SIGKILL)
        self._pool.bury(worker)
