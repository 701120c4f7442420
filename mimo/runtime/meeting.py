"""Where the ranks of torchrun or srun meet: one store, one verdict on the input, one voice.

`mimo.runtime.door` leads to the store. That asks nobody who he is, so what is unpickled from it is
sealed with the job's secret.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from mimo.errors import InputError, StartError
from mimo.runtime.door import find_store, open_store, proof, secret_of
from mimo.runtime.ranks import RankEnv

_ANSWER_SECONDS = 2.0  # within which the store answers, unless the network is cut
_POLL_SECONDS = 0.2
_PROGRESS_SECONDS = 5.0  # between two words of progress
_LEAVE_SECONDS = 3.0  # how long rank 0, which hosts the store, waits for the others


class Refused(Exception):
    """The job cannot begin. Rank 0 has said why; all that is left is to end with ``exit_code``."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Meeting:
    """Brings the ranks of a job together before and after training. All ranks build one, together.

    store: with which torch.distributed joins the world.
    Raises StartError if the ranks do not find each other within ``timeout_seconds``.
    """

    def __init__(self, environment: RankEnv, timeout_seconds: float) -> None:
        self._rank, self._size = environment.rank, environment.world_size
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        address = _address(environment)
        self._hosts_store = address is not None and self._rank == 0
        self.store: Store = _open_store(environment, address, self._timeout)
        self._words = PrefixStore("mimo", self.store)
        self._secret = secret_of(self._size)
        self._rounds, self._has_left = 0, False
        self._next_word = 0.0  # of progress, on the monotonic clock

    def agree(self, problem: InputError | None) -> None:
        """Collect every rank's ``problem``; each rank calls it, with None if it has none.

        Rank 0 prints each different problem once. Raises Refused on all ranks if there is any; its
        exit code is that of the input's problems, if there are any beside those of the start.
        """
        name = f"problem {self._rounds}"
        said = (0, "") if problem is None else (problem.exit_code, str(problem))
        self._words.set(f"{name} {self._rank}", json.dumps(said))
        self.from_rank_0(lambda: self._check_problems(name))

    def get_on(self) -> None:
        """Say that this rank gets on with its work, so that the others wait for it."""
        if time.monotonic() >= self._next_word:
            self._words.add("progress", 1)
            self._next_word = time.monotonic() + _PROGRESS_SECONDS

    def deal[T](self, do: Callable[[], Sequence[T]]) -> T:
        """This rank's of what ``do`` returns on rank 0: one for each rank. As `from_rank_0`."""
        name = f"share {self._rounds}"

        def shares() -> None:
            for rank, share in enumerate(do()):
                self._words.set(f"{name} {rank}", self._sealed(share))

        self.from_rank_0(shares)
        return self._opened(self._words.get(f"{name} {self._rank}").decode())

    def collect(self, words: str) -> list[str]:
        """The words of every rank, by rank; each calls it. As `from_rank_0`."""
        keys = [f"words {self._rounds} {rank}" for rank in range(self._size)]
        self._words.set(keys[self._rank], words)

        def all_words() -> list[str]:
            self._wait(keys, self._timeout)
            return [self._words.get(key).decode() for key in keys]

        return self.from_rank_0(all_words)

    def gather(self, words: str) -> list[str | None]:
        """On rank 0 the words of every rank, None of one that has not come in time; each calls it.

        Other ranks get nothing, and do not wait.
        """
        self._rounds += 1
        name = f"gathered {self._rounds}"
        self._words.set(f"{name} {self._rank}", words)
        return self._found(name) if self._rank == 0 else []

    def _found(self, name: str) -> list[str | None]:
        """What each rank has set under the name; None of those that have not within the time."""
        keys, found = [f"{name} {rank}" for rank in range(self._size)], list[str | None]()
        with suppress(RuntimeError):
            self._wait(keys, self._timeout)
        for key in keys:
            found.append(None)
            with suppress(RuntimeError):  # the store is gone with the rank that held it
                if self._words.check([key]):
                    found[-1] = self._words.get(key).decode()
        return found

    def _check_problems(self, name: str) -> None:
        """Raise one error with the problems of all ranks, and the ranks that did not join."""
        ranks_of = dict[tuple[int, str], list[int]]()
        absent = StartError.exit_code, f"did not join within {self._timeout.total_seconds():g} s"
        for rank, said in enumerate(self._found(name)):
            exit_code, text = absent if said is None else json.loads(said)
            ranks_of.setdefault((exit_code, text), []).append(rank)
        ranks_of.pop((0, ""), None)
        lines = []
        for (_, text), ranks in ranks_of.items():
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "
            lines.append(text if len(ranks) == self._size else who + text)
        if lines:
            is_input = any(exit_code == InputError.exit_code for exit_code, _ in ranks_of)
            raise (InputError if is_input else StartError)("\n".join(lines))

    def from_rank_0[T](self, do: Callable[[], T]) -> T:
        """What ``do`` returns on rank 0, the only rank that calls it; every rank calls this.

        If ``do`` raises, rank 0 prints the error and all ranks raise Refused with its exit code.
        """
        self._rounds += 1
        key = f"from rank 0, {self._rounds}"
        if self._rank == 0:
            value, exit_code = None, 0
            try:
                value = do()
            except InputError as error:
                print(error, file=sys.stderr, flush=True)
                exit_code = error.exit_code
            except Exception:  # unexpected, but the others must not wait in vain
                traceback.print_exc()
                exit_code = 1
            self._words.set(key, self._sealed((value, exit_code)))
        else:
            self._wait([key], 2 * self._timeout)  # rank 0 may wait for others
        value, exit_code = self._opened(self._words.get(key).decode())
        if exit_code:
            self.leave()
            raise Refused(exit_code)
        return value

    def _sealed(self, value: Any) -> str:
        """What only a rank of this job could have written: a store lets anybody in."""
        text = pickle.dumps(value).hex()
        return f"{proof(self._secret, text)} {text}"

    def _opened(self, sealed: str) -> Any:
        seal, _, text = sealed.partition(" ")
        if not hmac.compare_digest(seal, proof(self._secret, text)):
            raise InputError("words in the ranks' store are not of this job (MIMO_JOB_SECRET)")
        return pickle.loads(bytes.fromhex(text))

    def _wait(self, keys: list[str], patience: datetime.timedelta) -> None:
        """Raises RuntimeError after so long without all keys or progress of any rank."""
        seen, deadline = 0, time.monotonic() + patience.total_seconds()
        while True:
            left = min(max(0.01, deadline - time.monotonic()), _PROGRESS_SECONDS)
            try:
                self._words.wait(keys, datetime.timedelta(seconds=left))
                return
            except RuntimeError:
                progress = self._words.add("progress", 0)
                if progress != seen:
                    seen, deadline = progress, time.monotonic() + patience.total_seconds()
                elif time.monotonic() >= deadline:
                    raise

    def last_words(self, error: BaseException, log_dir: Path) -> None:
        """Report the ``error`` that ends this rank: to a file, and to stderr if it is the first.

        If several ranks fail with the same message, one prints it.
        """
        text = summary = "".join(traceback.format_exception_only(error))
        if not isinstance(error, InputError):
            text = "".join(traceback.format_exception(error))
        with suppress(OSError):  # the folder is gone or its disk full, perhaps the very error
            (log_dir / f"error_rank_{self._rank}.txt").write_text(text, encoding="utf-8")
        times = list[int]()

        def count() -> None:
            with suppress(RuntimeError):  # the rank with the store is gone
                times.append(self._words.add(hashlib.sha256(summary.encode()).hexdigest(), 1))

        asking = threading.Thread(target=count, daemon=True)
        asking.start()
        asking.join(_ANSWER_SECONDS)  # the network may be cut, and then no error comes for long
        if times in ([], [1]):
            print(f"{text}rank {self._rank} failed", file=sys.stderr, flush=True)
        if times:
            self.leave()

    def leave(self) -> None:
        """Say, once, that this rank needs the store no more; rank 0 waits until all others do."""
        if self._has_left:
            return
        self._has_left = True
        with suppress(RuntimeError):  # the rank with the store is gone
            here = self._words.add("left", 1)
            deadline = time.monotonic() + _LEAVE_SECONDS
            while self._hosts_store and here < self._size and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                here = self._words.add("left", 0)


