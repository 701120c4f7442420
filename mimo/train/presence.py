"""Which ranks still answer and where each one is, so that a lost rank can be named.

In each rank a thread keeps a small file in the run folder up to date. It still does so while the
rank waits for others, but not once the rank is stopped or has ended. When a collective fails, the
files say who failed, who no longer answers, or who lags behind. Ages are differences between file
times, so the hosts' clocks do not matter.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import override

from bridge import BridgeError
from mimo.launch.processes import is_consequence
from mimo.launch.signals import asked
from mimo.layout.grids import Layout
from mimo.train.observer import ACTIVITIES, StepObserver

# A rank is lost once it has missed this many writes; a busy machine may hold up a thread for
# seconds.
_MISSED = 4
_LOST_SECONDS = 5.0  # at least
_BEATS_PER_TIMEOUT = 20
_BEAT_SECONDS = (0.5, 10.0)  # at least, at most


RANKS = "ranks"
"""The folder of those files, in the run folder."""


class RankLost(RuntimeError):
    """This rank cannot go on because of other ranks; ``waits_for`` holds their numbers."""

    def __init__(self, message: str, waits_for: Sequence[int]) -> None:
        super().__init__(message)
        self.waits_for = tuple(waits_for)


@dataclass(frozen=True)
class _Rank:
    """What the file of ``rank`` says, written ``age_seconds`` ago."""

    rank: int
    who: str
    step: int
    activity: str
    failure: str
    age_seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.who})"

    @property
    def where(self) -> str:
        return f"at step {self.step}, in '{self.activity}'"

    @property
    def progress(self) -> tuple[int, int]:
        return self.step, ACTIVITIES.index(self.activity)


class Presence(StepObserver):
    """Writes the file of this ``rank`` in ``folder``, and reads those of the others.

    timeout_seconds: after which transfers fail. How often ranks write, and after what silence one
    is lost, follow from it.
    """

    def __init__(self, folder: Path, layout: Layout, rank: int, timeout_seconds: float) -> None:
        self._folder, self._rank, self._size = folder, rank, layout.world_size
        self._who = " and ".join(
            f"{name}, lane {grid.coords(rank).dp}"
            for name, grid in layout.grids.items()
            if rank in grid.ranks
        )
        least, most = _BEAT_SECONDS
        self._beat_seconds = min(most, max(least, timeout_seconds / _BEATS_PER_TIMEOUT))
        self._lost_seconds = max(_LOST_SECONDS, _MISSED * self._beat_seconds)
        self._place = (0, ACTIVITIES[0])
        self._failure = ""
        self._writing = threading.Lock()
        self._left = threading.Event()

    @override
    def at(self, step: int, activity: str) -> None:
        """Set where this rank is from now on; costs nothing, because the thread writes it."""
        assert activity in ACTIVITIES, f"{activity!r} is no activity"
        self._place = (step, activity)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Be present inside; an error caused by another rank names that rank.

        Raises RankLost in place of a backend's error if there is a rank to name.
        """
        self._folder.mkdir(exist_ok=True)
        self._write()
        threading.Thread(target=self._keep_writing, name="presence", daemon=True).start()
        try:
            yield
        except BridgeError as error:
            # The error names a peer, which may itself be waiting for a lost rank. Do not delay:
            # the next thing the peers hear of is that this rank ended.
            if lost := [one for one in self._lost() if one.rank not in error.waits_for]:
                error.add_note(_told(lost))
            self._fail(error)
            raise
        except Exception as error:
            if not is_consequence(error):
                self._fail(error)
            elif found := self._find():
                raise RankLost(*found) from error
            raise
        finally:
            self._left.set()
            if not self._failure:
                with self._writing, suppress(OSError):  # read-only, or others are still there
                    self._file(self._rank).unlink(missing_ok=True)
                    self._folder.rmdir()

    def _fail(self, error: Exception) -> None:
        """Record in this rank's file that it failed."""
        self._failure = f"{type(error).__name__}: {error}"
        self._write()

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.json"

    def _keep_writing(self) -> None:
        while not self._left.wait(self._beat_seconds):
            self._write()

    def _write(self) -> None:
        step, activity = self._place
        state = {"who": self._who, "step": step, "activity": activity, "failure": self._failure}
        partial = self._folder / f".rank_{self._rank}"
        with self._writing:
            if self._left.is_set() and not self._failure:
                return
            try:
                partial.write_text(json.dumps(state))
                os.replace(partial, self._file(self._rank))
            except OSError:  # a full disk is reported by writes that matter more
                return

    def _find(self) -> tuple[str, list[int]] | None:
        """Who is to blame, in words, and their ranks; None if none is further back."""
        deadline = time.monotonic() + self._lost_seconds + self._beat_seconds
        while True:
            if failed := [one for one in self._others() if one.failure]:
                told = "; ".join(f"{one} failed {one.where}: {one.failure}" for one in failed)
                return told, [one.rank for one in failed]
            if lost := self._lost():
                return _told(lost), [one.rank for one in lost]
            if time.monotonic() > deadline or asked():  # torchrun may know already
                break
            time.sleep(self._beat_seconds / 2)
        step, activity = self._place
        behind = [
            one for one in self._others() if one.progress < (step, ACTIVITIES.index(activity))
        ]
        if not behind:
            return None
        told = "; ".join(f"{one} is still {one.where}" for one in behind)
        return f"{told}; all ranks answer", [one.rank for one in behind]

    def _lost(self) -> list[_Rank]:
        return [one for one in self._others() if one.age_seconds > self._lost_seconds]

    def _others(self) -> list[_Rank]:
        """All other ranks that have a file. A rank that ended well has none."""
        self._write()
        try:
            now = self._file(self._rank).stat().st_mtime
        except OSError:  # a full disk, or the folder is gone: then nothing can be said of others
            return []
        found = []
        for rank in range(self._size):
            if rank == self._rank:
                continue
            try:
                with self._file(rank).open() as file:
                    age = now - os.fstat(file.fileno()).st_mtime
                    found.append(_Rank(rank, age_seconds=age, **json.load(file)))
            except (OSError, ValueError):
                continue
        return found


def _told(lost: Sequence[_Rank]) -> str:
    told = "; ".join(f"{one} does not answer, last seen {one.where}" for one in lost)
    return f"{told}; stopped or killed, or its host is down"
