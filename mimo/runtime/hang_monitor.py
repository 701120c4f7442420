"""Names the ranks that keep a run from going on: in each rank a thread with a heartbeat.

The thread keeps the rank's file in the run folder up to date, also while the rank waits for others.
When a collective fails, the files name the ranks that failed or are silent. When a rank makes no
progress for too long, all write where they are and their stacks, one writes a summary, and all end.
"""

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
from typing import Any

import psutil

from mimo.errors import InputError
from mimo.runtime import heartbeat
from mimo.runtime.processes import is_consequence
from mimo.runtime.ranks import Variable
from mimo.runtime.run_files import record
from mimo.runtime.signals import stop_requested

COLLECTIVE_FACTOR = 1.5
"""Factor on `bridge.timeout_seconds` for collectives, so that the bridge reports first."""

_SUMMARY = "summary.txt"
_FLIGHT_RECORDER = "TORCH_FR_DUMP_TEMP_FILE"  # the prefix of the files with its dumps
# A rank is silent once it has missed this many beats; a busy machine may delay a thread by seconds.
_MISSED_BEATS = 4
_SILENT_SECONDS = 5.0  # at least
_BEATS_PER_TIMEOUT = 20
_BEAT_SECONDS = (0.5, 5.0)  # at least, at most
# Share of the time that waiting may take: the summary has to come before the backend's error.
_PATIENCE = 0.8
_WRITE_SECONDS = 2.0  # that all ranks get to write where they are, besides a beat
_POLL_SECONDS = 0.1
_END_SECONDS = 4.0  # that a rank gets to end once the summary is there
_HANG_SECONDS = 30.0  # that the thread gets to end this process in a hang
_OUT_OF_MEMORY = re.compile(r"MemoryError|out of memory|allocate memory|ALLOC_FAILED")


