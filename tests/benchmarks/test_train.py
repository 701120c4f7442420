"""`python -m benchmarks.train`: both sides do the same work, and what is judged. No timings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import train as bench
from benchmarks.harness import Contest, Run


@pytest.mark.slow
def test_a_quick_run_trains_both_sides_on_the_same_samples_and_writes_everything(
    tmp_path: Path,
) -> None:
    figures = tmp_path / "new" / "bench.json"
    # Its sides use several threads, which hang in a fork of a process that has used them, too.
    command = [sys.executable, "-m", "benchmarks.train", "--quick", "--json", str(figures)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "bounds_kept=4 bounds_missed=0"
    runs = json.loads(figures.read_text())["runs"]
    assert {*runs} == {*bench.GOALS}
    for sides in runs.values():
        assert [*sides] == ["ours", "transformers"]
        assert all(len(of_side) == 1 for of_side in sides.values())


def steps_of(seconds: tuple, losses: tuple = (1.0, 1.0, 1.0), tokens: int = 100) -> list[Run]:
    taken = zip(seconds, losses, strict=True)
    return [Run(took, result={"loss": loss, "tokens": tokens}) for took, loss in taken]


def judged(theirs: list[Run]) -> dict[str, bool]:
    runs = {"ours": steps_of((1.0, 2.0, 1.0)), "transformers": theirs}
    bounds = bench.judge([Contest(lengths, runs) for lengths in bench.GOALS])
    return {bound.name: bound.holds for bound in bounds}


def test_speed_is_the_median_of_ratios_within_rounds() -> None:
    assert all(judged(steps_of((2.0, 3.0, 2.0))).values())
    slow = judged(steps_of((2.0, 3.0, 1.9)))
    assert not slow["long-tailed: times faster"]
    assert slow["equal: times faster"]


def test_other_losses_or_tokens_are_another_work() -> None:
    same = (2.0, 4.0, 2.0)
    assert not judged(steps_of(same, (1.001, 1.0, 1.0)))["equal: relative difference of losses"]
    assert not judged(steps_of(same, tokens=99))["equal: difference of real tokens"]
