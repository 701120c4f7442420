"""What all benchmarks share: turns, ratios, and processes of their own."""

from __future__ import annotations

import os
import signal
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from benchmarks.harness import Contest, Run, take_turns, workers

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


def test_processes_keep_their_state_between_calls_and_the_first_one_answers() -> None:
    def make(first: int):
        calls = [first]

        def call(number: int) -> Run:
            calls.append(number)
            return Run(1.0, result=sum(calls))

        return call

    with workers(lambda: make(0), lambda: make(100)) as call:
        assert [call(number).result for number in (1, 2, 3)] == [1, 3, 6]


def test_a_failure_in_a_process_of_the_benchmark_is_raised_with_its_cause() -> None:
    def divide() -> Any:
        return 1 // 0

    with (
        workers(lambda: int, lambda: divide) as call,
        pytest.raises(ZeroDivisionError) as raised,
    ):
        call()
    assert "return 1 // 0" in str(raised.value.__cause__), "the traceback of the process"
    killed = workers(lambda: lambda: os.kill(os.getpid(), signal.SIGKILL))
    for processes in (workers(divide), killed):
        with processes as call, pytest.raises(BrokenProcessPool):
            call()
