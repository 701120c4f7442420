"""What all benchmarks share: turns, ratios, and processes of their own."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.harness import Apart, Contest, Run, apart, take_turns

# Forks of a process with threads: what runs there does without them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def test_everyone_runs_once_a_round_and_nobody_is_always_first() -> None:
    order = []
    runs = take_turns(
        {name: lambda name=name: order.append(name) or Run(1.0) for name in "abcde"}, rounds=5
    )
    rounds = [order[at : at + 5] for at in range(0, 25, 5)]
    assert all(sorted(one) == [*"abcde"] for one in rounds)
    assert {one[0] for one in rounds} == {*"abcde"}
    assert all(len(own) == 5 for own in runs.values())


def test_the_ratio_is_the_median_of_pairs_not_the_ratio_of_medians() -> None:
    runs = {"ours": (10.0, 20.0, 10.0), "theirs": (60.0, 100.0, 40.0)}
    contest = Contest("", {name: [Run(one) for one in own] for name, own in runs.items()})
    assert contest.ratios("theirs") == [6.0, 5.0, 4.0]
    assert contest.ratio("theirs") == 5.0


def test_a_process_keeps_its_state_and_its_memory_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The host's shared memory is that of other tests, too.
    monkeypatch.setattr(harness, "_shared_memory", lambda: 0)

    def make():
        kept = []

        def grow(num_bytes: int) -> Run:
            kept.append(np.ones(num_bytes, np.uint8))
            time.sleep(1)
            return Run(1.0, found=len(kept))

        return grow

    with Apart(make) as process:
        process(1)  # at first it shares more with the process that it was forked from
        small, large = process(1), process(800 << 20)
    assert (small.found, large.found) == (2, 3)
    assert large.peak_bytes - small.peak_bytes > 400 << 20


def test_a_failure_in_a_process_of_the_benchmark_is_raised_with_its_cause() -> None:
    def divide() -> Any:
        return 1 // 0

    with pytest.raises(RuntimeError, match=r"(?s)failed:.*return 1 // 0.*ZeroDivisionError"):
        apart(divide)
    with Apart(divide) as process:
        process._process.join(10)  # before it was asked anything
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            process()
    with pytest.raises(RuntimeError, match="ended with exit code -9"):
        apart(lambda: os.kill(os.getpid(), signal.SIGKILL))
