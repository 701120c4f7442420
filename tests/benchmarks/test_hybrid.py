"""Both compute the same, and what is judged. No timings."""

from __future__ import annotations

import pytest

from benchmarks import hybrid as bench
from benchmarks.harness import Contest, Run

# Forks of a process with threads: what runs there does without them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def test_a_quick_run_computes_the_same_in_both_ways() -> None:
    contests = bench.contests(3, quick=True)
    assert [bound.holds for bound in bench.judge(contests, speed=False)] == [True, True]
    for contest in contests:
        assert (*contest.runs,) == (bench.OURS, bench.THEIRS)
        for (run,) in contest.runs.values():
            assert len(run.result["norms"]) == 6
            assert run.result["peak"] > 0


def judged(speed: bool, seconds: float, peak: int, norm: float) -> list[bool]:
    """Judge runs of ours, against one of a second and 100 bytes."""
    runs = {
        bench.OURS: [Run(seconds, result={"peak": peak, "norms": [1.0, norm]})],
        bench.THEIRS: [Run(1.0, result={"peak": 100, "norms": [1.0, 2.0]})],
    }
    return [bound.holds for bound in bench.judge([Contest("", runs)], speed)]


def test_what_is_promised_is_judged_against_transformers() -> None:
    assert judged(True, 0.6, 50, 2.00001) == [True] * 3
    assert judged(True, 0.7, 70, 2.001) == [False] * 3
    assert judged(False, 0.7, 70, 2.00001) == [True]
