"""Arrays that one process of a host hands to others, as files in a folder of shared memory.

A file has its name from the moment that it is complete. The folder belongs to one job. Who uses it
holds a lock in it, which is the kernel's and so ends with the process, however that ends. Whoever
finds that nobody holds it removes the folder: the last to leave, or the next job.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

_ALIGNMENT = 64  # bytes
_LOCK = "lock"


class HandoverFolder:
    """The folder of a job, for its user alone. Every process that opens it closes it.

    root: where it is; folders of this user's dead jobs there are removed.
    """

    def __init__(self, root: Path, job: str) -> None:
        prefix = f"mimo-{os.getuid()}-"
        for folder in root.glob(f"{prefix}*"):
            remove_unless_used(folder)
        self.path = root / f"{prefix}{job}"
        self._lock = _locked(self.path)

    def close(self) -> None:
        """Leave the folder; the last one removes it."""
        os.close(self._lock)
        remove_unless_used(self.path)


def _locked(folder: Path) -> int:
    """A descriptor with a shared lock of ``folder``, which is made if it is not there."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # somebody has just removed it
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), (folder / _LOCK).stat()):
                    return descriptor
            os.close(descriptor)


def remove_unless_used(folder: Path) -> bool:
    """Remove a folder whose lock nobody holds; returns whether it is gone."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # another user's, or gone
        return not folder.exists()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


# ---------------------------------------------------------------------------- files


def write_arrays(path: Path, arrays: Sequence[np.ndarray]) -> None:
    """Make a file of any number of arrays. Raises OSError, for one when there is no room left."""
    described = json.dumps([[array.dtype.str, array.shape] for array in arrays]).encode()
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(described).to_bytes(8, "little") + described)
            for array in arrays:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def arrays_in(whole: np.ndarray) -> list[np.ndarray]:
    """The arrays of a file whose bytes are ``whole`` (n,) uint8, without a copy."""
    end = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    arrays = []
    for name, shape in json.loads(whole[8:end].tobytes()):
        start = end + -end % _ALIGNMENT
        end = start + math.prod(shape) * np.dtype(name).itemsize
        arrays.append(whole[start:end].view(name).reshape(shape))
    return arrays
