"""Logs on the node's own disk, from where one rank of the node takes them to the run folder.

Many ranks that each write a line now and then keep a shared file system busy. MIMO_LOCAL_LOGS names
the folder on the node; without it, logs are written where they belong.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from mimo.errors import InputError, kind_of
from mimo.runtime.ranks import rank_environment

_EVERY_SECONDS = 10.0

# What is left to take when this process ends at once; the process's own, like its signals.
_left = list[Callable[[], None]]()


@contextmanager
def local_log(path: Path) -> Iterator[Path]:
    """The file to write instead of ``path``, where its bytes are at last after it is closed.

    Raises InputError if the folder on the node cannot be made or is another user's.
    """
    folder, environment = os.environ.get("MIMO_LOCAL_LOGS"), rank_environment()
    if not folder or environment is None:
        yield path
        return
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "job")
    run = hashlib.sha256(str(path.parent.resolve()).encode()).hexdigest()[:8]
    here = Path(folder) / f"mimo-{os.getuid()}-{job}-{run}"
    try:
        here.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise kind_of(error)(f"cluster.local_logs: {here} cannot be made: {error}") from error
    if here.is_symlink() or here.stat().st_uid != os.getuid():
        raise InputError(f"cluster.local_logs: {here} is not a folder of this user; give another")
    is_over, is_first = threading.Event(), environment.local_rank == 0

    def keep() -> None:
        while not is_over.wait(_EVERY_SECONDS):
            _take_all(here, path.parent)

    if is_first:
        threading.Thread(target=keep, name="local logs", daemon=True).start()
    # Of ranks that were killed nobody else would bring what they last wrote.
    last = partial(_take_all, here, path.parent, "*" if is_first else path.name)
    _left.append(last)
    try:
        yield here / path.name
    finally:
        is_over.set()
        _left.remove(last)
        last()
        _take(here / path.name, path, is_done=True)


def take_logs() -> None:
    """For a process that is about to end without unwinding its stack."""
    for take in [*_left]:
        take()


def _take_all(here: Path, to: Path, pattern: str = "*") -> None:
    for local in here.glob(pattern):
        if local.suffix != ".taken":
            _take(local, to / local.name)


def _take(local: Path, path: Path, is_done: bool = False) -> None:
    """Append to ``path`` what is new; several processes may try at once.

    is_done: nobody writes to ``local`` any more, so that it can be removed.
    """
    mark = local.with_suffix(".taken")  # how many bytes have been taken
    with suppress(OSError), mark.open("a+") as taken:  # of a full disk others tell
        fcntl.flock(taken, fcntl.LOCK_EX)
        if not local.exists():  # its rank has just removed both
            mark.unlink()
            return
        taken.seek(0)
        done = int(taken.read() or 0)
        with local.open("rb") as source:
            source.seek(done)
            new = source.read()
        if new:
            with path.open("ab") as target:
                target.write(new)
            taken.truncate(0)
            taken.write(str(done + len(new)))
        if is_done:
            local.unlink()
            mark.unlink()
