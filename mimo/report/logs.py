"""`mimo logs`: what ranks have written, and which of them failed first.

A rank's output is in the folder of its jobs where SLURM started it, its own log and its last error
in the run folder or that of the phase. A file may grow, be replaced by a longer copy of itself, or
appear, while it is read.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from pathlib import Path

from mimo.checkpoint.folder import phase_folders
from mimo.errors import InputError
from mimo.report.runs import job_folders
from mimo.report.status import last_words_of, look, plain
from mimo.runtime.processes import looks_like_a_consequence
from mimo.runtime.run_files import INCIDENTS

_MERGED_BYTES = 16 * 2**20  # of all files together, as each line is kept until it has its place
_LEAST_BYTES = 2**14  # of a file
_LINE_BYTES = 2**16
_POLL_SECONDS = 0.5
_LOOK_SECONDS = 5.0  # between two looks at whether the run goes on
_ERROR_BYTES = 2**20  # of a rank's output, in which its error is looked for
_SHOWN_LINES = 60  # of an error
_RANK = re.compile(r"(?:log_|error_)?rank_(\d+)\.(?:txt|log)")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?(?:[+-]\d{4}|Z)?")
_ERROR = re.compile(
    r"^(Traceback \(most recent call last\)|Fatal Python error|terminate called|Segmentation fault)"
)
_FOLLOWS = re.compile(r"(rank \d+ failed: )?[\w.]*\b(RankLost|Hang): ")
_START = re.compile(r"job \S+, start \d+, ")  # a line of `launch/job.sh`
_SLURM_ERROR = re.compile(r"^(slurmstepd|srun|sbatch)[\w.-]*: (error|fatal): ")


class _File:
    """A file that may still grow; read by whole lines."""

    def __init__(self, path: Path, rank: int | None) -> None:
        self.path, self.rank = path, rank
        self.label = f"rank {rank}" if rank is not None else path.stem.replace("_", " ")
        self._at = 0

    def from_its_end(self, num_bytes: int) -> _File:
        """The same, without what is before its last bytes."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size > num_bytes:
            self._at = size - num_bytes
            next(self.lines(), None)  # it is cut
        return self

    def lines(self, with_rest: bool = True) -> Iterator[str]:
        """Those that are new since the last call. with_rest: one that is not ended as well."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._at:  # it is another one
                    self._at = 0
                file.seek(self._at)
                while line := file.readline(_LINE_BYTES):
                    if not (with_rest or line.endswith(b"\n") or len(line) == _LINE_BYTES):
                        return
                    self._at += len(line)
                    yield line.decode(errors="replace").rstrip("\n")
        except OSError:  # it has just been moved
            return


def _files(folder: Path, rank: int | None) -> list[_File]:
    """All that ranks and jobs of a run have written so far, or that one of its ranks has."""
    folders = dict.fromkeys([folder, *phase_folders(folder).values(), *job_folders(folder)])
    found = []
    for path in sorted(path for one in folders for path in one.glob("*rank_*.*")):
        name = _RANK.fullmatch(path.name)
        if name and rank in (None, int(name[1])):
            found.append(_File(path, int(name[1])))
    if rank is None:
        found += [_File(one, None) for where in folders for one in sorted(where.glob("job_*.out"))]
        found += [_File(where / INCIDENTS, None) for where in folders]
    return [file for file in found if file.path.exists()]


def _stamped(file: _File, with_rest: bool) -> Iterator[tuple[float, str, str]]:
    """Time, label and text of new lines; one without a time has that of the line before."""
    seconds = 0.0
    for text in file.lines(with_rest):
        seconds = max(seconds, _seconds_in(text[:80])) or file.path.stat().st_mtime
        yield seconds, file.label, text


def _seconds_in(text: str) -> float:
    """The first time in a text; 0 without one."""
    try:
        found = _TIME.search(text)
        return datetime.fromisoformat(found[0].replace(",", ".")).timestamp() if found else 0.0
    except ValueError:
        return 0.0


def logs(folder: Path, rank: int | None, follow: bool) -> int:
    """`mimo logs`: the whole output of one rank, or the newest of all in the order of time.

    follow: go on with what comes, until nothing goes on any more. Raises InputError without a file.
    """
    view = look(folder)
    files = {file.path: file for file in _files(folder, rank)}
    if not files and not (follow and view.goes_on):
        whose = "no output" if rank is None else f"no output of rank {rank}"
        raise InputError(f"{folder}: {whose} is here; see `mimo status {folder}`")
    if rank is None:
        share = max(_LEAST_BYTES, _MERGED_BYTES // max(1, len(files)))
        for file in files.values():
            file.from_its_end(share)
    looked = time.monotonic()
    while True:
        goes_on = follow and view.goes_on
        lines = [line for file in files.values() for line in _stamped(file, not goes_on)]
        for _, label, text in sorted(lines, key=itemgetter(0)) if rank is None else lines:
            print(f"[{label}] " * (rank is None) + plain(text, _LINE_BYTES))
        sys.stdout.flush()
        if not goes_on:
            return 0
        time.sleep(_POLL_SECONDS)
        if time.monotonic() > looked + _LOOK_SECONDS:
            view, looked = look(folder), time.monotonic()  # what came before it ended is read yet
        files = {file.path: file for file in _files(folder, rank)} | files


# -------------------------------------------------------------------------- the first error


@dataclass(frozen=True)
class _Error:
    """What ended a rank. text: lines, the last of which says most."""

    rank: int
    seconds: float
    path: Path
    text: list[str]

    @property
    def follows(self) -> bool:
        """Whether it came of another rank's end."""
        return looks_like_a_consequence(self.text[-1]) or any(map(_FOLLOWS.match, self.text))

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.seconds).isoformat(sep=" ", timespec="seconds")
        return f"rank {self.rank} ({when}, {self.path})"


