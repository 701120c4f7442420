"""Ends a rank whose transfers take too long, where waiting for them does not block the host.

On a GPU `work.wait()` only queues a wait on the device: the host goes on and gets stuck later, in a
call that knows nothing of the bridge, until the backend's watchdog aborts. So a separate thread
looks at what is under way, from its start, and raises the same BridgeError as a rank on the CPU
does when time is up. Whoever runs the ranks has to end a rank when one of its threads fails.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridge.waiting import BridgeError, Message, too_late

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_POLLS_PER_TIMEOUT = 10  # at least; short timeouts are looked at more often


@dataclass
class Watched:
    """Messages that must be done ``timeout_seconds`` after ``since``, on the monotonic clock."""

    messages: Sequence[Message]
    what: str
    microbatch: int | None
    timeout_seconds: float
    since: float

    @property
    def edge(self) -> str:
        """Transfers over one edge take place in the order of their starts."""
        return self.what.partition(":")[0]

    def is_wanted(self) -> None:
        """Start its time anew: waiting for it has been requested."""
        self.since = time.monotonic()


class TransferWatch:
    """Watches the transfers of one process, from a daemon thread that starts with the first.

    tell_where: adds to an error where the training loop was; None adds nothing.
    """

    def __init__(self) -> None:
        self.tell_where: Callable[[BridgeError], None] | None = None
        self._watched: list[Watched] = []  # in the order in which they were started
        self._new: queue.SimpleQueue[Watched] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(
        self,
        messages: Sequence[Message],
        what: str,
        microbatch: int | None,
        timeout_seconds: float,
    ) -> Watched:
        """Watch ``messages``, which have just been started; ``what`` begins with their edge.

        Their time begins when they are started, again when they are waited for, and again when the
        transfer before them on their edge is done. It includes what the device still has to do
        before, so it must be longer than a step.
        """
        watched = Watched(messages, what, microbatch, timeout_seconds, time.monotonic())
        self._new.put(watched)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bridge watch", daemon=True)
            self._thread.start()
        return watched

    def oldest(self) -> tuple[str, tuple[int, ...]] | None:
        """The transfer that has been under way for longest, and the ranks that it waits for."""
        for one in list(self._watched):
            if missing := {m.peer for m in one.messages if not m.work.is_completed()}:
                return one.what, tuple(sorted(missing))
        return None

    def _run(self) -> None:
        """Sleep while nothing is under way; raise BridgeError when something is too late."""
        while True:
            watched = self._watched
            if not watched:
                watched.append(self._new.get())
            while not self._new.empty():
                watched.append(self._new.get())
            now = time.monotonic()
            still, moving = [], set()
            for one in watched:
                missing = [m for m in one.messages if not m.work.is_completed()]
                if not missing:
                    moving.add(one.edge)
                    continue
                if one.edge in moving:
                    one.since = now
                if now > one.since + one.timeout_seconds:
                    raise self._error(one, missing)
                still.append(one)
            self._watched = still
            shortest = min((one.timeout_seconds for one in still), default=0.0)
            time.sleep(min(_POLL_SECONDS, shortest / _POLLS_PER_TIMEOUT))

    def _error(self, one: Watched, missing: Sequence[Message]) -> BridgeError:
        error = too_late(one.what, one.microbatch, one.timeout_seconds, missing)
        if self.tell_where is not None:
            self.tell_where(error)
        logger.error("%s", "\n".join([str(error), *getattr(error, "__notes__", [])]))
        return error
