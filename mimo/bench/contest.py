"""How every benchmark compares: contestants take turns, and ratios are taken within a round."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from mimo.parallel.hosts import SHARED_MEMORY

_LOOK_SECONDS = 0.1  # between two looks at the memory, at least
_LOOKS_SHARE = 0.05  # of the time, at most: of large processes a look takes long
_IDLE_SECONDS = 0.02  # a process that uses the processor less than a tenth of this time is idle
_END_SECONDS = 10.0  # that a process gets to end by itself
_OWN_MEMORY = re.compile(r"Pss_(?:Anon|File):\s+(\d+) kB")


@dataclass(frozen=True)
class Run:
    """What one run took, of all processes of its contestant together.

    peak_bytes: of memory, that in /dev/shm included; 0 where nobody looked. found: its result.
    """

    seconds: float
    processor_seconds: float = 0.0
    peak_bytes: int = 0
    found: Any = None


def take_turns(
    contestants: Mapping[str, Callable[[], Run]], rounds: int, tell: bool = False
) -> dict[str, list[Run]]:
    """Let everyone run once a round, each round beginning with another; tell: print each turn."""
    names = [*contestants]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(contestants[name]())
            if tell:
                seconds = runs[name][-1].seconds
                print(f"[{number + 1}/{rounds}] {name}: {seconds:.1f} s", flush=True)
    return runs


@dataclass(frozen=True)
class _Failure:
    traceback: str


@dataclass(frozen=True)
class Contest:
    """Runs of contestants that did the same work, round by round; the first contestant is ours."""

    name: str
    runs: Mapping[str, Sequence[Run]]

    @property
    def ours(self) -> str:
        """The name of our contestant."""
        return next(iter(self.runs))

    def ratios(self, rival: str, figure: str = "seconds") -> list[float]:
        """How many times as much as ours a rival took in each round."""
        pairs = zip(self.runs[rival], self.runs[self.ours], strict=True)
        return [getattr(theirs, figure) / getattr(ours, figure) for theirs, ours in pairs]

    def ratio(self, rival: str, figure: str = "seconds") -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios(rival, figure))

    def median(self, contestant: str, figure: str = "seconds") -> float:
        """The median of a figure."""
        return statistics.median(getattr(run, figure) for run in self.runs[contestant])


def timed(function: Callable[[], Any], until_idle: bool = False) -> Run:
    """Call it in this process. until_idle: what it goes on to do in the background counts too."""
    started, used = time.perf_counter(), _processor_seconds()
    found = function()
    ended = _idle_since() if until_idle else time.perf_counter()
    return Run(ended - started, _processor_seconds() - used, found=found)


class Apart:
    """A function in a forked process of its own, whose memory may be watched while it is called.

    make: called there, returns the function. A `Run` that the function returns gets the peak of
    memory of the process and its children. watched: without, it has none; to look takes a processor
    for 20 ms and more per GiB, at once when the function is called.
    """

    def __init__(self, make: Callable[[], Callable[..., Any]], watched: bool = True) -> None:
        self._watched = watched
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, self._pipe, theirs))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(_END_SECONDS)
        self._process.kill()
        self._process.join()

    def __call__(self, *args: Any) -> Any:
        """Raises RuntimeError with the traceback, or the exit code, of a process that fails."""
        before, peak, answered = _shared_memory(), 0, False
        with suppress(OSError):  # it is gone, and has left word
            self._pipe.send(args)
        try:
            while self._watched and not answered:
                started = time.perf_counter()
                own = sum(map(_own_memory, _tree(self._process.pid)))
                peak = max(peak, own + _shared_memory() - before)
                pause = (time.perf_counter() - started) / _LOOKS_SHARE
                answered = self._pipe.poll(max(_LOOK_SECONDS, pause))
            found = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_END_SECONDS)
            ended = f"it ended with exit code {self._process.exitcode}"
            raise RuntimeError(f"a process of the benchmark failed: {ended}") from None
        if isinstance(found, _Failure):
            raise RuntimeError(f"a process of the benchmark failed:\n{found.traceback}")
        return replace(found, peak_bytes=peak) if isinstance(found, Run) else found


def apart(function: Callable[[], Any]) -> Any:
    """What it returns in a process of its own, as `Apart`."""
    with Apart(lambda: function) as process:
        return process()


def _serve(make: Callable[[], Callable[..., Any]], starters: Connection, pipe: Connection) -> None:
    starters.close()
    # Threads that have computed in the starter are not in its fork, which would wait for them.
    torch.set_num_threads(1)
    with suppress(OSError):  # the starter is gone
        try:
            answer = make()
            while (args := pipe.recv()) is not None:
                pipe.send(answer(*args))
        except Exception:  # the starter raises it, where people look
            pipe.send(_Failure(traceback.format_exc()))


def _idle_since() -> float:
    """Wait until no thread of this process computes."""
    while True:
        now, used = time.perf_counter(), time.process_time()
        time.sleep(_IDLE_SECONDS)
        if time.process_time() - used < _IDLE_SECONDS / 10:
            return now


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
