import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mimo.errors import RecipeError
from mimo.runtime import signals
from mimo.runtime.processes import RanksFailed, RanksHung
from mimo.runtime.ranks import launch, rank_environment
from tests.conftest import RunRanks
from tests.mimo.runtime.conftest import free_port
from tests.ranks import running

HERE = "tests.mimo.runtime.test_launch"


def sum_of_ranks(rank: int, factor: int) -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(factor * rank))
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_1(rank: int) -> None:
    import torch.distributed as dist

    if rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def kill_rank_1(rank: int) -> None:
    import torch.distributed as dist

    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def abort() -> None:
    os.abort()


def exit_on_rank_1(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def wait_for_rank_0(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 0:
        time.sleep(60)
    dist.recv(torch.zeros(1), src=0)


def write_rank(directory: Path) -> None:
    env = rank_environment()
    assert env is not None
    (directory / f"{env.rank}_of_{env.world_size}").write_text(env.rendezvous)


def fail_in_turn(error: type[Exception]) -> None:
    rank = os.environ["RANK"]
    if rank == "2":
        raise error("the cause")
    if rank == "1":
        time.sleep(0.05)
        raise RuntimeError("Connection closed by peer [127.0.0.1]")
    time.sleep(60)


def note_pid_and_sleep(directory: Path) -> None:
    (directory / f"rank_{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(60)


def note_pid_and_wait_for_a_request(directory: Path) -> int:
    rank = os.environ["RANK"]
    (directory / f"rank_{rank}").write_text(str(os.getpid()))
    while not signals.stop_requested():
        time.sleep(0.02)
    time.sleep(0.2)  # for a second one that should not have come
    (directory / f"requests_{rank}").write_text(" ".join(signals.stop_requested()))
    return 75


def test_ranks_share_a_process_group_and_return_results_in_rank_order(run_ranks: RunRanks) -> None:
    assert run_ranks(sum_of_ranks, 3, 2) == [6.0, 6.0, 6.0]


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        (fail_on_rank_1, r"(?s)in fail_on_rank_1.*rank 1 failed: KeyError"),
        (kill_rank_1, "rank 1 was killed by SIGKILL"),
        (exit_on_rank_1, "rank 1 ended with exit code 7"),
    ],
)
def test_a_rank_that_fails_or_dies_is_the_cause_and_not_its_peers_lost_connections(
    run_ranks: RunRanks, target: Callable[[int], None], cause: str
) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed, match=cause):
        run_ranks(target, 3)
    assert time.monotonic() - began < 10
    assert not multiprocessing.active_children()


def test_a_rank_that_a_library_aborts_tells_where() -> None:
    code = f"import mimo.runtime.ranks as r; exit(r.launch('{HERE}:abort', (), world_size=1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("rank 0 was killed by SIGABRT\n")
    assert "in abort\n" in done.stderr


def test_a_hang_becomes_a_failure_that_shows_where_every_rank_stands(run_ranks: RunRanks) -> None:
    began = time.monotonic()
    with pytest.raises(RanksHung) as caught:
        run_ranks(wait_for_rank_0, 2, timeout_seconds=3)
    assert time.monotonic() - began < 10
    assert str(caught.value).count("in wait_for_rank_0") == 2
    assert not multiprocessing.active_children()


