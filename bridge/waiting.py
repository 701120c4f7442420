"""Waits for messages, and says who is missing when they do not come."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

# Once a transfer has failed: enough to see whether another message is there already.
_GLANCE_SECONDS = 0.001


class BridgeError(RuntimeError):
    """The two ends of a bridge cannot go on.

    microbatch: where it happened, None if it concerns several. waits_for: ranks whose messages did
    not come or were not taken; an error of their own is nearer to the cause. sample: its number in
    the microbatch, where the error is about a single one.
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
    messages: Sequence[Message],
    what: str,
    microbatch: int | None,
    timeout_seconds: float | None,
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
