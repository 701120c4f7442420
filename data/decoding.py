"""Decode texts and items for one rank: in its own thread, or in worker processes.

A worker that dies or hangs is replaced; a text or item that ends two workers is unreadable. Several
ranks of a host that need the same share the work: one decodes and hands the result to the others.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from data.index.reader import SampleReader, UnreadableSample
from data.worker_process import (
    ITEM,
    WITH_SERVER,
    HandoverFolder,
    arrays_in,
    decode,
    write_arrays,
)

logger = logging.getLogger(__name__)

_COPIED_BYTES = 64 * 1024  # smaller files are not worth a mapping, of which a process has 65,530
_TRIES = 2
_MOST_ENDS = 10  # of workers over one task, whatever the causes

_ANSWER_SECONDS = (
    120.0  # within which the fork server answers: a large tokenizer takes seconds to load
)
_END_SECONDS = 5.0
# No GPU; one thread each, as there are many workers; no fork of a pool of threads.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True)
class Worker:
    """A process that decodes; ``pipe`` carries work to it and answers back."""

    pid: int
    pipe: Connection


class WorkerPool:
    """Up to ``size`` workers, started when they are needed. Safe to use from several threads.

    Even without workers, the fork server removes ``folder`` if this process is killed.
    readers: what workers read from; they are sent once.
    """

    def __init__(self, folder: Path, readers: Sequence[SampleReader], size: int) -> None:
        self.folder, self.readers, self.size = folder, tuple(readers), size
        self._lock = threading.Lock()
        self._free: list[Worker] = []
        self._num_workers = 0
        self._start()

    def _start(self) -> None:
        """Start the fork server; the readers follow when a worker is needed."""
        self._control, theirs = Pipe()
        self._has_readers = False
        command = [sys.executable, "-P", "-m", "data.worker_process"]
        self._server = subprocess.Popen(
            [*command, str(theirs.fileno()), str(self.folder)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def take(self) -> Worker | None:
        """Return an idle worker; None if all ``size`` workers are busy.

        Raises RuntimeError when none can be started.
        """
        with self._lock:
            while self._free:
                worker = self._free.pop()
                if not worker.pipe.poll():
                    return worker
                self._reap(worker)  # it died while idle
            if self._num_workers >= self.size:
                return None
            try:
                worker = self._fork()
            except (EOFError, OSError):  # the fork server died
                self._end()
                self._start()
                worker = self._fork()
            self._num_workers += 1
            return worker

    def give_back(self, worker: Worker) -> None:
        """Take back a worker that has answered."""
        with self._lock:
            self._free.append(worker)

    def reap(self, worker: Worker) -> str:
        """Give up a worker that has ended; return how it ended."""
        with self._lock:
            return self._reap(worker)

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            for worker in self._free:
                worker.pipe.close()
            self._free.clear()
            with suppress(OSError):
                self._control.send(("end", None))
            self._end()

    def _end(self) -> None:
        try:
            self._server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._control.close()

    def _fork(self) -> Worker:
        if not self._has_readers:
            self._control.send(("load", pickle.dumps(self.readers)))
            problem = self._answer()
            if problem:
                raise RuntimeError(f"decode workers cannot load what they need:\n{problem}")
            self._has_readers = True
        self._control.send(("fork", None))
        pid = self._answer()
        return Worker(pid, Connection(recv_handle(self._control)))

    def _reap(self, worker: Worker) -> str:
        self._num_workers -= 1
        worker.pipe.close()
        try:
            self._control.send(("reap", worker.pid))
            return self._answer()
        except (EOFError, OSError):  # the fork server died, and its workers with it
            return WITH_SERVER

    def _answer(self) -> Any:
        if not self._control.poll(_ANSWER_SECONDS):
            self._server.kill()  # a late answer would be read as that to the next question
            raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s")
        return self._control.recv()


@dataclass
class Task:
    """One text or item to decode.

    number, sample: its number, and its sample's, in the microbatch. address: its number in its
    index. by: the rank that decodes it. num_bytes: estimated size. path: the file in which a worker
    or another rank hands it over. shared: other ranks need it too. ends: how the workers ended that
    tried it.
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
        """The error for a task that cannot be decoded; names shard, key and item."""
        index, sample, file = self.reader.index, self.address, None
        if self.kind == ITEM:
            sample = index.sample_of_item(self.address)
            file = index.files_of_part(self.address)[0] - index.files_of_sample(sample).start
        return UnreadableSample(index.shard_of(sample), index.key(sample), file, reason)


