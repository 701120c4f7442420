"""Prefetch what this rank needs of each step: its texts and items, in the order of use.

A thread plans steps and hands out the work. Nothing of models or layouts is known here.
"""

import errno
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data.decoding import Decoding, Task, Worker, WorkerPool
from data.index.reader import SampleReader, UnreadableSample
from data.index.samples import SkippedSample
from data.packing import Used
from data.text.chat import EncodedSample
from data.worker_process import TEXT, decode, read_arrays, write_arrays

logger = logging.getLogger(__name__)

_TRIES = 2  # workers that may end over a text or item
_MOST_STEPS_AHEAD = 8  # beyond the next, however small they are
_POLL_SECONDS = 0.005  # between two looks for a file of another rank


class Planner(Protocol):
    """Plans steps, equally on all ranks; a microbatch has `samples`, a `GlobalMicrobatch`."""

    def microbatches(self, step: int) -> Sequence[Any]: ...

    def used_before(self, step: int) -> Used: ...


@dataclass
class LoadedStep:
    """This rank's texts and items of a step, before the ranks agree on unusable samples."""

    step: int
    microbatches: Sequence[Any]  # as the planner gave them
    used: Used  # the samples of the order that are used once the step is done
    # Per microbatch: samples by their number in it, items (P, W) by source and number in its index.
    encoded: list[dict[int, EncodedSample]] = field(default_factory=list)
    patches: list[dict[tuple[int, int], Tensor]] = field(default_factory=list)
    # Sample numbers in the step that this rank could not read, with the reason.
    unusable: dict[int, SkippedSample] = field(default_factory=dict)
    handed_over: list[Path] = field(default_factory=list)  # files written for other ranks

    def release(self) -> None:
        """Remove the files for other ranks, once all ranks have loaded the step."""
        for path in self.handed_over:
            path.unlink(missing_ok=True)

    @property
    def num_samples(self) -> int:
        return sum(m.samples.num_samples for m in self.microbatches)

    def addresses(self, numbers: Collection[int]) -> dict[tuple[int, int], int]:
        """Map (data source, sample) of these samples of the step to their numbers in it."""
        source = np.concatenate([m.samples.source for m in self.microbatches])
        sample = np.concatenate([m.samples.sample for m in self.microbatches])
        return {(int(source[number]), int(sample[number])): number for number in numbers}


@dataclass
class _Loading:
    loaded: LoadedStep
    todo: deque[Task]  # for this rank to decode
    awaited: deque[Task]  # from other ranks
    num_missing: int
    num_bytes: int = 0


