"""Decode texts and items for one rank: in its own thread, or in worker processes.

A worker that dies or hangs is replaced; a text or item that ends two workers is unreadable. The
ranks of a host that need the same share the work: one decodes and hands the result to the others.
PyTorch's DataLoader would decode in each of them, for 1.7 times the processor time with two ranks
(docs/performance.md).
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, Self

import numpy as np

from data.index.reader import SampleReader, UnreadableSample
from data.worker_process import ITEM, HandoverFolder, decode, read_arrays, write_arrays

logger = logging.getLogger(__name__)

_TRIES = 2
_ANSWER_SECONDS = 120.0  # of the fork server, which loads a tokenizer
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
    """Starts up to ``size`` workers when they are needed. Safe to use from several threads.

    Its methods raise RuntimeError when the process that starts workers fails.
    """

    def __init__(self, folder: Path, readers: Sequence[SampleReader], size: int) -> None:
        self.size, self._unsent = size, tuple(readers)
        self._lock = threading.Lock()
        self._free: list[Worker] = []
        self._slots = threading.Semaphore(size)
        self._control, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "data.worker_process"]
        self._server = subprocess.Popen(
            [*command, str(theirs.fileno()), str(folder)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def take(self) -> Worker:
        """Return an idle worker; wait for one."""
        self._slots.acquire()
        try:
            with self._lock:
                return self._free.pop() if self._free else self._fork()
        except BaseException:
            self._slots.release()
            raise

    def give_back(self, worker: Worker) -> None:
        """Take back a worker that has answered."""
        with self._lock:
            self._free.append(worker)
        self._slots.release()

    def reap(self, worker: Worker) -> str:
        """Give up a worker that has ended; return how it ended."""
        worker.pipe.close()
        with self._lock:
            self._slots.release()
            return self._ask("reap", worker.pid)

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            for worker in self._free:
                worker.pipe.close()
            self._free.clear()
            self._control.close()
            try:
                self._server.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()

    def _fork(self) -> Worker:
        answer = self._ask("fork", pickle.dumps(self._unsent) if self._unsent else b"")
        if isinstance(answer, str):
            raise RuntimeError(f"decode workers cannot load what they need:\n{answer}")
        self._unsent = ()
        return Worker(answer, Connection(recv_handle(self._control)))

    def _ask(self, question: str, value: Any) -> Any:
        """Ask the fork server, see `worker_process.main`."""
        try:
            self._control.send((question, value))
            if self._control.poll(_ANSWER_SECONDS):
                return self._control.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(
                "the process that starts decode workers has ended; it may have been killed"
            ) from error
        raise RuntimeError(
            f"the process that starts decode workers has not answered for {_ANSWER_SECONDS:g} s"
        )


@dataclass(frozen=True)
class Task:
    """One text or item to decode."""

    step: int
    reader: SampleReader
    kind: str
    microbatch: int
    number: int  # in the microbatch
    sample: int  # the number of its sample in the microbatch
    source: int
    address: int  # its number in its index
    by: int  # the rank that decodes it
    num_bytes: int  # estimated
    path: Path  # of the file in which it is handed over
    shared: bool  # whether other ranks need it too

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
            if num_workers:
                self.pool = WorkerPool(self.folder, self.readers, num_workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handover is not None:
            self._handover.close()
        if self.pool is not None:
            self.pool.close()


class DecodeExecutor:
    """Decodes the tasks of one loader in threads: one for each worker, or one that decodes itself.

    on_done, on_error: called in these threads, with a task and its arrays, or with an error.
    """

    def __init__(
        self,
        decoding: Decoding,
        on_done: Callable[[Task, list[np.ndarray] | UnreadableSample], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._decoding, self._on_done, self._on_error = decoding, on_done, on_error
        pool = decoding.pool
        self._threads = ThreadPoolExecutor(1 if pool is None else pool.size, "decode")
        self._lock = threading.Lock()  # of the next two
        self._busy = set[Worker]()
        self._closed = False

    def submit(self, task: Task) -> None:
        """Decode a task after those that were submitted earlier."""
        self._threads.submit(self._run, task)

    def close(self) -> None:
        """Kill the busy workers, and forget the tasks that are not done."""
        with self._lock:
            self._closed = True
            for worker in self._busy:
                _kill(worker)
        self._threads.shutdown(cancel_futures=True)

    def _run(self, task: Task) -> None:
        try:
            self._on_done(task, self._decode(task))
        except Exception as error:
            if not self._closed:
                self._on_error(error)

    def _decode(self, task: Task) -> list[np.ndarray] | UnreadableSample:
        try:
            if self._decoding.pool is not None:
                return self._decode_in_worker(self._decoding.pool, task)
            arrays = decode(task.reader, task.kind, task.address)
        except UnreadableSample as error:
            if task.shared:
                write_arrays(task.path, ())  # the others must not wait for it
            return error.with_traceback(None)  # its frames hold the sample's data
        if task.shared:
            write_arrays(task.path, arrays)
        return arrays

    def _decode_in_worker(self, pool: WorkerPool, task: Task) -> list[np.ndarray]:
        """Retry a task whose worker ends; after the second end it is unreadable."""
        limit, ends = self._decoding.worker_seconds, list[str]()
        number = self._decoding.readers.index(task.reader)
        while True:
            worker = pool.take()
            with self._lock:
                if self._closed:
                    pool.give_back(worker)
                    raise CancelledError
                self._busy.add(worker)
            has_answered, is_late = False, False
            try:
                worker.pipe.send((number, task.kind, task.address, task.path))
                is_late = not worker.pipe.poll(limit)
                error = None if is_late else worker.pipe.recv()
                has_answered = not is_late
            except (EOFError, OSError):  # it has ended
                error = None
            with self._lock:
                self._busy.discard(worker)
            if has_answered:
                pool.give_back(worker)
                break
            if is_late:
                _kill(worker)
            how = pool.reap(worker)
            if self._closed:
                raise CancelledError
            ends.append(f"did not answer for {limit:g} s and was ended" if is_late else how)
            if len(ends) == _TRIES:
                raise task.error(f"{len(ends)} workers ended over it: one {', one '.join(ends)}")
            again = task.error("again")
            logger.warning("a decode worker %s; another one tries: %s", ends[-1], again)
        if error is not None:
            raise error
        arrays = read_arrays(task.path)
        if not task.shared:
            task.path.unlink()
        return arrays


def _kill(worker: Worker) -> None:
    with suppress(ProcessLookupError):  # it ended with the process that started it
        os.kill(worker.pid, signal.SIGKILL)