TasksOfStep = Callable[
    [int, Sequence[Any], Sequence[SampleReader], Callable[[str], Path]], Iterator[Task]
]
"""step, its microbatches, the split's readers, name -> path of a file: what this rank needs, in
order of use."""


class Decoding:
    """A rank's means to decode, for one run; a context manager.

    readers: of all splits. tasks_of_step: what the rank needs of a step. root: the parent of the
    folder in which arrays are handed over; None for a rank that decodes alone and in its own
    thread. job: a name that only the ranks of this job have. num_workers: 0 decodes in the thread
    of the loader. ahead_bytes: decoded data that may wait for use beyond the next step.
    worker_seconds: limit for one text or item. peer_seconds: limit for another rank's.
    """

    def __init__(
        self,
        readers: Sequence[SampleReader],
        tasks_of_step: TasksOfStep,
        rank: int = 0,
        root: Path | None = None,
        job: str = "",
        num_workers: int = 0,
        ahead_bytes: int = 0,
        worker_seconds: float = 150.0,
        peer_seconds: float = 600.0,
    ) -> None:
        self.readers, self.tasks_of_step, self.rank = tuple(readers), tasks_of_step, rank
        self.ahead_bytes = ahead_bytes
        self.worker_seconds, self.peer_seconds = worker_seconds, peer_seconds
        self.num_loaders = 0  # the same on all ranks, so that their files have the same names
        self.folder = Path()
        self.pool: WorkerPool | None = None  # None: decode in this process
        self._handover: HandoverFolder | None = None
        if root is not None:
            self._handover = HandoverFolder(root, job)
            self.folder = self._handover.path
            self._processes = WorkerPool(self.folder, self.readers, num_workers)
            self.pool = self._processes if num_workers else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handover is not None:
            self._processes.close()
            self._handover.close()


def read_arrays(path: Path) -> list[np.ndarray]:
    """Return the arrays of a handed-over file; large ones are mapped, and outlive its name."""
    size = path.stat().st_size
    if size < _COPIED_BYTES:
        return arrays_in(np.fromfile(path, np.uint8))
    # torch's mapping, unlike Python's, keeps no descriptor open.
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return arrays_in(mapped.numpy())


Outcome = tuple[Task, list[np.ndarray] | UnreadableSample]


class DecodeExecutor:
    """Decodes the tasks of one loader, whose thread alone uses it."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding, self._pool = decoding, decoding.pool
        self._busy: dict[Connection, tuple[Worker, Task, float]] = {}
        self._retries: deque[Task] = deque()
        self._done: list[Outcome] = []

    def begin(self, task: Task) -> bool:
        """Begin a task; False if no worker is idle."""
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
        with suppress(OSError):  # it has just died; its pipe reports that
            worker.pipe.send((reader, task.kind, task.address, task.path))
        return True

    def finished(self, woken: Connection, pause_seconds: float) -> list[Outcome]:
        """Return the outcomes so far; wait for one up to ``pause_seconds``, or until ``woken``."""
        ready = wait([woken, *self._busy], 0 if self._done else pause_seconds)
        for pipe in ready:
            if pipe is woken:
                woken.recv_bytes()
            else:
                self._receive(*self._busy.pop(pipe)[:2])  # pyright: ignore[reportArgumentType]
        limit = self._decoding.worker_seconds
        for worker, task, since in list(self._busy.values()):
            if time.monotonic() - since > limit:
                self._busy.pop(worker.pipe)
                self._kill(worker)
                self._ended(task, f"did not answer for {limit:g} s and was ended")
        while self._retries and self.begin(self._retries[0]):
            self._retries.popleft()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Kill the busy workers."""
        for worker, *_ in self._busy.values():
            self._kill(worker)
        self._busy.clear()

    def _receive(self, worker: Worker, task: Task) -> None:
        """Take a worker's answer, or note its end. Raises what the worker raised."""
        assert self._pool is not None, "workers come from a pool"
        try:
            answer, value = worker.pipe.recv()
        except (EOFError, OSError):
            self._ended(task, self._pool.reap(worker))
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
        """Retry a task whose worker ended; after the second end it is unreadable."""
        task.ends.append(how)
        caused = len(task.ends) - task.ends.count(WITH_SERVER)  # by the task, perhaps
        if caused < _TRIES and len(task.ends) < _MOST_ENDS:
            self._retries.append(task)
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
        self._pool.reap(worker)
