"""Rank processes on one machine: started from one warm process, watched, and ended together.

Importing the engine takes seconds, so a fork server imports it once and every rank is a fork of it.
Each rank has a pipe for its result or error, and for stop requests. Ranks end when one of them
fails and when their starter goes away, however it does.
"""

import ctypes
import faulthandler
import math
import multiprocessing
import os
import pickle
import pkgutil
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from mimo.errors import InputError
from mimo.runtime import preloaded
from mimo.runtime.signals import request_stop, request_stop_on_signals

_END_SECONDS = 3.0  # within which a rank ends that has closed its pipe
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_STACKS_SECONDS = 0.5  # that ranks get to write their stacks
_POLL_SECONDS = 0.5

# Once a rank is gone, its peers fail in their next collective; those errors hide the cause.
CONSEQUENCE = re.compile(
    r"connection (closed|reset)|broken pipe|timed out|timeout|gloo|nccl", re.IGNORECASE
)
# How long to wait for a cause after its consequence or, when a rank died silently, for what its
# peers were waiting for; and for an earlier cause.
_SILENT_CAUSE_SECONDS, _EARLIER_CAUSE_SECONDS = 1.0, 0.1

_LAST_REPORT = threading.Lock()  # whoever holds it reports for this rank and ends it


@dataclass(frozen=True)
class RankError:
    """Why one rank failed. waits_for: ranks that it gave up waiting for, if its error says so.

    traceback: empty if it died silently. time_seconds: on the machine's monotonic clock.
    """

    rank: int
    reason: str
    traceback: str
    exit_code: int
    time_seconds: float
    is_consequence: bool
    waits_for: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


class RanksFailed(RuntimeError):
    """At least one rank failed, and the others were ended. `errors` has the cause first.

    Among consequences, those that name a silent rank come first: it hangs.
    """

    def __init__(self, errors: Sequence[RankError]) -> None:
        failed = {error.rank for error in errors}

        def distance_to_cause(error: RankError) -> tuple[bool, bool, bool, float]:
            names_silent = not failed.issuperset(error.waits_for)
            return error.is_consequence, not names_silent, not error.waits_for, error.time_seconds

        self.errors = sorted(errors, key=distance_to_cause)
        super().__init__(f"{self.errors[0].traceback}{self.errors[0]}")


class RanksHung(RuntimeError):
    """The ranks took too long and were ended; the text holds every rank's Python stacks."""


