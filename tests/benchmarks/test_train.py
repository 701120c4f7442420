"""`python -m benchmarks.train`: both sides do the same work, and what is judged. No timings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import train as bench
from benchmarks.harness import Run
from benchmarks.train import OURS, THEIRS, batches_of

# Forks of a process with threads: what runs there does without them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

LENGTHS = [30, 10, 90, 20, 10, 40, 10, 10, 50]


@pytest.mark.slow
def test_a_quick_run_trains_both_sides_on_the_same_samples_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "new" / "bench.json"
    assert bench.main(3, 1, True, figures) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "bounds_kept=6 bounds_missed=0"
    found = json.loads(figures.read_text())
    runs = found["runs"]["long-tailed"] | found["runs"]["equal"]
    assert {*runs} == {*OURS, *THEIRS}
    assert all(len(of_contestant) == 1 for of_contestant in runs.values())
    steps = {name: own[0]["result"] for name, own in runs.items()}
    assert steps["packed"]["computed"] == steps["packed"]["tokens"] == steps["padded"]["tokens"]
    assert steps["sorted"]["computed"] < steps["padded"]["computed"]
    assert steps["batched equal"]["computed"] == steps["batched equal"]["tokens"]


def test_batches_of_transformers_hold_every_sample_once() -> None:
    padded = batches_of("padded", LENGTHS, 100)
    assert padded == [[0, 1, 2, 3, 4, 5, 6, 7], [8]]
    by_length = batches_of("sorted", LENGTHS, 100)
    assert by_length == [[1, 4, 6, 7, 3], [0, 5], [8], [2]]
    assert all(len(own) * max(LENGTHS[n] for n in own) <= 100 for own in by_length)
    assert batches_of("batched equal", LENGTHS, 100) == [[*range(9)]]


def steps_of(seconds: tuple, losses: tuple = (2.0, 1.0, 1.0, 1.0), tokens: int = 100) -> list[Run]:
    """Four steps, the first of which is not timed."""
    taken = zip((99.0, *seconds), losses, strict=True)
    return [Run(took, result={"loss": loss, "tokens": tokens}) for took, loss in taken]


def judged(**changed: list[Run]) -> dict[str, bool]:
    same = {name: steps_of((1.0, 2.0, 1.0)) for name in (*OURS, *THEIRS)}
    return {bound.name: bound.holds for bound in bench.judge(same | changed)}


def test_speed_is_the_median_of_ratios_within_rounds() -> None:
    assert judged(padded=steps_of((2.0, 3.0, 2.0)))["packed against padded, times faster"]
    slow = judged(padded=steps_of((2.0, 3.0, 1.9)))
    assert not slow["packed against padded, times faster"]
    assert not slow["packed equal against batched equal, times faster"]


def test_other_losses_or_tokens_are_another_work() -> None:
    name, same = "packed, sorted: relative difference of losses", (1.0, 2.0, 1.0)
    assert judged()[name]
    assert not judged(sorted=steps_of(same, losses=(2.0, 1.001, 1.0, 1.0)))[name]
    other = judged(sorted=steps_of(same, tokens=99))
    assert not other["packed, sorted: difference of real tokens"]
