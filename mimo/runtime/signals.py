"""Signals that stop a job early, and the agreement of all ranks on it.

The first SIGTERM, SIGUSR1 or Ctrl-C requests a stop: finish the step, save, leave. A second one
ends at once. SLURM sends one of the first two before a job's time is up.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAVE_FAILED = "a checkpoint that was not written"
_TIME_IS_UP = "train.max_minutes"
_REASONS = (*(signum.name for signum in STOP_SIGNALS), _TIME_IS_UP, SAVE_FAILED)

_requests: list[str] = []  # the signals that have reached this process


def stop_requested() -> tuple[str, ...]:
    """Return the names of the signals that have asked this rank to stop, oldest first."""
    return tuple(_requests)


def request_stop(name: str) -> None:
    """Note that the signal of this name asks this rank to stop; repetitions count once."""
    if name not in _requests:
        _requests.append(name)


def request_stop_on_signals() -> None:
    """Let signals request a stop of this rank, whose launcher decides what a second signal does."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda number, _: request_stop(signal.Signals(number).name))
        signal.siginterrupt(signum, False)  # libraries may not expect to be interrupted


def exit_on_second_signal() -> None:
    """Let a signal request a stop of this rank of torchrun or srun; the second ends it.

    SIGINT ends it the first time: torchrun sends it again to ranks that Ctrl-C has reached. A
    thread handles them, because the main thread may wait inside a library.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda *_: None)
        signal.siginterrupt(signum, False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)

    def handle() -> None:
        while True:
            signum = signal.Signals(reader.recv(1)[0])
            if signum in STOP_SIGNALS and signum != signal.SIGINT and not _requests:
                request_stop(signum.name)
            elif signum in STOP_SIGNALS:
                print(f"ended by {signum.name}", file=sys.stderr, flush=True)
                os._exit(128 + signum)

    threading.Thread(target=handle, name="signals", daemon=True).start()


class Signalled(BaseException):
    """This process must end at once, because of the signal whose number this holds."""


@contextmanager
def signal_handlers() -> Iterator[list[str]]:
    """Handle signals to the launcher inside; yields the names of signals that request a stop.

    A second signal, and SIGHUP, unwind the stack by Signalled, so that ranks and files are cleared.
    """
    requests: list[str] = []

    def handle(signum: int, frame: object) -> None:
        if requests or signum == signal.SIGHUP:
            raise Signalled(signum)
        requests.append(signal.Signals(signum).name)
        os.write(2, f"{requests[0]}: finishing the step; a second signal ends at once\n".encode())

    before = {signum: signal.signal(signum, handle) for signum in (*STOP_SIGNALS, signal.SIGHUP)}
    try:
        yield requests
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class EarlyStop:
    """Why a run stops after the current step, if it does; the same on all ranks.

    A signal may reach one rank only, so each rank passes the sums of all ranks' `flags` to `agree`.
    deadline: on the monotonic clock of the one rank that has it. local_reasons: further ones.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self.local_reasons: tuple[str, ...] = ()
        self.reasons: tuple[str, ...] = ()

    def flags(self) -> list[float]:
        """Return 1.0 for each reason that this rank has, else 0.0."""
        reasons = (*stop_requested(), *self.local_reasons)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            reasons = (*reasons, _TIME_IS_UP)
        return [float(reason in reasons) for reason in _REASONS]

    def agree(self, sums: Sequence[float]) -> None:
        """Add the reasons whose `flags`, summed over all ranks, are positive; earlier ones stay."""
        new = [reason for reason, count in zip(_REASONS, sums, strict=True) if count > 0]
        self.reasons = tuple(dict.fromkeys((*self.reasons, *new)))
