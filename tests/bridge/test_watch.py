"""The watch over transfers: silent while they finish, with the CPU's errors when they are late."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bridge import BridgeError, TransferWatch
from bridge.waiting import Message
from mimo.runtime.processes import RanksFailed
from mimo.runtime.ranks import launch
from tests.bridge.two_grids import HIDDEN, Case, build_end, make_end, receive_all, rows_of
from tests.conftest import RunRanks

LATE = (
    "bridge vision -> language: rows of microbatch 0 did not arrive within "
    "bridge.timeout_seconds 0.5; still waiting for rank 0 to send 23 rows"
)


class Work:
    """A message that is done when the test says so."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def is_completed(self) -> bool:
        return self.done


def message(work: Work, peer: int, rows: int = 4) -> Message:
    return Message(cast("Any", work), peer, rows, incoming=True)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Exceptions that threads have raised meanwhile."""
    raised: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    return raised


def wait_until(happened: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert happened()


# ------------------------------------------------------- functions that run inside ranks


def watched(rank: int, case: Case) -> Any:
    """This rank's end of the bridge, watched although waiting blocks."""
    side = build_end(rank, case)
    side.end = replace(side.end, watch=TransferWatch())
    return side


def wait_for_rank_0(rank: int, case: Case) -> None:
    side = watched(rank, case)
    if rank == 0:
        time.sleep(30)
    side.end.watch.tell_where = lambda error: error.add_note(f"in step 7, {error.microbatch}")
    side.begin(case.plans())
    receive_all(side, case)


def send_and_never_wait(rank: int, case: Case) -> None:
    """The host of rank 0 is stuck elsewhere; rank 1 never asks for its rows."""
    side = watched(rank, case)
    if rank == 0:
        side.begin(case.plans())
        side.send(0, rows_of(case, 0, rank))
    time.sleep(30)


def stuck_on_the_device() -> None:
    """The host waits for a device that is busy; no other rank takes part."""
    from mimo.device import local_device, synchronize

    event = torch.cuda.Event()
    torch.zeros(1, device=local_device(0))
    torch.cuda._sleep(60 * 10**9)  # some tens of seconds
    event.record()
    work = Work()
    work.is_completed = event.query  # type: ignore[method-assign]
    TransferWatch().add([message(work, 0, 23)], LATE.partition(" did")[0], 0, 0.5)
    synchronize()


def stuck_in_nccl() -> None:
    """Rank 1 waits for rows that rank 0 never sends."""
    import torch.distributed as dist

    from bridge.transfer import start_receiving
    from mimo.device import initialize_distributed, local_device, synchronize
    from mimo.runtime.ranks import rank_environment

    env = rank_environment()
    assert env is not None
    initialize_distributed(env.rank, env.world_size, env.rendezvous, 120, env.local_rank)
    dist.all_reduce(torch.zeros(1, device=local_device()))
    synchronize()
    if env.rank == 0:
        time.sleep(60)
    case = Case(1, 1, 1, 1)
    groups, watch = (dist.group.WORLD, dist.new_group()), TransferWatch()
    options = {"device": local_device(), "timeout_seconds": 0.5, "watch": watch}
    end = make_end(env.rank, groups, HIDDEN, trainable=False, **options)
    exchange = case.plan(0).receives(1)
    into = torch.zeros(case.tokens, HIDDEN, device=end.device)
    start_receiving(end, 0, "rows", exchange, into).wait()
    synchronize()


# ---------------------------------------------------------------------------- tests


def test_a_late_transfer_names_what_is_missing_and_where_and_nothing_that_has_come(
    failures: list[BaseException],
) -> None:
    watch, missing = TransferWatch(), Work()
    watch.tell_where = lambda error: error.add_note(f"in step 7, microbatch {error.microbatch}")
    watch.add([message(Work(done=True), 1), message(missing, 2, rows=9)], "rows", 3, 0.05)
    wait_until(lambda: failures)
    (error,) = failures
    assert isinstance(error, BridgeError)
    assert str(error) == (
        "rows did not arrive within bridge.timeout_seconds 0.05; "
        "still waiting for rank 2 to send 9 rows"
    )
    assert (error.microbatch, error.waits_for) == (3, (2,))
    assert error.__notes__ == ["in step 7, microbatch 3"]
    assert watch.oldest() == ("rows", (2,))


