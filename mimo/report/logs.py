"""`mimo logs`: the output of ranks, and the first failure among them.

The output of ranks that SLURM started is in the folder of the jobs; log and last error of a rank
are in the folder of the run or the phase. A file may grow, be replaced or appear while it is read.
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mimo.checkpoint.folder import phase_folders
from mimo.errors import InputError
from mimo.report.runs import job_folders
from mimo.report.status import one_line, output_of, read_view
from mimo.runtime.processes import CONSEQUENCE

_END_BYTES = 2**14  # of each file, if several are shown
_LINE_LENGTH = 2**16
_POLL_SECONDS = 0.5
_LOOK_SECONDS = 5.0  # between two checks that the run goes on
_ERROR_BYTES = 2**20  # of a rank's output that are searched for its error
_SHOWN_LINES = 60  # of an error
_RANK = re.compile(r"(?:log_|error_)?rank_(\d+)\.(?:txt|log)")
_ERROR = re.compile(
    r"^(Traceback \(most recent call last\)|Fatal Python error|terminate called|Segmentation fault)"
)
_FOLLOWS = re.compile(r"(rank \d+ failed: )?[\w.]*\b(RankLost|Hang): ")
_START = re.compile(r"job \S+, start \d+, ")  # a line of `launch/job.sh`
_SLURM_ERROR = re.compile(r"^(slurmstepd|srun|sbatch)[\w.-]*: (error|fatal): ")


class _File:
    """A file that may still grow, read by whole lines, from its end if it is longer."""

    def __init__(self, path: Path, num_bytes: int | None = None) -> None:
        self.path, self._at = path, 0
        size = path.stat().st_size if path.exists() else 0
        if num_bytes is not None and size > num_bytes:
            self._at = size - num_bytes
            next(self.lines(), None)  # an incomplete line

    def lines(self, with_rest: bool = True) -> Iterator[str]:
        """Yield the lines since the last call. with_rest: also an unfinished last line."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._at:  # another file
                    self._at = 0
                file.seek(self._at)
                for line in file:
                    if not (with_rest or line.endswith(b"\n")):
                        return
                    self._at += len(line)
                    yield line.decode(errors="replace").rstrip("\n")
        except OSError:  # it has just been moved
            return


def _paths(folder: Path) -> Iterator[tuple[Path, int | None]]:
    """Yield the files of all ranks and jobs of a run, with the rank; None is a job's."""
    folders = dict.fromkeys([folder, *phase_folders(folder).values(), *job_folders(folder)])
    for where in folders:
        for path in sorted([*where.glob("job_*.out"), *where.glob("*rank_*.*")]):
            if path.suffix == ".out":
                yield path, None
            elif name := _RANK.fullmatch(path.name):
                yield path, int(name[1])


def logs(folder: Path, rank: int | None, follow: bool) -> int:
    """Print a rank's output, or the end of each. follow: until the run ends. Raises InputError."""
    view, looked, files = read_view(folder), time.monotonic(), dict[Path, _File]()
    while True:
        goes_on = follow and view.goes_on
        for path, of_rank in _paths(folder):
            if rank not in (None, of_rank):
                continue
            file = files.setdefault(path, _File(path, _END_BYTES if rank is None else None))
            label = path.stem.replace("_", " ") if of_rank is None else f"rank {of_rank}"
            for line in file.lines(with_rest=not goes_on):
                text = one_line(line, _LINE_LENGTH)
                print(f"[{label}] {text}" if rank is None else text, flush=True)
        if not goes_on:
            break
        time.sleep(_POLL_SECONDS)
        if time.monotonic() > looked + _LOOK_SECONDS:
            # One more read follows after the end.
            view, looked = read_view(folder), time.monotonic()
    if not files:
        whose = "no output" if rank is None else f"no output of rank {rank}"
        raise InputError(f"{folder}: {whose} is here; see `mimo status {folder}`")
    return 0