# ------------------------------------------------------------------------- the store


def _open_store(
    environment: RankEnv, address: tuple[str, int] | None, timeout: datetime.timedelta
) -> Store:
    rank, size = environment.rank, environment.world_size
    if address is None:
        store, _, _ = next(rendezvous(environment.rendezvous, rank, size, timeout=timeout))
        store.set_timeout(timeout)
        if environment.rendezvous != "env://":
            return store
        beside, _, _ = next(rendezvous(environment.rendezvous, rank, size, timeout=timeout))
        return _part_of_attempt(store, beside, rank)
    host, port = address
    if rank == 0:
        return open_store(host, port, secret_of(size), timeout)
    store_port = find_store(host, port, secret_of(size), timeout.total_seconds(), rank)
    return TCPStore(host, store_port, None, False, timeout, wait_for_workers=False)


def _part_of_attempt(store: Store, beside: Store, rank: int) -> Store:
    """A part of torchrun's store for this attempt alone; every rank calls it.

    beside: the same by another connection, as one that waits serves nobody else.
    The store outlives the ranks of a failed attempt, with what they have written, and how often
    they were started again is counted on each machine for itself. So each rank asks for the
    attempt's name under a name of its own, which nobody has answered before.
    """
    words, own = PrefixStore("mimo attempts", beside), uuid.uuid4().hex
    if rank == 0:
        threading.Thread(target=_name_attempt, args=(words, own), name="door", daemon=True).start()
        return PrefixStore(own, store)
    words.set(f"asked {words.add('asked', 1)}", own)
    try:
        return PrefixStore(words.get(f"answer to {own}").decode(), store)
    except RuntimeError as error:
        raise StartError(f"rank {rank} did not find rank 0: {error}") from error


def _name_attempt(words: Store, name: str) -> None:
    """Answer every rank that asks for the attempt, for as long as this process runs."""
    num_seen, waiting = 0, set[int]()
    with suppress(RuntimeError):  # the store is gone
        while True:
            num_asked = words.add("asked", 0)
            waiting.update(range(num_seen + 1, num_asked + 1))
            num_seen = num_asked
            for number in sorted(waiting):
                if words.check([f"asked {number}"]):
                    words.set(f"answer to {words.get(f'asked {number}').decode()}", name)
                    waiting.discard(number)
            time.sleep(_POLL_SECONDS)


def _address(environment: RankEnv) -> tuple[str, int] | None:
    """Host and first port of the door; None if the ranks have a store without one."""
    if environment.rendezvous == "env://":
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return None  # torchrun's, already open
        port = os.environ.get("MASTER_PORT", "")
        if not port.isdecimal():
            raise InputError(f"MASTER_PORT: needs a port of the host of rank 0; got {port!r}")
        return os.environ["MASTER_ADDR"], int(port)
    url = urlsplit(environment.rendezvous)
    return (url.hostname or "", url.port or 0) if url.scheme == "tcp" else None
