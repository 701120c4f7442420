"""Signals that end a job: the first SIGTERM, SIGUSR1 or Ctrl-C asks, a second one does not wait.

SLURM sends either of the first two before a job's time is up. Which of them have asked this process
is a fact of the process, so it is kept here once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Finish the step, save, leave."""

_asked: list[str] = []


def asked() -> tuple[str, ...]:
    """The names of the signals that have asked this rank to end, oldest first."""
    return tuple(_asked)


def ask(name: str) -> None:
    """Note that this rank was asked by the signal of this name, once however often it was."""
    if name not in _asked:
        _asked.append(name)


def ask_by_signal() -> None:
    """Let signals ask this process, a rank whose starter decides what a second one does."""
    for signum in ASKING:
        signal.signal(signum, lambda number, _: ask(signal.Signals(number).name))
        signal.siginterrupt(signum, False)  # libraries may not expect to be interrupted


def end_by_signals() -> None:
    """Let signals ask this process, a rank without a starter of ours, and end it the second time.

    SIGINT ends it the first time: torchrun sends it once more to ranks that Ctrl-C has reached. A
    thread hears them: the main thread may be inside a library, waiting for other ranks.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    for signum in ASKING:
        signal.signal(signum, lambda *_: None)
        signal.siginterrupt(signum, False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)

    def hear() -> None:
        while True:
            signum = signal.Signals(reader.recv(1)[0])
            if signum in ASKING and signum != signal.SIGINT and not _asked:
                ask(signum.name)
            elif signum in ASKING:
                print(f"ended by {signum.name}", file=sys.stderr, flush=True)
                os._exit(128 + signum)

    threading.Thread(target=hear, name="signals", daemon=True).start()


class Signalled(BaseException):
    """This process was told to end at once, by the signal with the number that it holds."""


@contextmanager
def heeded() -> Iterator[list[str]]:
    """Inside, the launcher of ranks is asked to end; yields the names of signals that have asked.

    Any second signal and SIGHUP unwind the stack by Signalled, so that ranks and files are cleared.
    """
    heard: list[str] = []

    def handle(signum: int, frame: object) -> None:
        if heard or signum == signal.SIGHUP:
            raise Signalled(signum)
        heard.append(signal.Signals(signum).name)
        os.write(2, f"{heard[0]}: finishing the step; a second signal ends at once\n".encode())

    before = {signum: signal.signal(signum, handle) for signum in (*ASKING, signal.SIGHUP)}
    try:
        yield heard
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
