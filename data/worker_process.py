"""The processes that decode for a rank: workers, and the nursery, of which each is a fork.

The nursery loads tokenizer and indexes once, so that a worker starts in milliseconds, and never
decodes, so that it always answers. It ends with its rank, however that ends, and its workers with
it. None loads an engine, nor torch unless a media's decoder does, and no GPU is visible to them.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import numpy as np

from data.handover import remove_unless_used, write_arrays
from data.index.reader import SampleReader, UnreadableSample

TEXT, ITEM = "text", "item"  # kinds of work
WITH_NURSERY = "ended with the process that started it"
_END_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def decode(reader: SampleReader, kind: str, number: int) -> list[np.ndarray]:
    """An item's patches, or the fields of a tokenized sample. Raises UnreadableSample."""
    if kind == ITEM:
        return [reader.patches(number)]
    return list(vars(reader.sample(number)).values())


def main(descriptor: int, folder: Path) -> None:
    """The life of a nursery; ``descriptor``: of its connection to the rank.

    The rank asks: to load readers (the answer is what went wrong), to fork a worker (its process id
    and connection), to bury one (how it ended), or to end.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the rank's to handle
        signal.signal(signum, signal.SIG_IGN)
    control, readers, workers = Connection(descriptor), [], set[int]()
    try:
        while True:
            question, value = control.recv()
            if question == "load":
                try:
                    readers = pickle.loads(value)
                    control.send("")
                except Exception:
                    control.send(traceback.format_exc())
            elif question == "fork":
                workers.add(_fork(control, readers))
            elif question == "bury":
                control.send(_bury(value))
                workers.discard(value)
            else:
                return
    except (EOFError, OSError):  # the rank is gone, perhaps by SIGKILL
        deadline = time.monotonic() + _END_SECONDS
        while not remove_unless_used(folder) and time.monotonic() < deadline:
            time.sleep(0.05)  # other ranks may be about to end as well
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)


def _fork(control: Connection, readers: Sequence[SampleReader]) -> int:
    to_rank, to_worker = Pipe()
    nursery, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            control.close()
            to_worker.close()
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == nursery:
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


def _bury(pid: int) -> str:
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # a child of a nursery that has died
        return WITH_NURSERY
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _work(pipe: Connection, readers: Sequence[SampleReader]) -> None:
    while True:
        reader, kind, number, path = pipe.recv()
        try:
            write_arrays(path, decode(readers[reader], kind, number))
            answer: tuple[str, Any] = "done", None
        except UnreadableSample as error:
            answer = "unreadable", (error.shard, error.key, error.item, error.reason)
        except Exception as error:
            answer = "failed", _portable(error)
        pipe.send(answer)


def _portable(error: Exception) -> Exception:
    """The error with its traceback as a note, or in words if it cannot be sent."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"in a decode worker: {text}")
    with suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(text)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