def test_transfers_that_finish_in_time_are_forgotten(failures: list[BaseException]) -> None:
    watch = TransferWatch()
    works = [Work() for _ in range(3)]
    for number, work in enumerate(works):
        watch.add([message(work, number)], "rows", number, 0.4)
    time.sleep(0.1)
    for work in works:
        work.done = True
    time.sleep(0.5)
    for work in works:
        work.done = False  # whoever looked again would call them late
    watch.add([message(Work(done=True), 0)], "rows", 3, 0.4)
    time.sleep(0.2)
    assert not failures


def test_a_transfer_behind_another_has_its_own_time_once_that_one_is_done(
    failures: list[BaseException],
) -> None:
    watch, before, after, elsewhere = TransferWatch(), Work(), Work(), Work(done=True)
    watch.add([message(before, 1)], "bridge a -> b: rows of microbatch 0", 0, 0.6)
    watch.add([message(after, 1)], "bridge a -> b: rows of microbatch 1", 1, 0.6)
    time.sleep(0.4)
    before.done = True
    time.sleep(0.4)  # longer than its timeout after its start
    assert not failures
    watch.add([message(elsewhere, 1)], "bridge b -> a: gradients of microbatch 0", 0, 0.6)
    wait_until(lambda: failures)
    assert str(failures[0]).startswith("bridge a -> b: rows of microbatch 1 did not arrive")


def test_waiting_for_a_transfer_starts_its_time_anew(failures: list[BaseException]) -> None:
    watch, work = TransferWatch(), Work()
    posted = watch.add([message(work, 1)], "bridge a -> b: rows of microbatch 5", 5, 0.6)
    time.sleep(0.4)
    posted.is_wanted()
    time.sleep(0.4)
    assert not failures
    wait_until(lambda: failures)


def test_rows_that_nobody_takes_are_named_although_their_sender_never_waits(
    run_ranks: RunRanks,
) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(send_and_never_wait, 2, Case(1, 1, 1, 1, timeout_seconds=0.5))
    (error,) = caught.value.errors
    assert (error.rank, error.waits_for) == (0, (1,))
    assert (
        "bridge vision -> language: rows of microbatch 0 were not taken within "
        "bridge.timeout_seconds 0.5; still waiting for rank 1 to take 23 rows"
    ) in error.reason


def test_a_stalled_peer_ends_the_run_with_its_rows_although_the_main_thread_is_stuck(
    run_ranks: RunRanks,
) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(wait_for_rank_0, 2, Case(1, 1, 1, 1, timeout_seconds=0.5))
    assert time.monotonic() - started < 10
    (error,) = caught.value.errors
    assert (error.rank, error.exit_code, error.waits_for) == (1, 1, (0,))
    assert LATE in error.reason
    assert error.traceback.endswith("in step 7, 0\n")


def test_a_failed_thread_ends_its_process_though_the_main_thread_is_busy() -> None:
    code = """
import os, threading, time, traceback
from mimo.runtime.processes import end_with_failed_thread
def end(error):
    traceback.print_exception(error)
    os._exit(1)
end_with_failed_thread(end)
threading.Thread(target=lambda: 1 / 0, daemon=True).start()
time.sleep(30)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("stuck", "ranks"), [("stuck_on_the_device", 1), ("stuck_in_nccl", 2)], ids=str
)
def test_a_host_that_is_stuck_on_its_gpu_is_ended_with_the_peers_and_their_rows(
    stuck: str, ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    code = launch(f"tests.bridge.test_watch:{stuck}", (), ranks, log_dir=tmp_path)
    assert code == 1
    assert LATE in capfd.readouterr().err
