"""The lock of a run folder: one job at a time, and none after it has ended, however it did."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from mimo.errors import InputError, StartError
from mimo.runtime.run_lock import keep_lock, run_lock
from mimo.train import main as job

HOLD = """
import sys
from pathlib import Path
from mimo.runtime.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another_process(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    environment = {**os.environ, "SLURM_JOB_ID": "77"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_start_is_refused_with_who_runs_and_nothing_is_moved(recipe: Path) -> None:
    run_dir = recipe.parent / "runs" / "tiny"
    run_dir.mkdir(parents=True)
    with held_by_another_process(run_dir) as holder:
        for resume in (False, True):
            with pytest.raises(StartError, match="another job is writing to this run") as caught:
                job.main(recipe, [], resume=resume)
            message = str(caught.value)
            assert message.startswith(f"{run_dir}: ")
            assert f"(host {socket.gethostname()}, process {holder.pid}, since " in message
            assert "SLURM job 77" in message
    assert [path.name for path in run_dir.parent.iterdir() if path.is_dir()] == ["tiny"]
    assert not list(run_dir.iterdir())


def test_the_lock_ends_with_its_process_also_when_that_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    with held_by_another_process(run_dir) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with run_lock(run_dir), pytest.raises(StartError), run_lock(run_dir):
            pass
    assert not list(run_dir.parent.iterdir()), "a job that ended well leaves nothing"


def test_a_rank_that_outlives_the_launcher_keeps_other_jobs_away_until_it_ends(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "runs" / "a"
    with held_by_another_process(run_dir) as launcher:
        rank = os.fork()
        if rank == 0:
            keep_lock(run_dir)
            (tmp_path / "kept").touch()
            time.sleep(60)
            os._exit(0)
        try:
            while not (tmp_path / "kept").exists():
                time.sleep(0.01)
            launcher.kill()
            launcher.wait()
            with pytest.raises(StartError, match=f"process {launcher.pid},"), run_lock(run_dir):
                pass
        finally:
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
        with run_lock(run_dir):
            pass


def test_other_runs_beside_it_are_free_and_a_folder_may_be_moved_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with run_lock(tmp_path / "a"), run_lock(tmp_path / "b"):
        (tmp_path / "a").rename(tmp_path / "a.1")
        with pytest.raises(StartError), run_lock(tmp_path / "a"):
            pass


def test_a_place_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = r"cannot write there: .*; give another train\.run_dir"
    with pytest.raises(InputError, match=message) as bad, run_lock(tmp_path / "file" / "a"):
        pass
    assert bad.value.exit_code == 2


def test_a_place_whose_file_system_fails_is_tried_again(tmp_path: Path) -> None:
    lost = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    with (
        mock.patch.object(os, "open", side_effect=lost),
        pytest.raises(StartError, match="cannot write there: .*Stale file handle"),
        run_lock(tmp_path / "a"),
    ):
        pass
