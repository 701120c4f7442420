"""Which processes of a job still run: found in the process table, not by their command lines.

A rank is a fork of the fork server and looks like it; what tells a job's processes apart is a mark
in the environment that its command line is started with, which all of them inherit.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable

import psutil

_MARK = "MIMO_TEST_JOB"
_GONE_SECONDS = 5.0


class MarkedJob:
    """The processes of one command line, whoever their parent is by now.

    Start the command line with `environment`, and each process that comes of it is found.
    """

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self.environment = {**os.environ, _MARK: self._mark}

    def pids(self) -> list[int]:
        """Those that run: the launcher, its fork server and helpers, and the ranks."""
        pids = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    pids.append(process.pid)
            except psutil.Error:  # another user's, or it has just ended
                continue
        return running(pids)

    def leftovers(self) -> list[int]:
        """Those that still run after the time that any of them may take to notice the end."""
        deadline = time.monotonic() + _GONE_SECONDS
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def running(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that are processes and have not ended; a zombie has."""
    alive = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
        except psutil.NoSuchProcess:
            continue
    return alive
