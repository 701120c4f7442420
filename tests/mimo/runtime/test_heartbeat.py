"""Which ranks are named in a hang or when a collective fails, by the ranks' files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from bridge import BridgeError
from mimo.runtime.hang_monitor import HangMonitor, RankLost
from mimo.runtime.heartbeat import RankState, summarize_hang

STEP = RankState(
    0, "vision, lane 0", "node1", 7, "forward and backward", in_hang=True, seconds=61.0
)
ROWS = "bridge vision: rows of microbatch 3"
LOST = "Connection closed by peer"


def rank(number: int, activity: str = STEP.activity, waits: str = "", **more) -> RankState:
    return replace(STEP, rank=number, activity=activity, waits=waits, **more)


def origins(*states: RankState, num_ranks: int = 3) -> tuple[tuple[int, ...], list[str]]:
    return summarize_hang({state.rank: state for state in states}, num_ranks)


def test_a_rank_that_waits_for_nobody_is_the_origin_and_ranks_in_one_place_share_a_line() -> None:
    busy = rank(0, doing="forward of vision, stage 0, microbatch 3")
    ranks, lines = origins(busy, rank(1, waits=ROWS), rank(2, waits=ROWS))
    assert ranks == (0,)
    assert lines == [
        "origin: rank 0 (vision, lane 0) is furthest behind: at step 7, in 'forward and "
        "backward': forward of vision, stage 0, microbatch 3, for 61 s",
        "rank 1 (vision, lane 0), rank 2 (vision, lane 0): at step 7, in 'forward and backward', "
        f"waits for {ROWS}, for 61 s",
    ]


@pytest.mark.parametrize("other", [rank(0, "gradients"), rank(0, seconds=2.0)])
def test_of_ranks_that_wait_for_nobody_and_stand_still_the_origin_is_the_one_furthest_behind(
    other: RankState,
) -> None:
    assert origins(other, rank(1, "batch"), rank(2, waits=ROWS))[0] == (1,)


def test_a_rank_that_does_not_answer_comes_before_all_others() -> None:
    silent = rank(1, in_hang=False)
    ranks, lines = origins(rank(0), silent, rank(2, waits=ROWS), num_ranks=4)
    assert ranks == (1, 3)
    assert lines[0].startswith(
        "origin: rank 1 (vision, lane 0) does not answer, last seen at step 7"
    )
    assert "node1" in lines[0]
    assert lines[1] == "origin: rank 3 is not there: it has ended, or never came"


def test_ranks_that_all_answer_on_two_hosts_may_have_no_network_between_them() -> None:
    there = {"host": "node2", "waits": "the sum over all ranks"}
    ranks, lines = origins(rank(0, waits=ROWS), rank(1, **there), rank(2, **there))
    cut = "; or no message gets through between node1 (rank 0) and node2 (rank 1, 2)"
    assert (ranks, lines[0]) == ((), f"origin: none; all ranks wait for each other{cut}")
    _, lines = origins(rank(0), rank(1, **there), rank(2, in_hang=False))
    assert "no message" not in "".join(lines)


# ------------------------------------------------------------------------ failed collectives


@pytest.fixture
def monitor(tmp_path: Path) -> Callable[[int], HangMonitor]:
    return lambda rank: HangMonitor(tmp_path, rank, 3, f"language, lane {rank}", timeout_seconds=1)


def fail(monitor: HangMonitor, error: Exception) -> None:
    with monitor.watched():
        raise error


def test_a_rank_that_failed_is_named_with_its_error_at_once(
    monitor: Callable[[int], HangMonitor],
) -> None:
    other = monitor(1)
    other.at(7, "update")
    with pytest.raises(KeyError):
        fail(other, KeyError("the cause"))
    started = time.monotonic()
    with pytest.raises(RankLost) as caught:
        fail(monitor(2), RuntimeError(LOST))
    assert time.monotonic() - started < 1
    assert str(caught.value) == (
        "rank 1 (language, lane 1) failed at step 7, in 'update': KeyError: 'the cause'"
    )
    assert caught.value.waits_for == (1,)
    assert LOST in str(caught.value.__cause__)


def test_an_error_of_this_rank_alone_stays_as_it_is_and_ranks_that_ended_leave_no_file(
    monitor: Callable[[int], HangMonitor], tmp_path: Path
) -> None:
    with monitor(0).watched(), pytest.raises(ValueError, match="own"):
        fail(monitor(1), ValueError("own"))
    with monitor(1).watched():
        pass
    assert not (tmp_path / "ranks").exists()


def test_an_error_of_the_bridge_is_not_delayed_and_names_a_silent_rank_as_well(
    monitor: Callable[[int], HangMonitor], tmp_path: Path
) -> None:
    stopped = monitor(2)
    with ExitStack() as stack:
        stack.enter_context(stopped.watched())
        stopped._left.set()  # it does not write any more
        long_ago = time.time() - 60
        os.utime(tmp_path / "ranks" / "rank_2.json", (long_ago, long_ago))
        error = BridgeError("rows did not arrive", waits_for=[0])
        with pytest.raises(BridgeError) as caught:
            fail(monitor(1), error)
    assert caught.value is error
    (note,) = error.__notes__
    assert note.startswith("rank 2 (language, lane 2) does not answer, last seen at step 0, in")