def flight_recorder_variables(run_dir: Path) -> tuple[Variable, ...]:
    """Return variables with which torch records its last collectives and dumps them on a timeout.

    `torchfrtrace --prefix collectives_ <run folder>/ranks` reads the dumps.
    """
    prefix = str(run_dir.resolve() / heartbeat.RANKS / "collectives_")
    return (
        Variable("TORCH_FR_BUFFER_SIZE", "2000", ("TORCH_NCCL_TRACE_BUFFER_SIZE",)),
        Variable("TORCH_FR_DUMP_ON_TIMEOUT", "1", ("TORCH_NCCL_DUMP_ON_TIMEOUT",)),
        Variable(_FLIGHT_RECORDER, prefix, ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",)),
    )


class Hang(Exception):
    """The run makes no progress; the text is how the summary begins, the same on all ranks."""


class RankLost(RuntimeError):
    """This rank cannot go on because of other ranks; ``waits_for`` holds their numbers."""

    def __init__(self, message: str, waits_for: Sequence[int]) -> None:
        super().__init__(message)
        self.waits_for = tuple(waits_for)


class HangMonitor:
    """Writes the file of this ``rank`` and reads those of the others.

    who: its modules and lanes. timeout_seconds: of transfers. step_timeout_seconds: after which a
    rank without progress ends the run; None: only if it waits for others, shortly before the
    backend gives up. work: returns what the modules do now. memory: returns bytes by module and
    kind, which format_memory formats.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        num_ranks: int,
        who: str,
        timeout_seconds: float,
        step_timeout_seconds: float | None = None,
    ) -> None:
        self._run_dir, self._rank, self._size = run_dir, rank, num_ranks
        self._folder, self._hang_folder = run_dir / heartbeat.RANKS, run_dir / heartbeat.HANG
        self.work: Callable[[], heartbeat.Work] = heartbeat.Work
        self.memory: Callable[[], dict[str, dict[str, int]]] = dict
        self.format_memory: Callable[[Mapping[str, Mapping[str, int]]], str] = str
        self.dump_collectives: Callable[[], object] = lambda: None
        self._place = self._last_place = (0, heartbeat.ACTIVITIES[0])
        self._state = heartbeat.RankState(rank, who, socket.gethostname(), *self._place)
        self._timeout, self._step_timeout = timeout_seconds, step_timeout_seconds
        shortest = min(timeout_seconds, step_timeout_seconds or math.inf)
        least, most = _BEAT_SECONDS
        self._beat_seconds = min(most, max(least, shortest / _BEATS_PER_TIMEOUT))
        self._silent_seconds = max(_SILENT_SECONDS, _MISSED_BEATS * self._beat_seconds)
        self._process = psutil.Process()
        self._last_marker, self._since = object(), time.monotonic()
        self._writing = threading.Lock()
        self._failing, self._left = threading.Event(), threading.Event()

    def at(self, step: int, activity: str) -> None:
        """Set where this rank is from now on; it costs nothing, because the thread writes it."""
        assert activity in heartbeat.ACTIVITIES, f"{activity!r} is no activity"
        self._place = (step, activity)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Write heartbeats inside. In a hang the thread fails with Hang: the caller ends the rank.

        Raises RankLost in place of a backend's error if there is a rank to name.
        """
        self._folder.mkdir(exist_ok=True)
        self._write()
        thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            self._failing.set()
            if self._state.in_hang:  # this error follows from the hang; the process is to end
                thread.join(_HANG_SECONDS)
            self._report_failure(error)
            raise
        finally:
            self._left.set()
            thread.join(_WRITE_SECONDS)  # immediate, unless the file system hangs
            if not self._state.failure:
                with self._writing, suppress(OSError):  # read-only, or others are still there
                    self._file(self._rank).unlink(missing_ok=True)
                    self._folder.rmdir()

    def _report_failure(self, error: Exception) -> None:
        """Record the failure. Raises RankLost in place of an error that another rank has caused."""
        peers = getattr(error, "waits_for", ())
        if peers:
            # The bridge names a peer, which may itself wait for a silent rank. Do not delay: peers
            # learn next that this rank has ended.
            if silent := [state for state in self._silent() if state.rank not in peers]:
                error.add_note("; ".join(state.problem for state in silent))
        elif is_consequence(error):
            if culprits := self._find_culprits():
                text = "; ".join(state.problem for state in culprits)
                self._record("crash", text)
                raise RankLost(text, [state.rank for state in culprits]) from error
            return
        self._state = replace(self._state, failure=f"{type(error).__name__}: {error}")
        self._write()
        if is_consequence(error) or isinstance(error, InputError):
            return
        state, memory = self._now(), self.memory()
        # After other errors the memory would bury them.
        if memory and _OUT_OF_MEMORY.search(state.failure):
            error.add_note(f"{state} failed {state.where}; it holds {self.format_memory(memory)}")
        facts = {"memory": memory} if memory else {}
        self._record("crash", "; ".join([state.problem, *getattr(error, "__notes__", [])]), **facts)

    def _record(self, kind: str, text: str, **facts: Any) -> None:
        """Keep an incident if it is the first since the ranks started: others follow from it."""
        with suppress(OSError):
            (self._run_dir / heartbeat.CRASH).open("x").close()
            state = self._now()
            facts = {"rank": self._rank, "activity": state.activity, "doing": state.doing, **facts}
            record(self._run_dir, kind, text, state.step, **facts)

    def _beat(self) -> None:
        limit, path = self._step_timeout, self._stacks(self._rank)
        with open(os.devnull if limit is None else path, "w") as file:
            while True:
                if limit is not None:
                    # Needs no interpreter, which a call that never returns may hold. Set before
                    # the first wait: such a call may begin within it.
                    faulthandler.dump_traceback_later(limit, file=file)
                    signal.alarm(math.ceil(limit + _HANG_SECONDS))  # ends this process
                if self._left.wait(self._beat_seconds):
                    break
                self._write()
                if self._is_stuck() or self._hang_folder.exists():
                    text = self._explain_hang()
                    # Ending may need others, such as the rank that holds the store.
                    faulthandler.dump_traceback_later(_END_SECONDS, exit=True)
                    raise Hang(text)
            if limit is not None:
                faulthandler.cancel_dump_traceback_later()
                signal.alarm(0)
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def _is_stuck(self) -> bool:
        now, place, work = time.monotonic(), self._place, self.work()
        # By identity: the next batch may do just what this one did.
        if self._last_place is not place or self._last_marker is not work.marker:
            self._last_place, self._last_marker, self._since = place, work.marker, now
        seconds = now - self._since
        if self._failing.is_set():
            return False
        if self._step_timeout is not None:
            return seconds > self._step_timeout
        factor = _PATIENCE if work.is_transfer else _PATIENCE * COLLECTIVE_FACTOR
        return bool(work.waits) and seconds > factor * self._timeout

    def _explain_hang(self) -> str:
        """Write where this rank is and return the first two lines of the summary."""
        seconds = time.monotonic() - self._since
        self._state = replace(self._state, in_hang=True, seconds=seconds)
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
        text = "\n".join(text.splitlines()[:2])
        self._state = replace(self._state, failure=text)
        self._write()
        return text

    def _summary(self) -> str:
        """Return the summary; one rank, whichever is first, writes it and the others read it."""
        summary, patience = self._hang_folder / _SUMMARY, self._beat_seconds + _WRITE_SECONDS
        _wait_until(lambda: sum(s.in_hang for s in self._read().values()) == self._size, patience)
        with suppress(Exception):  # of torch; the summary matters more
            self.dump_collectives()
        try:
            (self._hang_folder / ".writer").open("x").close()
        except FileExistsError:
            _wait_until(summary.exists, patience)
            return summary.read_text()
        states = self._read()
        origins, lines = heartbeat.summarize_hang(states, self._size)
        state = max([self._now(), *states.values()], key=lambda state: state.seconds)
        limit = f"bridge.timeout_seconds {self._timeout:g}"
        if self._step_timeout is not None:
            limit = f"train.step_timeout_seconds {self._step_timeout:g}"
        lines.insert(0, f"the run hangs: {state} has made no progress for {state.seconds:.1f} s")
        lines[0] += f" ({limit})"
        lines.append(f"stacks of the ranks: {self._hang_folder}/rank_<r>.txt")
        if prefix := os.environ.get(_FLIGHT_RECORDER):
            folder, name = os.path.split(prefix)
            lines.append(f"their last collectives: torchfrtrace --prefix {name} {folder}")
        for rank in origins:
            # Of an interpreter that lets no thread run, by a timer of the operating system.
            path = self._stacks(rank)
            if path.exists() and path.stat().st_size:
                shutil.copy(path, self._hang_folder / f"rank_{rank}.txt")
        text, step = "\n".join(lines), min((state.step for state in states.values()), default=None)
        print(text, file=sys.stderr, flush=True)
        record(self._run_dir, "hang", "; ".join(lines[:2]), step, ranks=origins)
        partial = summary.with_name(f".{_SUMMARY}")
        partial.write_text(text + "\n")
        os.replace(partial, summary)
        return text

    # ------------------------------------------------------------------- files of the ranks

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.json"

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.stacks"

    def _now(self) -> heartbeat.RankState:
        (step, activity), work = self._place, self.work()
        return replace(
            self._state,
            step=step,
            activity=activity,
            resident_bytes=self._process.memory_info().rss,
            doing=work.doing,
            batch=work.batch,
            waits=work.waits,
        )

    def _write(self) -> None:
        partial = self._folder / f".rank_{self._rank}"
        with self._writing:
            state = self._now()
            if self._left.is_set() and not state.failure:
                return
            with suppress(OSError):  # a full disk is reported by writes that matter more
                partial.write_text(json.dumps(asdict(state)))
                os.replace(partial, self._file(self._rank))

    def _read(self) -> dict[int, heartbeat.RankState]:
        """Return the states of all ranks that have a file. A rank that ended well has none."""
        try:
            now = self._file(self._rank).stat().st_mtime
        except OSError:  # a full disk, or the folder is gone: nothing is known of others
            return {}
        return heartbeat.read_states(self._run_dir, now)

    def _find_culprits(self) -> list[heartbeat.RankState]:
        """Return the ranks that failed, else those that are silent; empty if all are well."""
        deadline = time.monotonic() + self._silent_seconds + self._beat_seconds
        while True:
            others = [state for rank, state in self._read().items() if rank != self._rank]
            if culprits := [state for state in others if state.failure] or self._silent():
                return culprits
            if time.monotonic() > deadline or stop_requested():  # torchrun may know already
                return []
            time.sleep(self._beat_seconds / 2)

    def _silent(self) -> list[heartbeat.RankState]:
        self._write()
        return [s for s in self._read().values() if s.age_seconds > self._silent_seconds]


def _wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
