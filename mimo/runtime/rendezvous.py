"""The rendezvous of the ranks of torchrun or srun, before they join the world of torch.distributed.

Through its key-value store they agree on whether the job can begin; rank 0 prints for all of them.
"""

import hashlib
import json
import os
import pickle
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from mimo.errors import InputError, StartError
from mimo.runtime.ranks import RankEnv

_ANSWER_SECONDS = 2.0  # in which a store answers, unless the network is cut
_POLL_SECONDS = 0.2
_PROGRESS_SECONDS = 5.0  # between two reports of progress
_LEAVE_SECONDS = 3.0  # for which rank 0, which hosts the store, waits for the others


class Refused(Exception):
    """The job cannot begin. Rank 0 has printed why; this rank must end with ``exit_code``."""

    @property
    def exit_code(self) -> int:
        return self.args[0]


class Rendezvous:
    """Brings the ranks of a job together before training. All ranks build one together.

    store: the store with which torch.distributed joins the world.
    Raises StartError if the ranks do not meet within ``timeout_seconds``.
    """

    def __init__(self, environment: RankEnv, timeout_seconds: float) -> None:
        self._rank, self._size = environment.rank, environment.world_size
        self._timeout = timedelta(seconds=timeout_seconds)
        self.store: Store = _open_store(environment, self._timeout)
        self._hosts_store = self._rank == 0 and environment.hosts_store
        self._keys = PrefixStore("mimo", self.store)
        self._round, self._has_left = 0, False
        self._next_report = 0.0  # of progress, on the monotonic clock

    def agree(self, problem: InputError | None) -> None:
        """Collect the ``problem`` of every rank, None where there is none. All ranks call it.

        Rank 0 prints each problem once, and all raise Refused; bad input decides the exit code.
        """
        message = (0, "") if problem is None else (problem.exit_code, str(problem))
        texts = self.gather(json.dumps(message))
        self.from_rank_0(lambda: self._check_problems(texts))

    def report_progress(self) -> None:
        """Tell the ranks that wait for this one that it is still at work."""
        if time.monotonic() >= self._next_report:
            self._keys.add("progress", 1)
            self._next_report = time.monotonic() + _PROGRESS_SECONDS

    def scatter[T](self, compute: Callable[[], Sequence[T]]) -> T:
        """Scatter rank 0's list, one element a rank. All ranks call it; errors as `from_rank_0`."""
        name = f"share {self._round}"

        def set_shares() -> None:
            for rank, share in enumerate(compute()):
                self._keys.set(f"{name} {rank}", pickle.dumps(share).hex())

        self.from_rank_0(set_shares)
        return pickle.loads(bytes.fromhex(self._keys.get(f"{name} {self._rank}").decode()))

    def all_gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, by rank. All ranks call it; errors as `from_rank_0`."""
        texts = self.gather(text)

        def all_texts() -> list[str]:
            assert None not in texts, "a rank that had joined is late"
            return cast(list[str], texts)

        return self.from_rank_0(all_texts)

    def gather(self, text: str) -> list[str | None]:
        """Return the texts of all ranks on rank 0, None for a rank that is late. All ranks call it.

        Other ranks get an empty list and do not wait.
        """
        self._round += 1
        keys = [f"text {self._round} {rank}" for rank in range(self._size)]
        self._keys.set(keys[self._rank], text)
        if self._rank != 0:
            return []
        with suppress(RuntimeError):
            self._wait(keys, self._timeout)
        return [self._keys.get(key).decode() if self._keys.check([key]) else None for key in keys]

    def from_rank_0[T](self, compute: Callable[[], T]) -> T:
        """Return on all ranks what ``compute`` returns on rank 0, which alone calls it.

        All ranks call this. If ``compute`` raises, rank 0 prints the error and all ranks raise
        Refused with its exit code.
        """
        self._round += 1
        key = f"from rank 0, {self._round}"
        if self._rank == 0:
            value, exit_code = None, 0
            try:
                value = compute()
            except InputError as error:
                print(error, file=sys.stderr, flush=True)
                exit_code = error.exit_code
            except Exception:  # unexpected, but the others must not wait in vain
                traceback.print_exc()
                exit_code = 1
            self._keys.set(key, pickle.dumps((value, exit_code)).hex())
        else:
            self._wait([key], 2 * self._timeout)  # rank 0 may itself wait for others
        value, exit_code = pickle.loads(bytes.fromhex(self._keys.get(key).decode()))
        if exit_code:
            self.leave()
            raise Refused(exit_code)
        return value

    def report_failure(self, error: BaseException, log_dir: Path) -> None:
        """Write the ``error`` that ends this rank to a file; one rank prints each message."""
        text = summary = "".join(traceback.format_exception_only(error))
        if not isinstance(error, InputError):
            text = "".join(traceback.format_exception(error))
        with suppress(OSError):  # the folder is gone or its disk full, perhaps the very error
            (log_dir / f"error_rank_{self._rank}.txt").write_text(text, encoding="utf-8")
        counts = list[int]()

        def count() -> None:
            with suppress(RuntimeError):  # the rank with the store is gone
                counts.append(self._keys.add(hashlib.sha256(summary.encode()).hexdigest(), 1))

        counting = threading.Thread(target=count, daemon=True)
        counting.start()
        counting.join(_ANSWER_SECONDS)  # with the network cut, an error may take long to come
        if counts in ([], [1]):
            print(f"{text}rank {self._rank} failed", file=sys.stderr, flush=True)
        if counts:
            self.leave()

    def leave(self) -> None:
        """Tell rank 0 that this rank no longer needs the store; rank 0 waits for all others."""
        if self._has_left:
            return
        self._has_left = True
        with suppress(RuntimeError):  # the rank with the store is gone
            num_left = self._keys.add("left", 1)
            deadline = time.monotonic() + _LEAVE_SECONDS
            while self._hosts_store and num_left < self._size and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                num_left = self._keys.add("left", 0)

    def _check_problems(self, texts: Sequence[str | None]) -> None:
        ranks_of = dict[tuple[int, str], list[int]]()
        absent = StartError.exit_code, f"did not join within {self._timeout.total_seconds():g} s"
        for rank, message in enumerate(texts):
            exit_code, text = absent if message is None else json.loads(message)
            ranks_of.setdefault((exit_code, text), []).append(rank)
        ranks_of.pop((0, ""), None)
        lines = []
        for (_, text), ranks in ranks_of.items():
            prefix = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "
            lines.append(text if len(ranks) == self._size else prefix + text)
        if lines:
            is_input = any(exit_code == InputError.exit_code for exit_code, _ in ranks_of)
            raise (InputError if is_input else StartError)("\n".join(lines))

    def _wait(self, keys: list[str], patience: timedelta) -> None:
        """Wait for all keys. Raises RuntimeError if no rank reports progress in ``patience``."""
        last_progress, deadline = 0, time.monotonic() + patience.total_seconds()
        while True:
            seconds = min(max(0.01, deadline - time.monotonic()), _PROGRESS_SECONDS)
            try:
                self._keys.wait(keys, timedelta(seconds=seconds))
                return
            except RuntimeError:
                progress = self._keys.add("progress", 0)
                if progress != last_progress:
                    last_progress = progress
                    deadline = time.monotonic() + patience.total_seconds()
                elif time.monotonic() >= deadline:
                    raise


# ------------------------------------------------------------------------- the store


def _open_store(environment: RankEnv, timeout: timedelta) -> Store:
    """Connect this rank to the store of the job. Raises StartError where it finds none."""
    rank, url = environment.rank, urlsplit(environment.rendezvous)
    if url.scheme == "file":
        store = FileStore(url.path, environment.world_size)
        store.set_timeout(timeout)
        return store
    host, port = url.hostname or "", url.port or 0
    if url.scheme == "env":
        host, digits = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
        if not digits.isdecimal():
            raise InputError(f"MASTER_PORT: needs a port of the host of rank 0; got {digits!r}")
        port = int(digits)
    is_host = rank == 0 and environment.hosts_store
    connect = partial(TCPStore, host, port, None, is_host, timeout, wait_for_workers=False)
    try:
        store = connect()
        return store if environment.hosts_store else _store_of_attempt(store, connect(), rank)
    except RuntimeError as error:
        action = "opened no store" if is_host else "did not find the store of rank 0"
        reason = str(error).splitlines()[0]
        raise StartError(
            f"rank {rank} {action} at {host}:{port}: {reason}; see whether rank 0 runs there and "
            "the port is free, else set MASTER_ADDR and MASTER_PORT"
        ) from error


def _store_of_attempt(store: Store, second: Store, rank: int) -> Store:
    """Return a part of torchrun's store, which outlives a failed attempt, for this attempt alone.

    Every rank calls it. second: another connection, because one that waits serves nobody else.
    Machines count restarts separately, so each rank asks rank 0 for the name of the attempt, under
    a key that nobody has answered before.
    """
    keys, name = PrefixStore("mimo attempts", second), uuid.uuid4().hex
    if rank == 0:
        args = (keys, name)
        threading.Thread(target=_name_attempt, args=args, name="rendezvous", daemon=True).start()
        return PrefixStore(name, store)
    keys.set(f"request {keys.add('requests', 1)}", name)
    return PrefixStore(keys.get(f"answer to {name}").decode(), store)


def _name_attempt(keys: Store, name: str) -> None:
    """Answer every rank that asks for the attempt's name, for as long as this process runs."""
    num_seen, waiting = 0, set[int]()
    with suppress(RuntimeError):  # the store is gone
        while True:
            num_requests = keys.add("requests", 0)
            waiting.update(range(num_seen + 1, num_requests + 1))
            num_seen = num_requests
            for number in sorted(waiting):
                if keys.check([f"request {number}"]):
                    keys.set(f"answer to {keys.get(f'request {number}').decode()}", name)
                    waiting.discard(number)
            time.sleep(_POLL_SECONDS)
