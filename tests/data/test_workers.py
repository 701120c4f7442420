"""Handing arrays over through files, and processes that end when nobody needs them any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data.decoding import WorkerPool
from data.worker_process import HandoverFolder, read_arrays, write_arrays
from tests.ranks import running

# A rank with a worker that hangs and one that waits. It prints their process ids.
RANK = """
import sys, time
from pathlib import Path
from data.worker_process import HandoverFolder
from data.decoding import WorkerPool
from tests.data.test_workers import Hanging

folder = HandoverFolder(Path(sys.argv[1]), "job")
pool = WorkerPool(folder.path, [Hanging()], 2)
workers = [pool.start(), pool.start()]
workers[0].pipe.send((0, "item", 0, folder.path / "never"))
(folder.path / "half").write_bytes(b"of a result")
print(pool._server.pid, *(worker.pid for worker in workers), flush=True)
time.sleep(600)
"""


class Hanging:
    """A reader that never comes back."""

    def patches(self, item: int) -> np.ndarray:
        time.sleep(600)
        return np.zeros(0)


def test_arrays_arrive_as_they_were_and_the_file_appears_when_it_is_complete(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    sent = [
        rng.integers(0, 255, (3, 5), np.uint8),
        rng.normal(size=(7, 2)).astype(np.float32).T,  # not contiguous
        np.zeros((0, 4), np.int64),
        np.arange(9),
    ]
    write_arrays(tmp_path / "one", sent)
    write_arrays(tmp_path / "none", ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["none", "one"]
    got = read_arrays(tmp_path / "one")
    for one, two in zip(sent, got, strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert (one == two).all()
    assert read_arrays(tmp_path / "none") == []


def test_the_last_to_leave_removes_the_folder_and_dead_jobs_leave_none(tmp_path: Path) -> None:
    dead = tmp_path / f"mimo-{os.getuid()}-dead"
    dead.mkdir()
    (dead / "result").write_bytes(b"of nobody")
    other = HandoverFolder(tmp_path, "living")
    assert not dead.exists()
    one, two = HandoverFolder(tmp_path, "job"), HandoverFolder(tmp_path, "job")
    assert one.path == two.path
    assert one.path.stat().st_mode & 0o777 == 0o700
    one.close()
    assert two.path.exists()
    two.close()
    assert [path.name for path in tmp_path.iterdir()] == [other.path.name]
    other.close()


def test_a_rank_may_open_the_folder_while_the_last_one_removes_it(tmp_path: Path) -> None:
    def open_and_leave() -> None:
        for _ in range(500):
            HandoverFolder(tmp_path, "job").close()

    with ThreadPoolExecutor(4) as threads:
        for outcome in [threads.submit(open_and_leave) for _ in range(4)]:
            outcome.result()
    assert not list(tmp_path.iterdir())


def test_killed_ranks_leave_neither_processes_nor_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    words = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
    pids = [int(word) for word in " ".join(words).split()]
    assert len(pids) == 6
    assert running(pids) == pids
    assert len(list(tmp_path.iterdir())) == 1
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.communicate()
    deadline = time.monotonic() + 10
    while (running(pids) or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running(pids) == []
    assert list(tmp_path.iterdir()) == []


def test_a_fork_server_that_was_killed_is_named(tmp_path: Path) -> None:
    pool = WorkerPool(tmp_path, [Hanging()], 1)  # type: ignore[list-item]
    os.kill(pool._server.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the process that starts decode workers"):
        pool.start()
    pool.close()