def first_error(folder: Path) -> int:
    """`mimo logs --first-error`: of the last start that failed, the cause first."""
    view = look(folder)
    incidents = [one for run in view.runs for one in run.incidents]
    crashes = [one for one in incidents if one.get("kind") in ("crash", "hang")]
    times = (str(start.get("time")) for run in view.runs for start in run.starts)
    started = max(map(_seconds_in, times), default=0.0)
    errors = _errors(folder)
    late = [error for error in errors if error.seconds >= started]
    new = [one for one in crashes if _seconds_in(str(one.get("time"))) >= started]
    if (errors or crashes) and not (late or new):
        print("Of an earlier start; the run has gone on since:")
    errors, crashes = (late, new[:1]) if late or new else (errors, crashes[-1:])
    told = {rank for one in crashes for rank in (one.get("rank"), *one.get("ranks", ()))}
    errors.sort(key=lambda one: (one.follows, one.rank not in told, one.seconds))
    for one in crashes:
        print(f"{one.get('time')} {one['kind']}: {plain(str(one.get('text')), _LINE_BYTES)}")
    causes = [] if crashes and errors and errors[0].follows else errors[:1]
    for error in causes:
        print(f"{error}:")
        print("\n".join(plain(line, _LINE_BYTES) for line in error.text[-_SHOWN_LINES:]))
    if others := errors[len(causes) :]:
        print("later, or because of it:")
    for error in others:
        print(f"{error}: {plain(error.text[-1])}")
    if said := _said_by_slurm(folder):
        print("SLURM says:", *said, sep="\n")
    if not (errors or crashes or said):
        print("no rank has failed, as far as the run folder tells")
        for name, line in last_words_of(view):
            print(f"{name}: {plain(line, _LINE_BYTES)}")
    return 0


def _errors(folder: Path) -> list[_Error]:
    """One of each rank that failed: of its own file, or else of its output."""
    found = dict[int, _Error]()
    for file in _files(folder, None):
        if file.rank is None or (file.rank in found and file.path.name.startswith("log_")):
            continue
        lines = list(file.from_its_end(_ERROR_BYTES).lines())
        if not file.path.name.startswith("error_"):
            lines = _error_in(lines)
        elif lines:
            found.pop(file.rank, None)
        if lines := [line for line in lines if line.strip()]:
            seconds = file.path.stat().st_mtime
            found.setdefault(file.rank, _Error(file.rank, seconds, file.path, lines))
    return list(found.values())


def _error_in(lines: Sequence[str]) -> list[str]:
    """The last error in a rank's output, up to the line that says what it is."""
    begin = max((n for n, line in enumerate(lines) if _ERROR.match(line)), default=None)
    if begin is None:
        return []
    own = list(lines[begin : begin + _SHOWN_LINES])
    inside = (n for n, line in enumerate(own) if n and line and not line.startswith((" ", "\t")))
    return own[: next(inside, len(own) - 1) + 1] if own[0].startswith("Traceback") else own


def _said_by_slurm(folder: Path) -> list[str]:
    """What SLURM wrote into the newest job's output when it ended its last start."""
    files = [file for file in _files(folder, None) if file.path.name.startswith("job_")]
    newest = max(files, key=lambda file: file.path.stat().st_mtime, default=None)
    said = list[str]()
    for line in newest.from_its_end(_ERROR_BYTES).lines() if newest else ():
        if _START.match(line):
            said.clear()
        if _SLURM_ERROR.match(line) and len(said) < _SHOWN_LINES:
            said.append(plain(line))
    return said
