"""Start the processes in which a rank decodes texts and items.

`data.loader` replaces a worker that dies or hangs; an item that ends two workers is unreadable. The
ranks of a host that need the same share the work: one decodes and hands the result to the others
(docs/performance.md compares this with PyTorch's DataLoader).
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, Self

from data.index.reader import SampleReader, UnreadableSample
from data.worker_process import ITEM, HandoverFolder

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
    """Starts workers. Safe to use from several threads.

    size: workers of each loader. readers: what workers read from; they are sent once. Methods raise
    RuntimeError when the process that starts workers fails.
    """

    def __init__(self, folder: Path, readers: Sequence[SampleReader], size: int) -> None:
        self.size, self._unsent = size, tuple(readers)
        self._lock = threading.Lock()
        self._control, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "data.worker_process"]
        self._server = subprocess.Popen(
            [*command, str(theirs.fileno()), str(folder)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def start(self) -> Worker:
        with self._lock:
            answer = self._ask("fork", pickle.dumps(self._unsent) if self._unsent else b"")
            if isinstance(answer, str):
                raise RuntimeError(f"decode workers cannot load what they need:\n{answer}")
            self._unsent = ()
            return Worker(answer, Connection(recv_handle(self._control)))

    def kill(self, worker: Worker) -> str:
        """Kill a worker, or reap one that has ended; return how it ended."""
        worker.pipe.close()
        with suppress(ProcessLookupError):  # the process that started it has ended, too
            os.kill(worker.pid, signal.SIGKILL)
        with self._lock:
            return self._ask("reap", worker.pid)

    def close(self) -> None:
        self._control.close()
        try:
            self._server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _ask(self, question: str, value: Any) -> Any:
        with suppress(EOFError, OSError):
            self._control.send((question, value))
            if self._control.poll(_ANSWER_SECONDS):
                return self._control.recv()
        code = self._server.poll()
        how = "does not answer" if code is None else f"has ended with exit code {code}"
        raise RuntimeError(f"the process that starts decode workers {how}")


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
    path: Path  # the file in which it is handed over
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


@dataclass(eq=False)
class Decoding:
    """A rank's means to decode, for one run; a context manager.

    readers: of all splits. tasks_of_step: what the rank needs of a step. root: the parent of the
    folder in which arrays are handed over; None for a rank that decodes alone and in its own
    thread. job: a name that only the ranks of this job have. num_workers: 0 decodes in the thread
    of the loader. ahead_bytes: decoded data that may wait for use beyond the next step.
    worker_seconds: limit for one text or item. peer_seconds: limit for another rank's.
    """

    readers: Sequence[SampleReader]
    tasks_of_step: TasksOfStep
    rank: int = 0
    root: Path | None = None
    job: str = ""
    num_workers: int = 0
    ahead_bytes: int = 0
    worker_seconds: float = 150.0
    peer_seconds: float = 600.0

    def __post_init__(self) -> None:
        self.num_loaders = 0  # the same on all ranks, so that their files have the same names
        self.folder = Path()
        self.pool: WorkerPool | None = None  # None: decode in this process
        self._handover: HandoverFolder | None = None
        if self.root is not None:
            self._handover = HandoverFolder(self.root, self.job)
            self.folder = self._handover.path
            if self.num_workers:
                self.pool = WorkerPool(self.folder, self.readers, self.num_workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handover is not None:
            self._handover.close()
        if self.pool is not None:
            self.pool.close()