def test_launch_gives_every_rank_the_same_rendezvous_and_removes_it(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert launch(f"{HERE}:write_rank", (tmp_path,), world_size=3) == 0
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["0_of_3", "1_of_3", "2_of_3"]
    (rendezvous,) = {file.read_text() for file in files}
    assert rendezvous.startswith("file:///")
    assert not Path(rendezvous.removeprefix("file://")).parent.exists()


def test_launch_ends_with_the_cause_of_a_failure_and_exit_code_1(
    run_ranks: RunRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert launch(f"{HERE}:fail_in_turn", (OSError,), world_size=3, log_dir=tmp_path) == 1
    assert time.monotonic() - began < 10
    text = capfd.readouterr().err
    assert "Traceback" in text
    assert text.splitlines()[-1] == "rank 2 failed: OSError: the cause"
    assert "in fail_in_turn" in (tmp_path / "error_rank_2.txt").read_text()


def test_launch_reports_bad_input_without_a_traceback_and_exit_code_2(
    run_ranks: RunRanks, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(f"{HERE}:fail_in_turn", (RecipeError,), world_size=3) == 2
    text = capfd.readouterr().err
    assert "Traceback" not in text
    assert text.splitlines()[-1].endswith("the cause")


@contextmanager
def launched(directory: Path, target: str) -> Iterator[subprocess.Popen[str]]:
    """A process that launches two ranks, in a group of its own; no rank may outlive it."""
    code = (
        "import sys, pathlib; from mimo.runtime.ranks import launch\n"
        f"sys.exit(launch('{HERE}:{target}', (pathlib.Path({str(directory)!r}),), 2, ['pytest']))"
    )
    temporary = Path(tempfile.mkdtemp(prefix="launch-"))  # short: sockets have short paths
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pids = _when_written([directory / "rank_0", directory / "rank_1"])
        yield launcher
        deadline = time.monotonic() + 5
        while running(pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not running(pids)
        assert launcher.returncode == -signal.SIGKILL or not list(temporary.glob("mimo-*"))
    finally:
        launcher.kill()
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.parametrize(
    ("sent", "exit_code"),
    [
        ([signal.SIGKILL], -9),
        ([signal.SIGHUP], 129),
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGTERM, signal.SIGTERM], 143),
        ([signal.SIGUSR1, signal.SIGTERM], 143),
    ],
    ids=["SIGKILL", "SIGHUP", "Ctrl-C twice", "SIGTERM twice", "SIGTERM after SIGUSR1"],
)
def test_no_rank_outlives_its_launcher(
    tmp_path: Path, sent: list[signal.Signals], exit_code: int
) -> None:
    with launched(tmp_path, "note_pid_and_sleep") as launcher:
        for signum in sent[:-1]:
            launcher.send_signal(signum)
            assert launcher.stderr is not None
            line = launcher.stderr.readline()
            assert line == f"{signum.name}: finishing the step; a second signal ends at once\n"
        launcher.send_signal(sent[-1])
        assert launcher.wait(10) == exit_code


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_whole_group_asks_every_rank_and_does_not_count_twice(
    tmp_path: Path, sent: signal.Signals
) -> None:
    with launched(tmp_path, "note_pid_and_wait_for_a_request") as launcher:
        os.killpg(launcher.pid, sent)
        assert launcher.wait(10) == 75
    assert [(tmp_path / f"requests_{rank}").read_text() for rank in range(2)] == [sent.name] * 2


@pytest.mark.parametrize("sent", [[signal.SIGTERM, signal.SIGTERM], [signal.SIGINT]])
def test_a_second_signal_or_ctrl_c_ends_a_rank_of_torchrun_that_is_stuck_inside_a_library(
    sent: list[signal.Signals],
) -> None:
    code = (
        "import ctypes, socket; from mimo.runtime.signals import exit_on_second_signal\n"
        "exit_on_second_signal(); here, there = socket.socketpair(); print('ready', flush=True)\n"
        "ctypes.CDLL(None).recv(here.fileno(), ctypes.create_string_buffer(1), 1, 0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        for signum in sent[:-1]:
            rank.send_signal(signum)
            with pytest.raises(subprocess.TimeoutExpired):
                rank.wait(0.5)
        rank.send_signal(sent[-1])
        assert rank.communicate(timeout=10)[1] == f"ended by {sent[-1].name}\n"
        assert rank.returncode == 128 + sent[-1]


def test_a_rank_of_torchrun_that_is_done_is_not_aborted_while_its_interpreter_winds_down() -> None:
    code = "import atexit, os; atexit.register(os.abort); from mimo.cli.main import app; "
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}app(['train', 'no.yaml'])"],
        env={**os.environ, **alone, "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no.yaml" in done.stderr


def test_a_rank_that_is_done_ends_with_its_exit_code_also_where_nobody_reads_it() -> None:
    code = "from mimo.runtime.ranks import end_at_once; end_at_once(3); print('x' * 10**6)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 3


def test_torchrun_and_srun_environments_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MIMO_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert rank_environment() is None

    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert rank_environment() is None, "a batch script is not a rank"
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[03-05]")
    env = rank_environment()
    assert env is not None
    assert (env.rank, env.world_size) == (3, 4)
    assert env.rendezvous == "tcp://gpu03:20444"

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    env = rank_environment()
    assert env is not None
    assert (env.rank, env.world_size, env.rendezvous) == (1, 2, "env://")


def _when_written(paths: list[Path]) -> list[int]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if all(path.exists() and path.read_text() for path in paths):
            return [int(path.read_text()) for path in paths]
        time.sleep(0.02)
    raise AssertionError("the ranks did not start")
