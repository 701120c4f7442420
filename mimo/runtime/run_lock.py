"""One job at a time writes to a run folder.

The lock is the kernel's (`flock`) on a file beside the run folder that says who took it. Its job's
ranks share it, so it ends with the last of them. It works between hosts on NFS, and on Lustre
mounted with `flock`; elsewhere there is a warning.
"""

import errno
import fcntl
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from mimo.errors import StartError, kind_of

_POLL_SECONDS = 0.5
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextmanager
def run_lock(run_dir: Path, patience_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of ``run_dir``, which need not exist; one process of a job calls it.

    patience_seconds: for the holder's last processes to end. Raises StartError if another process
    holds it or the file system fails; InputError if the folder cannot be written.
    """
    path = _lock_file(run_dir)
    deadline = time.monotonic() + patience_seconds
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path, run_dir, deadline)
    except OSError as error:
        raise kind_of(error)(
            f"{run_dir}: cannot write there: {error}; give another train.run_dir or name"
        ) from error
    try:
        with suppress(OSError):  # a full disk; others are then refused without saying who it is
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _describe_process().encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def keep_lock(run_dir: Path) -> None:
    """Share the lock until this process ends, even after the launcher; every rank calls it."""
    with suppress(FileNotFoundError):  # the process that took it has just ended; this one will end
        descriptor = os.open(_lock_file(run_dir), os.O_RDWR)  # for as long as this process lives
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def holder(run_dir: Path) -> str:
    """Describe the process that took the lock, without trying it; empty if there is none.

    From another host it cannot see that the process was killed.
    """
    try:
        text = _lock_file(run_dir.resolve()).read_text(errors="replace").strip()
    except OSError:
        return ""
    match = re.match(r"host (.*), process (\d+), ", text)
    if match and match[1] == socket.gethostname() and not psutil.pid_exists(int(match[2])):
        return ""
    return text


def _lock_file(run_dir: Path) -> Path:
    return run_dir.with_name(f".{run_dir.name}.lock")


def _lock(path: Path, run_dir: Path, deadline: float) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # from here on, shared
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace").strip()
            os.close(descriptor)
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                continue
            raise StartError(
                f"{run_dir}: another job is writing to this run folder"
                f"{f' ({holder})' if holder else ''}; wait for it, end it, or give another name"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            print(
                f"warning: no locks on this file system ({error}); nothing keeps another job from "
                f"writing to {run_dir}",
                file=sys.stderr,
            )
            return descriptor
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # its last holder has just removed it


def _describe_process() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    words = [f"host {socket.gethostname()}", f"process {os.getpid()}", f"since {since}"]
    return ", ".join([*words, f"SLURM job {job}"] if job else words)
