"""Which ranks still answer and where each one is, so that a lost or hanging rank can be named.

In each rank a thread keeps a small file in the run folder up to date. It still does so while the
rank waits for others, but not once the rank is stopped or has ended. When a collective fails, the
files say who failed or no longer answers. When a rank does not get on for too long, all ranks write
where they are and their stacks, one of them writes who waits for whom, and all end. Ages are
differences between file times, so the hosts' clocks do not matter.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, override

import psutil

from bridge import BridgeError
from mimo.engines.contract import Module
from mimo.errors import InputError
from mimo.model.memory import memory_in_words
from mimo.parallel.grids import Layout
from mimo.runtime.processes import is_consequence
from mimo.runtime.signals import asked
from mimo.train.hang import Hang, State, explain
from mimo.train.incidents import Kind, record
from mimo.train.observer import ACTIVITIES, StepObserver
from mimo.train.run_files import CRASH, HANG, SUMMARY, read_states
from mimo.train.waits import Waits, place_of, waits_of

if TYPE_CHECKING:
    from mimo.model.modules import MimoModel

COLLECTIVE_PATIENCE = 1.5
"""Of `bridge.timeout_seconds`: transfers say what is missing, so they time out before the rest."""

# A rank is lost once it has missed this many writes; a busy machine may hold up a thread for
# seconds.
_MISSED = 4
_LOST_SECONDS = 5.0  # at least
_BEATS_PER_TIMEOUT = 20
_BEAT_SECONDS = (0.5, 5.0)  # at least, at most
# Of the time that waiting may take: the explanation has to come before the error of the backend.
_PATIENCE = 0.8
_TELL_SECONDS = 2.0  # that all ranks get to tell where they are, besides a beat
_LOOK_SECONDS = 0.1
_END_SECONDS = 4.0  # that a rank gets to end once all is told
_OUT_OF_MEMORY = re.compile(r"MemoryError|out of memory|allocate memory|ALLOC_FAILED")
_STUCK_SECONDS = 30.0  # beyond the timeout, that an interpreter without a running thread gets


class RankLost(RuntimeError):
    """This rank cannot go on because of other ranks; ``waits_for`` holds their numbers."""

    def __init__(self, message: str, waits_for: Sequence[int]) -> None:
        super().__init__(message)
        self.waits_for = tuple(waits_for)


class Presence(StepObserver):
    """Writes the file of this ``rank`` in ``folder``, and reads those of the others.

    timeout_seconds: after which transfers fail. How often ranks write, and after what silence one
    is lost, follow from it.
    step_timeout_seconds: after which a rank that does not get on, whatever it does, ends the run.
    None: only one that waits for others, shortly before that fails.
    model: says what its modules do; set it once it is built.
    """

    model: MimoModel | None = None

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        rank: int,
        timeout_seconds: float,
        step_timeout_seconds: float | None = None,
    ) -> None:
        self._folder, self._rank, self._size = folder, rank, layout.world_size
        self._hang_folder = folder.with_name(HANG)
        who = " and ".join(
            f"{name}, lane {grid.coords(rank).dp}"
            for name, grid in layout.grids.items()
            if rank in grid.ranks
        )
        self._place = (0, ACTIVITIES[0])
        self._state = State(rank, who, socket.gethostname(), *self._place)
        self._timeout, self._step_timeout = timeout_seconds, step_timeout_seconds
        shortest = min(timeout_seconds, step_timeout_seconds or math.inf)
        least, most = _BEAT_SECONDS
        self._beat_seconds = min(most, max(least, shortest / _BEATS_PER_TIMEOUT))
        self._lost_seconds = max(_LOST_SECONDS, _MISSED * self._beat_seconds)
        self._process, self._trains = psutil.Process(), threading.get_ident()
        self._seen: tuple[object, object] = (None, None)
        self._since = time.monotonic()
        self._writing, self._memory = threading.Lock(), dict[str, dict[str, int]]()
        self._failing, self._hangs, self._left = (threading.Event() for _ in range(3))

    @override
    def at(self, step: int, activity: str) -> None:
        """Set where this rank is from now on; costs nothing, because the thread writes it."""
        assert activity in ACTIVITIES, f"{activity!r} is no activity"
        self._place = (step, activity)

    @override
    def updated(self, step: int, modules: Mapping[str, Module]) -> None:
        """Note what the modules hold now that they have all, in case this rank is killed."""
        if self.model is not None and not self._memory:
            self._memory = self.model.memory()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Be present inside; an error caused by another rank names that rank.

        Raises RankLost in place of a backend's error if there is a rank to name. In a hang the
        thread fails with Hang, and whoever runs the rank has to end it then.
        """
        self._folder.mkdir(exist_ok=True)
        self._write()
        thread = threading.Thread(target=self._keep_watch, name="presence", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            self._failing.set()
            if self._hangs.is_set():  # what fails meanwhile is no news; the process is about to end
                thread.join(_STUCK_SECONDS)
            self._failed(error)
            raise
        finally:
            self._left.set()
            thread.join(_TELL_SECONDS)  # it is at once, unless the file system hangs
            if not self._state.failure:
                with self._writing, suppress(OSError):  # read-only, or others are still there
                    self._file(self._rank).unlink(missing_ok=True)
                    self._folder.rmdir()

    def _failed(self, error: Exception) -> None:
        """Say in this rank's file and, if it is the first, in an incident that it failed.

        Raises RankLost in place of an error that another rank has caused.
        """
        if isinstance(error, BridgeError):
            # It names a peer, which may itself be waiting for a lost rank. Do not delay: the next
            # thing the peers hear of is that this rank ended.
            if lost := [one for one in self._lost() if one.rank not in error.waits_for]:
                error.add_note(_told(lost))
        elif is_consequence(error):
            if found := self._find():
                self._record("crash", found[0])
                raise RankLost(*found) from error
            return
        self._state = replace(self._state, failure=f"{type(error).__name__}: {error}")
        self._write()
        if is_consequence(error) or isinstance(error, InputError):
            return
        state, facts = self._now(), dict[str, Any]()
        told = f"{state} failed {state.where}"
        if self.model is not None:
            facts["memory"] = self.model.memory()
            if _OUT_OF_MEMORY.search(state.failure):  # after other errors it would bury them
                error.add_note(f"{told}; it holds {memory_in_words(facts['memory'])}")
        notes = getattr(error, "__notes__", [])
        self._record("crash", "; ".join([f"{told}: {state.failure}", *notes]), **facts)

    def _record(self, kind: Kind, text: str, **facts: Any) -> None:
        """Keep an incident, if it is the first since the ranks started: others follow from it."""
        with suppress(OSError):
            self._folder.with_name(CRASH).open("x").close()
            state = self._now()
            facts = {"rank": self._rank, "activity": state.activity, "doing": state.doing, **facts}
            record(self._folder.parent, kind, text, state.step, **facts)

    # ------------------------------------------------------------ the thread, beat by beat

    def _keep_watch(self) -> None:
        with self._interpreter_watched() as got_on:
            while not self._left.wait(self._beat_seconds):
                got_on()
                self._write()
                if self._is_stuck() or self._hang_folder.exists():
                    told = self._explain_hang()
                    # Ending may need others, such as the rank that holds the store.
                    faulthandler.dump_traceback_later(_END_SECONDS, exit=True)
                    raise Hang(told)

    @contextmanager
    def _interpreter_watched(self) -> Iterator[Callable[[], None]]:
        """Write the stacks and at last end this process unless what this yields is called again.

        Neither needs the interpreter, which a call that never returns may hold on to.
        """
        limit, path = self._step_timeout, self._stacks(self._rank)
        if limit is None:  # no more is known than how long waiting may take
            yield lambda: None
            return
        with path.open("w") as file:

            def got_on() -> None:
                faulthandler.dump_traceback_later(limit, file=file)
                signal.alarm(math.ceil(limit + _STUCK_SECONDS))

            got_on()
            yield got_on
            faulthandler.cancel_dump_traceback_later()
            signal.alarm(0)
        path.unlink(missing_ok=True)

    def _is_stuck(self) -> bool:
        """Whether this rank has been in one place for too long."""
        now, seen = time.monotonic(), (self._place, self.model and self.model.doing)
        # Not whether they are equal: the next batch may do just what this one did.
        if any(one is not other for one, other in zip(seen, self._seen, strict=True)):
            self._seen, self._since = seen, now
        if self._failing.is_set():
            return False
        stood, patience = now - self._since, _PATIENCE * self._timeout
        if self._step_timeout is not None:
            return stood > self._step_timeout
        if stood < patience or (waits := waits_of(self._stack())) is None:
            return False
        return stood > patience * (1.0 if waits.is_transfer else COLLECTIVE_PATIENCE)

    def _explain_hang(self) -> str:
        """Tell where this rank is, wait until all have done so, and explain it or read that.

        Returns the two most important lines.
        """
        self._hangs.set()
        stack = self._stack()
        waits = waits_of(stack) or Waits("", ())
        watch = self.model.watch if self.model is not None else None
        if waits.what and watch is not None and (oldest := watch.oldest()) is not None:
            waits = Waits(*oldest)  # the host waits for the device, and the device for this
        self._state = replace(
            self._state,
            told=True,
            waits=waits.what,
            waits_for=waits.ranks,
            place=", ".join([place_of(stack), *self._files_being_saved()]),
            seconds=time.monotonic() - self._since,
        )
        try:
            self._hang_folder.mkdir(exist_ok=True)
            with (self._hang_folder / f"rank_{self._rank}.txt").open("w") as file:
                state = self._now()
                print(f"{state}: {state.story}\n", file=file, flush=True)
                faulthandler.dump_traceback(file)
            self._write()
            text = self._summary()
        except OSError as error:
            text = f"the run hangs, and {self._hang_folder} cannot be written: {error}"
        told = "\n".join(text.splitlines()[:2])
        self._state = replace(self._state, failure=told)
        self._write()
        return told

    def _summary(self) -> str:
        """The explanation; written by one rank, whichever it is, and read by the others."""
        summary, patience = self._hang_folder / SUMMARY, self._beat_seconds + _TELL_SECONDS
        _wait_until(lambda: sum(one.told for one in self._read().values()) == self._size, patience)
        try:
            (self._hang_folder / ".writer").open("x").close()
        except FileExistsError:
            _wait_until(summary.exists, patience)
            return summary.read_text()
        states = self._read()
        explained = explain(states, self._size)
        state = max([self._now(), *states.values()], key=lambda one: one.seconds)
        key, limit = "train.step_timeout_seconds", self._step_timeout
        if limit is None:
            key, limit = "bridge.timeout_seconds", self._timeout
        text = (
            f"the run hangs: {state} has made no progress for {state.seconds:.1f} s "
            f"({key} {limit:g})\n"
            f"{explained.text}\nstacks of the ranks: {self._hang_folder}/rank_<r>.txt"
        )
        for rank in explained.ranks:
            # Of an interpreter that lets no thread run, by a timer of the operating system.
            path = self._stacks(rank)
            if path.exists() and path.stat().st_size:
                shutil.copy(path, self._hang_folder / f"rank_{rank}.txt")
        step = min((one.step for one in states.values()), default=None)
        print(text, file=sys.stderr, flush=True)
        brief = "; ".join(text.splitlines()[:2])
        record(self._folder.parent, "hang", brief, step, ranks=explained.ranks)
        partial = summary.with_name(f".{SUMMARY}")
        partial.write_text(text + "\n")
        os.replace(partial, summary)
        return text

    def _files_being_saved(self) -> list[str]:
        checkpoints = str(self._folder.with_name("checkpoints"))
        paths = [one.path for one in self._process.open_files()]
        return [f"writing {path}" for path in paths if path.startswith(checkpoints)]

    def _stack(self) -> FrameType | None:
        """That of the thread that trains."""
        return sys._current_frames().get(self._trains)

    # ------------------------------------------------------------------- files of the ranks

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.json"

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.stacks"

    def _now(self) -> State:
        (step, activity), resident = self._place, self._process.memory_info().rss
        now = replace(
            self._state,
            step=step,
            activity=activity,
            resident_bytes=resident,
            memory=self._memory,
        )
        if self.model is None or (doing := self.model.doing) is None:
            return replace(now, doing="", batch="")
        what, microbatch = doing
        now = replace(now, doing=f"{what}, microbatch {microbatch}", batch="")
        with suppress(IndexError):  # it has just begun another batch
            now = replace(now, batch=self.model.batch_in_words(microbatch))
        return now

    def _write(self) -> None:
        partial = self._folder / f".rank_{self._rank}"
        with self._writing:
            state = self._now()
            if self._left.is_set() and not state.failure:
                return
            try:
                partial.write_text(json.dumps(asdict(state)))
                os.replace(partial, self._file(self._rank))
            except OSError:  # a full disk is reported by writes that matter more
                return

    def _read(self) -> dict[int, State]:
        """All ranks that have a file. A rank that ended well has none."""
        try:
            now = self._file(self._rank).stat().st_mtime
        except OSError:  # a full disk, or the folder is gone: then nothing can be said of others
            return {}
        return read_states(self._folder.parent, now, range(self._size))

    def _find(self) -> tuple[str, list[int]] | None:
        """Who is to blame, in words, and their ranks; None if all are well."""
        deadline = time.monotonic() + self._lost_seconds + self._beat_seconds
        while True:
            others = [one for rank, one in self._read().items() if rank != self._rank]
            if failed := [one for one in others if one.failure]:
                told = "; ".join(f"{one} failed {one.where}: {one.failure}" for one in failed)
                return told, [one.rank for one in failed]
            if lost := self._lost():
                return _told(lost), [one.rank for one in lost]
            if time.monotonic() > deadline or asked():  # torchrun may know already
                return None
            time.sleep(self._beat_seconds / 2)

    def _lost(self) -> list[State]:
        self._write()
        return [one for one in self._read().values() if one.age_seconds > self._lost_seconds]


def _told(lost: Sequence[State]) -> str:
    told = "; ".join(f"{one} does not answer, last seen {one.where}" for one in lost)
    return f"{told}; stopped or killed, or its host is down"


def _wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
