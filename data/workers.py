"""A rank's side of its decode workers: starts them, lends them out, replaces those that die."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from data.index.reader import SampleReader
from data.worker_process import WITH_NURSERY

_ANSWER_SECONDS = 120.0  # within which a nursery answers: a large tokenizer takes seconds to load
_END_SECONDS = 5.0
# Nothing of a GPU; one thread each, as there are many; no fork of a pool of threads.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True)
class Worker:
    """A process that decodes; through ``pipe`` it is given work and answers."""

    pid: int
    pipe: Connection


class WorkerPool:
    """Up to ``size`` workers, started when they are needed. Safe to use from several threads.

    With none, it still watches over ``folder``: if this process is killed, somebody removes it.
    readers: what workers read from; they are sent once.
    """

    def __init__(self, folder: Path, readers: Sequence[SampleReader], size: int) -> None:
        self.folder, self.readers, self.size = folder, tuple(readers), size
        self._lock = threading.Lock()
        self._free: list[Worker] = []
        self._num_workers = 0
        self._start()

    def _start(self) -> None:
        """Start the nursery; the readers follow when a worker is needed."""
        self._control, theirs = Pipe()
        self._has_readers = False
        command = [sys.executable, "-P", "-m", "data.worker_process"]
        self._nursery = subprocess.Popen(
            [*command, str(theirs.fileno()), str(self.folder)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def take(self) -> Worker | None:
        """A worker that has nothing to do; None if there are no more.

        Raises RuntimeError when none can be started.
        """
        with self._lock:
            while self._free:
                worker = self._free.pop()
                if not worker.pipe.poll():
                    return worker
                self._bury(worker)  # it died while it had nothing to do
            if self._num_workers >= self.size:
                return None
            try:
                worker = self._fork()
            except (EOFError, OSError):  # the nursery died
                self._end()
                self._start()
                worker = self._fork()
            self._num_workers += 1
            return worker

    def give_back(self, worker: Worker) -> None:
        """Take back a worker that has answered."""
        with self._lock:
            self._free.append(worker)

    def bury(self, worker: Worker) -> str:
        """Give up a worker that does not answer any more; returns how it ended."""
        with self._lock:
            return self._bury(worker)

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
            self._nursery.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
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

    def _bury(self, worker: Worker) -> str:
        self._num_workers -= 1
        worker.pipe.close()
        try:
            self._control.send(("bury", worker.pid))
            return self._answer()
        except (EOFError, OSError):  # the nursery died, and its workers with it
            return WITH_NURSERY

    def _answer(self) -> Any:
        if not self._control.poll(_ANSWER_SECONDS):
            self._nursery.kill()  # a late answer would be taken for that to the next question
            raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s")
        return self._control.recv()