class DecoderLate(RuntimeError):
    """Another rank has not decoded a text or item in time; ``waits_for`` holds its number."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.waits_for = (rank,)


class StepLoader:
    """Loads the steps from ``first_step`` to before ``last_step`` in order. Close it when done.

    It always prefetches the next step, and further ones while the decoded bytes that wait for use
    stay below ``decoding.ahead_bytes``. readers: of the planner's sources, in their order.
    """

    def __init__(
        self,
        planner: Planner,
        readers: Sequence[SampleReader],
        decoding: Decoding,
        first_step: int,
        last_step: int,
    ) -> None:
        self.planner, self.readers, self.decoding = planner, readers, decoding
        self._prefix = str(decoding.num_loaders)
        decoding.num_loaders += 1
        self._next, self._last = first_step, last_step
        # Guards what follows. The thread adds steps and `next` removes them, so the thread iterates
        # over copies of the list.
        self._changed = threading.Condition()
        self._wake = threading.Event()  # the thread
        self._steps: deque[_Loading] = deque()
        self._num_bytes = 0
        self._error: BaseException | None = None
        self._asked: float | None = None  # when the waiting `next` began
        self._closing = False
        # A thread for each worker, or one that decodes itself.
        pool = decoding.pool
        self._threads = ThreadPoolExecutor(1 if pool is None else pool.size, "decode")
        self._of_thread = threading.local()  # `worker` of each of these threads
        self._workers = set[Worker]()
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def next(self) -> LoadedStep:
        """Return the next step; wait for it if needed. Raises what its reading raised."""
        with self._changed:
            self._asked = time.monotonic()
            self._changed.wait_for(lambda: self._is_complete() or self._error is not None)
            self._asked = None
            if self._error is not None and not self._is_complete():
                raise self._error
            step = self._steps.popleft()
            self._num_bytes -= step.num_bytes
        self._wake.set()
        return step.loaded

    def close(self) -> None:
        """Stop loading, after what this process is decoding."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _is_complete(self) -> bool:
        return bool(self._steps) and self._steps[0].num_missing == 0

    # ------------------------------------------------------------------ background thread

    def _run(self) -> None:
        try:
            while not self._closing and self._error is None:
                self._wake.clear()
                if step := self._step_to_read():
                    task = step.todo.popleft()
                    self._count_bytes(step, task.num_bytes)
                    self._threads.submit(self._decode_and_keep, task)
                self._fetch()
                if step is None:
                    awaits = any(step.awaited for step in list(self._steps))
                    self._wake.wait(_POLL_SECONDS if awaits else None)
        except Exception as error:
            self._fail(error)
        finally:
            self._end_workers()

    def _end_workers(self) -> None:
        with self._changed:
            self._closing = True
            for worker in self._workers:
                with suppress(ProcessLookupError):  # what started it has ended, too
                    os.kill(worker.pid, signal.SIGKILL)
        self._threads.shutdown(cancel_futures=True)
        if self.decoding.pool is not None:
            for worker in self._workers:
                self.decoding.pool.kill(worker)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            error.add_note(
                "no room is left for decoded data: start the container with a larger --shm-size, "
                "or lower data.prefetch_mib"
            )
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._wake.set()

    def _step_to_read(self) -> _Loading | None:
        """Return the first step with a task that may begin now; plan further steps if needed."""
        ahead = self.decoding.ahead_bytes
        while True:
            with self._changed:
                held, num_steps = self._num_bytes, len(self._steps)
                for place, step in enumerate(self._steps):
                    if step.todo:
                        fits = held + step.todo[0].num_bytes <= ahead
                        return step if place == 0 or fits else None
            enough = held >= ahead or num_steps > _MOST_STEPS_AHEAD
            if self._next == self._last or (num_steps and enough):
                return None
            planned = self._plan(self._next)
            self._next += 1
            with self._changed:
                self._steps.append(planned)
                self._changed.notify_all()  # a rank may need nothing of a step

    def _plan(self, step: int) -> _Loading:
        microbatches = self.planner.microbatches(step)
        loaded = LoadedStep(step, microbatches, self.planner.used_before(step + 1))
        for _ in microbatches:
            loaded.encoded.append({})
            loaded.patches.append({})

        def path_of(name: str) -> Path:
            return self.decoding.folder / f"{self._prefix}.{step}.{name}"

        tasks = [*self.decoding.tasks_of_step(step, microbatches, self.readers, path_of)]
        todo = deque(task for task in tasks if task.by == self.decoding.rank)
        awaited = deque(task for task in tasks if task.by != self.decoding.rank)
        return _Loading(loaded, todo, awaited, len(tasks))

    def _fetch(self) -> None:
        """Take the texts and items that other ranks have decoded."""
        for step in list(self._steps):
            while step.awaited:
                task = step.awaited[0]
                if not task.path.exists():
                    # Before `next` waits, the other rank may be busy with earlier steps.
                    since, limit = self._asked, self.decoding.peer_seconds
                    if step is not self._steps[0] or since is None:
                        return
                    if time.monotonic() - since > limit:
                        late = f"rank {task.by} has not decoded it for this rank within {limit:g} s"
                        raise DecoderLate(str(task.error(late)), task.by)
                    return
                self._have(step, step.awaited.popleft(), read_arrays(task.path))

    def _keep(self, task: Task, outcome: list[np.ndarray] | UnreadableSample) -> None:
        """Keep what this rank has decoded, or the reason why it cannot."""
        step = next(step for step in list(self._steps) if step.loaded.step == task.step)
        loaded, arrays = step.loaded, outcome
        if isinstance(arrays, UnreadableSample):
            earlier = loaded.microbatches[: task.microbatch]
            sample = task.sample + sum(m.samples.num_samples for m in earlier)
            loaded.unusable[sample], arrays = arrays.sample, []
        if task.shared:
            loaded.handed_over.append(task.path)
        self._count_bytes(step, -task.num_bytes)
        self._have(step, task, arrays)
        self._wake.set()

    def _have(self, step: _Loading, task: Task, arrays: Sequence[np.ndarray]) -> None:
        """Put decoded arrays in their place; an unreadable text or item has none."""
        loaded, m = step.loaded, task.microbatch
        if task.kind == TEXT:
            if not arrays:  # its tokens are blanked before use
                ids = np.zeros(int(loaded.microbatches[m].samples.length[task.number]), np.int64)
                arrays = ids, ids, ids.astype(np.float32), ids[:0], ids[:0]
            loaded.encoded[m][task.number] = EncodedSample(*arrays)
        else:
            for array in arrays:
                loaded.patches[m][task.source, task.address] = torch.from_numpy(array)
        self._count_bytes(step, sum(array.nbytes for array in arrays))
        with self._changed:
            step.num_missing -= 1
            self._changed.notify_all()

    def _count_bytes(self, step: _Loading, num_bytes: int) -> None:
        with self._changed:
            step.num_bytes += num_bytes
            self._num_bytes += num_bytes

    # ------------------------------------------------------------------ threads that decode

    def _decode_and_keep(self, task: Task) -> None:
        try:
            self._keep(task, self._decode(task))
        except Exception as error:
            if not self._closing:
                self._fail(error)

    def _decode(self, task: Task) -> list[np.ndarray] | UnreadableSample:
        try:
            if self.decoding.pool is not None:
                return self._decode_in_worker(self.decoding.pool, task)
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
        limit, ends = self.decoding.worker_seconds, list[str]()
        question = (self.decoding.readers.index(task.reader), task.kind, task.address, task.path)
        while True:
            worker, is_late = self._worker(pool), False
            try:
                worker.pipe.send(question)
                is_late = not worker.pipe.poll(limit)
                if not is_late:
                    error = worker.pipe.recv()
                    break
            except (EOFError, OSError):  # it has ended
                pass
            with self._changed:
                if self._closing:
                    raise CancelledError
                self._workers.remove(worker)
            del self._of_thread.worker
            how = pool.kill(worker)
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

    def _worker(self, pool: WorkerPool) -> Worker:
        if not hasattr(self._of_thread, "worker"):
            worker = pool.start()
            with self._changed:
                self._workers.add(worker)
                if self._closing:
                    raise CancelledError
            self._of_thread.worker = worker
        return self._of_thread.worker
