"""What all benchmarks share: turns, ratios, and processes of their own."""

from __future__ import annotations

import os
import signal
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from benchmarks.harness import Contest, Run, Worker, in_subprocess, take_turns

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


def test_a_process_keeps_its_state_between_calls() -> None:
    def make():
        calls = []

        def call(number: int) -> Run:
            calls.append(number)
            return Run(1.0, result=sum(calls))

        return call

    with Worker(make) as process:
        assert [process(number).result for number in (1, 2, 3)] == [1, 3, 6]


def test_a_failure_in_a_process_of_the_benchmark_is_raised_with_its_cause() -> None:
    def divide() -> Any:
        return 1 // 0

    for process in (Worker(divide), Worker(lambda: divide)):  # when it starts, when it is called
        with process, pytest.raises(ZeroDivisionError) as raised:
            process()
        assert "return 1 // 0" in str(raised.value.__cause__), "the traceback of the process"
    with pytest.raises(BrokenProcessPool):
        in_subprocess(lambda: os.kill(os.getpid(), signal.SIGKILL))
