"""One job at a time writes to a run folder.

The lock is the kernel's (`flock`), so it ends with the process that holds it, however that ends.
The file beside the run folder only says who holds it. Between hosts it works on NFS, and on Lustre
mounted with `flock`; on a file system without locks there is only a warning.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mimo.errors import InputError

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of ``run_dir``, which need not exist, for one process of a job.

    The lock is on a file beside the folder, because the folder itself may be moved aside.
    Raises InputError saying who already holds it, or why the file cannot be written.
    """
    path = run_dir.with_name(f".{run_dir.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path, run_dir)
    except OSError as error:
        raise InputError(
            f"{run_dir}: cannot write there: {error}; give another train.run_dir or name"
        ) from error
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, _this_process().encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path, run_dir: Path) -> int:
    """A locked, open descriptor of the file at ``path``."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace").strip()
            os.close(descriptor)
            raise InputError(
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
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # its last holder has just removed it


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _this_process() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    words = [f"host {socket.gethostname()}", f"process {os.getpid()}", f"since {since}"]
    return ", ".join([*words, f"SLURM job {job}"] if job else words)
