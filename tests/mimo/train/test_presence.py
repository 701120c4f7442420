"""Who is to blame when a collective fails, as the files of the ranks tell it; without ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from bridge import BridgeError
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.parallel.build import build_layout
from mimo.train.presence import Presence, RankLost
from tests.mimo import tiny
from tests.mimo.runs import LAYOUT

LOST = "Connection closed by peer"


@pytest.fixture
def present(tmp_path: Path) -> Callable[[int], Presence]:
    layout = build_layout(load_recipe(tiny.write_recipe(tmp_path), LAYOUT))
    return lambda rank: Presence(tmp_path / "ranks", layout, rank, timeout_seconds=1)


def fail(presence: Presence, error: Exception) -> None:
    with presence.watched():
        raise error


def write_long_ago(folder: Path, rank: int) -> None:
    file = folder / "ranks" / f"rank_{rank}.json"
    os.utime(file, (time.time() - 60, time.time() - 60))


def test_a_rank_that_failed_is_named_with_its_error_at_once(
    present: Callable[[int], Presence],
) -> None:
    other = present(1)
    other.at(7, "update")
    with pytest.raises(KeyError):
        fail(other, KeyError("the cause"))
    started = time.monotonic()
    with pytest.raises(RankLost) as caught:
        fail(present(2), RuntimeError(LOST))
    assert time.monotonic() - started < 1
    assert str(caught.value) == (
        "rank 1 (language, lane 0) failed at step 7, in 'update': KeyError: 'the cause'"
    )
    assert caught.value.waits_for == (1,)
    assert LOST in str(caught.value.__cause__)


def test_an_error_of_this_rank_alone_stays_as_it_is_and_ranks_that_ended_leave_no_file(
    present: Callable[[int], Presence], tmp_path: Path
) -> None:
    with present(0).watched(), pytest.raises(ValueError, match="own"):
        fail(present(1), ValueError("own"))
    with present(1).watched():
        pass
    assert not (tmp_path / "ranks").exists()


def test_an_error_of_the_bridge_is_not_delayed_and_names_a_lost_rank_as_well(
    present: Callable[[int], Presence], tmp_path: Path
) -> None:
    stopped = present(2)
    with ExitStack() as stack:
        stack.enter_context(stopped.watched())
        stopped._left.set()  # it does not write any more
        write_long_ago(tmp_path, 2)
        error = BridgeError("rows did not arrive", waits_for=[0])
        with pytest.raises(BridgeError) as caught:
            fail(present(1), error)
    assert caught.value is error
    (note,) = error.__notes__
    assert note.startswith("rank 2 (language, lane 1) does not answer, last seen at step 0, in")