@dataclass(frozen=True)
class _Error:
    """The error of a rank. text: its lines; the last one has the cause."""

    rank: int
    seconds: float
    path: Path
    text: list[str]

    @property
    def follows(self) -> bool:
        """True if it follows from the end of another rank."""
        return bool(CONSEQUENCE.search(self.text[-1])) or any(map(_FOLLOWS.match, self.text))

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.seconds).isoformat(sep=" ", timespec="seconds")
        return f"rank {self.rank} ({when}, {self.path})"


def _seconds(record: dict[str, Any]) -> float:
    """Return the time of an incident or a start, in seconds since 1970; 0 if it has none."""
    time_text = record.get("time")
    return datetime.fromisoformat(time_text).timestamp() if time_text else 0.0


def first_error(folder: Path) -> int:
    """Print the errors of the last start that failed, the cause first."""
    view = read_view(folder)
    incidents = [incident for run in view.runs for incident in run.incidents]
    crashes = [i for i in incidents if i.get("kind") in ("crash", "hang")]
    started = max((_seconds(start) for run in view.runs for start in run.starts), default=0.0)
    errors = _errors(folder)
    late = [error for error in errors if error.seconds >= started]
    new = [crash for crash in crashes if _seconds(crash) >= started]
    if (errors or crashes) and not (late or new):
        print("Of an earlier start; the run has gone on since:")
    errors, crashes = (late, new[:1]) if late or new else (errors, crashes[-1:])
    named = {rank for crash in crashes for rank in (crash.get("rank"), *crash.get("ranks", ()))}
    errors.sort(key=lambda error: (error.follows, error.rank not in named, error.seconds))
    for crash in crashes:
        print(one_line(f"{crash.get('time')} {crash['kind']}: {crash.get('text')}", _LINE_LENGTH))
    causes = [] if crashes and errors and errors[0].follows else errors[:1]
    for error in causes:
        lines = (one_line(line, _LINE_LENGTH) for line in error.text[-_SHOWN_LINES:])
        print(f"{error}:", *lines, sep="\n")
    if others := errors[len(causes) :]:
        print("later, or because of it:")
    for error in others:
        print(f"{error}: {one_line(error.text[-1])}")
    if slurm := _slurm_errors(folder):
        print("SLURM says:", *slurm, sep="\n")
    if not (errors or crashes or slurm):
        print("no rank has failed, as far as the run folder tells")
        for name, line in output_of(view):
            print(f"{name}: {one_line(line, _LINE_LENGTH)}")
    return 0


def _errors(folder: Path) -> list[_Error]:
    """Return the error of each failed rank, from its error file or else from its output."""
    errors = dict[int, _Error]()
    kinds = ("error_", "rank_", "log_")  # the first one that has an error counts
    pairs = [*_paths(folder)]
    by_kind = (pair for kind in kinds for pair in pairs if pair[0].name.startswith(kind))
    for path, rank in by_kind:
        if rank is None or rank in errors:
            continue
        lines = list(_File(path, _ERROR_BYTES).lines())
        if not path.name.startswith("error_"):
            lines = _error_in(lines)
        if lines := [line for line in lines if line.strip()]:
            errors[rank] = _Error(rank, path.stat().st_mtime, path, lines)
    return list(errors.values())


def _error_in(lines: Sequence[str]) -> list[str]:
    """Return the last error in a rank's output, up to the line that names it."""
    begin = max((n for n, line in enumerate(lines) if _ERROR.match(line)), default=None)
    if begin is None:
        return []
    error = list(lines[begin : begin + _SHOWN_LINES])
    inside = (n for n, line in enumerate(error) if n and line and not line.startswith((" ", "\t")))
    return error[: next(inside, len(error) - 1) + 1] if error[0].startswith("Traceback") else error


def _slurm_errors(folder: Path) -> list[str]:
    """Return SLURM's errors in the last start of the newest job."""
    outputs = [path for path, rank in _paths(folder) if rank is None]
    newest = max(outputs, key=lambda path: path.stat().st_mtime, default=None)
    errors = list[str]()
    for line in _File(newest, _ERROR_BYTES).lines() if newest else ():
        if _START.match(line):
            errors.clear()
        if _SLURM_ERROR.match(line) and len(errors) < _SHOWN_LINES:
            errors.append(one_line(line))
    return errors