def warm_up(preload: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    """Start the fork server and return at once; it imports the modules `preload` meanwhile.

    Only the first call in a process has an effect. variables: added to the server's environment.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([preloaded.__name__])
    before = dict(os.environ)
    os.environ.update({preloaded.MODULES: " ".join(preload), **(variables or {})})
    try:
        with _without_main():
            forkserver.ensure_running()
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def run_processes(
    target: str | Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    environment: Mapping[str, str],
    timeout_seconds: float = math.inf,
    stack_dir: Path | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    stop_requests: Sequence[str] = (),
) -> list[Any]:
    """Return what `target(*args)` returns in each of `world_size` ranks, which then are gone.

    target: `module:function`, or a function that can be imported. environment: of each rank,
    besides RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE. meanwhile: called at least twice a
    second. stop_requests: names of signals, passed on to the ranks when they appear. Raises
    RanksFailed soon after the first failure, and RanksHung after `timeout_seconds`, when ranks have
    written their stacks to `stack_dir`.
    """
    context, payload = multiprocessing.get_context("forkserver"), pickle.dumps((target, args))
    processes, pipes = list[Any](), list[Connection]()
    files = [stack_dir / f"rank {rank}" for rank in range(world_size)] if stack_dir else []
    try:
        with _without_main():
            for rank in range(world_size):
                pipe, writer = context.Pipe()
                pipes.append(pipe)
                variables = dict(environment, RANK=str(rank), LOCAL_RANK=str(rank))
                variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
                stacks = (timeout_seconds, files[rank]) if files else None
                rank_args = (rank, variables, payload, writer, stacks)
                process = context.Process(target=_rank_main, args=rank_args, name=f"rank {rank}")
                process.start()
                processes.append(process)
                writer.close()
        # From now on: the fork server may have taken its time to import what ranks need.
        deadline = time.monotonic() + timeout_seconds + _STACKS_SECONDS
        results = _results(processes, pipes, deadline, meanwhile, stop_requests)
        if hung := [rank for rank in range(world_size) if rank not in results]:
            written = [file for rank, file in enumerate(files) if rank in hung and file.exists()]
            texts = [f"--- {file.name} ---\n{file.read_text()}" for file in written]
            names = ", ".join(map(str, hung))
            raise RanksHung(f"ranks {names} hung for {timeout_seconds} s\n{''.join(texts)}")
        return [results[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def _results(
    processes: Sequence[Any],
    pipes: Sequence[Connection],
    deadline: float,
    meanwhile: Callable[[], None],
    stop_requests: Sequence[str],
) -> dict[int, Any]:
    """Return what ranks have returned until `deadline`, by rank. Raises RanksFailed."""
    results, errors = dict[int, Any](), list[RankError]()
    open_ranks, num_sent = set(range(len(processes))), 0
    while open_ranks and (left := deadline - time.monotonic()) > 0:
        # The end of a process shows on its pipe as well, unless children of it hold that open.
        signs: dict[Any, int] = {pipes[rank]: rank for rank in open_ranks}
        signs |= {processes[rank].sentinel: rank for rank in open_ranks}
        for rank in {signs[sign] for sign in wait(list(signs), min(left, _POLL_SECONDS))}:
            open_ranks.discard(rank)
            outcome = _outcome(rank, processes[rank], pipes[rank])
            if isinstance(outcome, RankError):
                errors.append(outcome)
            else:
                (results[rank],) = outcome
        meanwhile()
        for name in stop_requests[num_sent:]:
            num_sent += 1
            for rank in open_ranks:
                with suppress(OSError):  # it has just ended
                    pipes[rank].send_bytes(name.encode())
        if errors:
            cause_is_known = any(e.traceback and not e.is_consequence for e in errors)
            linger = _EARLIER_CAUSE_SECONDS if cause_is_known else _SILENT_CAUSE_SECONDS
            deadline = min(deadline, min(error.time_seconds for error in errors) + linger)
    if errors:
        raise RanksFailed(errors)
    return results


def _outcome(rank: int, process: Any, pipe: Connection) -> tuple[Any] | RankError:
    """Return what a rank that reported or ended has sent, or how it died silently."""
    now = time.monotonic()
    try:
        if pipe.poll():
            return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):  # it has ended, perhaps before it read a stop request
        pass
    process.join(_END_SECONDS)
    code = process.exitcode
    if code is not None and code < 0:
        reason = f"was killed by {signal.Signals(-code).name}"
    else:
        reason = f"ended with exit code {code} and without an error message"
    return RankError(rank, reason, "", 1, now, is_consequence=False)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide `__main__` while processes start, else every rank runs the starter's script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _rank_main(
    rank: int,
    environment: dict[str, str],
    payload: bytes,
    pipe: Connection,
    stacks: tuple[float, Path] | None,
) -> None:
    """Live as a rank. stacks: seconds after which, and file to which, stacks are written."""
    # The fork server has the environment of its own start, not that of this call.
    os.environ.clear()
    os.environ.update(environment)
    request_stop_on_signals()
    if sys.platform == "linux":  # the thread below needs its turn, which a library may not give it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Both print the stacks of all threads: a crash in a library, and a person who asks.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    if stacks is not None:
        seconds, path = stacks
        faulthandler.dump_traceback_later(seconds, file=path.open("w"))  # which it keeps open
    threading.Thread(target=_read_requests, args=(pipe,), name="stop requests", daemon=True).start()
    end_with_failed_thread(
        lambda error: _send_and_exit(pipe, pickle.dumps(_describe(rank, error)), code=1)
    )
    try:
        if preloaded.initialised_cuda is not None:
            raise RuntimeError(
                f"importing {preloaded.initialised_cuda} initialised CUDA in the process that "
                f"ranks are forked from, so none of them could use it; do not preload that module"
            )
        target, args = pickle.loads(payload)
        function = pkgutil.resolve_name(target) if isinstance(target, str) else target
        message = pickle.dumps((function(*args),))
    except BaseException as error:
        if not (isinstance(error, SystemExit) and not error.code):
            _send_and_exit(pipe, pickle.dumps(_describe(rank, error)), code=1)
        message = pickle.dumps((None,))
    # Threads and libraries of the engine may not wind down in time, or at all: do not wait.
    _send_and_exit(pipe, message, code=0)


def end_with_failed_thread(end: Callable[[BaseException], None]) -> None:
    """Call ``end`` in a thread that fails: Python would go on, with a main thread that may hang."""

    def failed(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            end(args.exc_value)

    threading.excepthook = failed


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``."""
    return error.exit_code if isinstance(error, InputError) else 1


def _describe(rank: int, error: BaseException) -> RankError:
    summary = "".join(traceback.format_exception_only(error)).strip()
    return RankError(
        rank=rank,
        reason=f"failed: {summary}",
        traceback="".join(traceback.format_exception(error)),
        exit_code=exit_code_of(error),
        time_seconds=time.monotonic(),
        is_consequence=is_consequence(error),
        waits_for=tuple(getattr(error, "waits_for", ())),
    )


def is_consequence(error: BaseException) -> bool:
    """Whether ``error`` is caused by another rank that is gone or does not answer."""
    if not isinstance(error, RuntimeError | OSError):
        return False
    if isinstance(error, OSError) and error.filename is not None:
        return False  # about a file, which may be called anything
    return bool(getattr(error, "waits_for", ()) or CONSEQUENCE.search(str(error)))


def _send_and_exit(pipe: Connection, message: bytes, code: int) -> None:
    _LAST_REPORT.acquire()  # for good
    try:
        # First: once the last message is there, the starter ends every rank.
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        try:
            pipe.send_bytes(message)
        finally:
            os._exit(code)


def _read_requests(pipe: Connection) -> None:
    """Read stop requests; exit as soon as the starter is gone, even by SIGKILL."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    with suppress(EOFError, OSError):
        while starter.sentinel not in wait([starter.sentinel, pipe]):
            request_stop(pipe.recv_bytes().decode())
    os._exit(1)
