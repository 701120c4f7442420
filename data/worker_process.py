"""The processes that decode for a rank: workers, and the fork server, of which each is a fork.

The fork server loads tokenizer and indexes once, so that a worker starts in milliseconds. It ends
with its rank, and ends its workers. None loads torch unless a decoder does, nor sees a GPU.

Arrays are handed to other processes of a host as files in a folder of shared memory. A file gets
its name once it is complete. Users of the folder hold a lock; the last one, or the next job,
removes it.
"""

import fcntl
import json
import math
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path

import numpy as np

from data.index.reader import SampleReader

_ALIGNMENT = 64  # bytes


class HandoverFolder:
    """The shared folder of a job in ``root``; folders of this user's dead jobs are removed."""

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
    """Return a descriptor of ``folder`` with a shared lock; create the folder if needed."""
    while True:
        with suppress(FileExistsError):  # mkdir of pathlib raises it if the folder goes meanwhile
            os.mkdir(folder, 0o700)
        with suppress(FileNotFoundError):  # another process has just removed it
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), folder.stat()):
                    return descriptor
            os.close(descriptor)


def remove_unless_used(folder: Path) -> None:
    """Remove a folder whose lock no process holds."""
    with suppress(OSError):  # another user's, or gone, or in use
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def write_arrays(path: Path, arrays: Sequence[np.ndarray]) -> None:
    """Write a file of any number of arrays. Raises OSError, such as for a full disk."""
    header = json.dumps([[array.dtype.str, array.shape] for array in arrays]).encode()
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for array in arrays:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_arrays(path: Path) -> list[np.ndarray]:
    """Return the arrays of a file."""
    whole = np.fromfile(path, np.uint8)
    end = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    arrays = []
    for name, shape in json.loads(whole[8:end].tobytes()):
        start = end + -end % _ALIGNMENT
        end = start + math.prod(shape) * np.dtype(name).itemsize
        arrays.append(whole[start:end].view(name).reshape(shape))
    return arrays


TEXT, ITEM = "text", "item"  # kinds of work
_LOCK_SECONDS = 0.1  # until the system has released the lock of a rank that was killed


def decode(reader: SampleReader, kind: str, number: int) -> list[np.ndarray]:
    """Return an item's patches, or the fields of a tokenized sample. Raises UnreadableSample."""
    if kind == ITEM:
        return [reader.patches(number)]
    return list(vars(reader.sample(number)).values())


def main(descriptor: int, folder: Path) -> None:
    """Run the fork server; ``descriptor``: its connection to the rank.

    The rank asks it to fork a worker (it answers with the process id, or what went wrong), with
    pickled readers the first time, and to reap one (it answers how the worker ended).
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the rank handles these
        signal.signal(signum, signal.SIG_IGN)
    control, readers, workers = Connection(descriptor), [], set[int]()
    with suppress(EOFError, OSError):  # the rank has closed its end, or is gone
        while True:
            question, value = control.recv()
            if question == "reap":
                code = os.waitstatus_to_exitcode(os.waitpid(value, 0)[1])
                killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
                control.send(killed or f"ended with exit code {code}")
                workers.discard(value)
                continue
            try:
                readers = pickle.loads(value) if value else readers
            except Exception:
                control.send(traceback.format_exc())
            else:
                workers.add(_fork(control, readers))
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    time.sleep(_LOCK_SECONDS)
    remove_unless_used(folder)


def _fork(control: Connection, readers: Sequence[SampleReader]) -> int:
    to_rank, to_worker = Pipe()
    if (pid := os.fork()) == 0:
        try:
            control.close()
            to_worker.close()
            _work(to_rank, readers)
        except (EOFError, OSError):  # the rank is gone
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    to_rank.close()
    control.send(pid)
    send_handle(control, to_worker.fileno(), os.getppid())
    to_worker.close()
    return pid


def _work(pipe: Connection, readers: Sequence[SampleReader]) -> None:
    while True:
        reader, kind, number, path = pipe.recv()
        answer: Exception | None = None
        try:
            write_arrays(path, decode(readers[reader], kind, number))
        except Exception as error:
            # The pipe does not carry its traceback.
            error.add_note(f"in a decode worker: {traceback.format_exc()}")
            answer = _portable(error)
        pipe.send(answer)


def _portable(error: Exception) -> Exception:
    """Return the error, or one with its text if it cannot be pickled and restored."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
