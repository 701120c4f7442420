"""Waits for messages, and names the ranks whose messages do not come in time.

On a CPU `wait_for` blocks the host. On a GPU `work.wait()` only queues a wait on the device: the
host goes on and blocks later, in a call that knows nothing of the bridge, until the backend's
watchdog aborts. There a `TransferWatch` looks at every transfer from a thread of its own and raises
the same BridgeError when time is up. Whoever runs the ranks must end a rank when one of its threads
fails.
"""

import datetime
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

logger = logging.getLogger(__name__)

# Once a transfer has failed: enough to see whether another message is there already.
_GLANCE_SECONDS = 0.001
_POLL_SECONDS = 1.0
_POLLS_PER_TIMEOUT = 10  # at least; short timeouts are polled more often


class BridgeError(RuntimeError):
    """A transfer over a bridge failed.

    microbatch: None if it concerns several. waits_for: ranks whose messages did not come or were
    not taken; an error on such a rank is nearer to the cause. sample: the sample's number in the
    microbatch, if the error is about one.
    """

    def __init__(
        self,
        message: str,
        microbatch: int | None = None,
        waits_for: Sequence[int] = (),
        sample: int | None = None,
    ) -> None:
        super().__init__(message)
        self.microbatch = microbatch
        self.waits_for = tuple(waits_for)
        self.sample = sample


class UnexpectedRows(BridgeError, ValueError):
    """An encoder produced other rows than the plan moves."""


@dataclass(frozen=True)
class Message:
    """One message under way: ``rows`` that ``peer`` is to send (``incoming``) or to take."""

    work: dist.Work
    peer: int
    rows: int
    incoming: bool

    def __str__(self) -> str:
        return f"rank {self.peer} to {'send' if self.incoming else 'take'} {self.rows} rows"


def too_late(
    what: str, microbatch: int | None, seconds: float, missing: Sequence[Message]
) -> BridgeError:
    """The error of a transfer ``what`` whose ``missing`` messages took more than ``seconds``."""
    verb = "did not arrive" if missing[0].incoming else "were not taken"
    waiting = ", ".join(map(str, missing))
    return BridgeError(
        f"{what} {verb} within bridge.timeout_seconds {seconds:g}; still waiting for {waiting}",
        microbatch,
        sorted({message.peer for message in missing}),
    )


def wait_for(
    messages: Sequence[Message], what: str, microbatch: int | None, timeout_seconds: float | None
) -> None:
    """Wait for all messages, ``timeout_seconds`` at most; None leaves that to the backend.

    Raises BridgeError that starts with ``what`` and names every message still missing.
    """
    started = time.monotonic()
    late: list[Message] = []
    lost: list[Message] = []
    cause: RuntimeError | None = None
    for message in messages:
        try:
            if cause is not None:
                message.work.wait(datetime.timedelta(seconds=_GLANCE_SECONDS))
            elif timeout_seconds is None:
                message.work.wait()
            else:
                left = timeout_seconds - (time.monotonic() - started)
                message.work.wait(datetime.timedelta(seconds=max(left, _GLANCE_SECONDS)))
        except RuntimeError as error:
            # Gloo closes all connections of a group whose wait timed out.
            timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            (late if timed_out or (late and not lost) else lost).append(message)
            cause = cause or error
    if cause is None:
        return
    if not lost:
        seconds = time.monotonic() - started if timeout_seconds is None else timeout_seconds
        raise too_late(what, microbatch, seconds, late) from cause
    peers = ", ".join(map(str, lost))
    also = f"; still waiting for {', '.join(map(str, late))}" if late else ""
    # Gloo's text: the place in its source, what happened, advice.
    reason = re.sub(r"^\[\S+\] ", "", str(cause)).split(". ")[0]
    text = f"{what} failed while waiting for {peers}{also}: {reason}"
    raise BridgeError(text, microbatch, sorted({message.peer for message in lost})) from cause


# ---------------------------------------------------------------------------- on a device


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
        """The edge of the transfer; transfers over one edge take place in order of their starts."""
        return self.what.partition(":")[0]

    def is_wanted(self) -> None:
        """Start the timeout anew: somebody now waits for the transfer."""
        self.since = time.monotonic()


class TransferWatch:
    """Watches the transfers of one process, in a daemon thread that starts with the first.

    tell_where: adds a note to an error, such as the training step.
    """

    def __init__(self) -> None:
        self.tell_where: Callable[[BridgeError], None] | None = None
        self._watched: list[Watched] = []  # in the order in which they were started
        self._new: queue.SimpleQueue[Watched] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(
        self, messages: Sequence[Message], what: str, microbatch: int | None, timeout_seconds: float
    ) -> Watched:
        """Watch messages that have just been started; ``what`` begins with their edge.

        The timeout starts now, anew with `is_wanted`, and anew when the transfer before on the same
        edge is done. The device's earlier work counts, so it must be longer than a step.
        """
        watched = Watched(messages, what, microbatch, timeout_seconds, time.monotonic())
        self._new.put(watched)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bridge watch", daemon=True)
            self._thread.start()
        return watched

    def oldest(self) -> tuple[str, tuple[int, ...]] | None:
        """Return the oldest unfinished transfer and the ranks that it waits for."""
        for transfer in list(self._watched):
            if missing := {m.peer for m in transfer.messages if not m.work.is_completed()}:
                return transfer.what, tuple(sorted(missing))
        return None

    def _run(self) -> None:
        """Poll until a transfer is too late, then raise BridgeError; block while there is none."""
        while True:
            watched = self._watched
            if not watched:
                watched.append(self._new.get())
            while not self._new.empty():
                watched.append(self._new.get())
            now = time.monotonic()
            unfinished, progressing_edges = [], set()
            for transfer in watched:
                missing = [m for m in transfer.messages if not m.work.is_completed()]
                if not missing:
                    progressing_edges.add(transfer.edge)
                    continue
                if transfer.edge in progressing_edges:
                    transfer.since = now
                seconds = transfer.timeout_seconds
                if now > transfer.since + seconds:
                    error = too_late(transfer.what, transfer.microbatch, seconds, missing)
                    if self.tell_where is not None:
                        self.tell_where(error)
                    notes = getattr(error, "__notes__", [])
                    logger.error("%s", "\n".join([str(error), *notes]))
                    raise error
                unfinished.append(transfer)
            self._watched = unfinished
            shortest = min((transfer.timeout_seconds for transfer in unfinished), default=0.0)
            time.sleep(min(_POLL_SECONDS, shortest / _POLLS_PER_TIMEOUT))
