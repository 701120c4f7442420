"""`mimo bench train`: both sides do the same work, and what is judged. No timings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mimo.bench import train as bench
from mimo.bench.train_report import judge
from mimo.bench.train_result import OURS, THEIRS, Steps, order_of_turns
from mimo.bench.train_theirs import batches_of
from mimo.bench.train_workload import Sizes, Workload

LENGTHS = [30, 10, 90, 20, 10, 40, 10, 10, 50]


def test_a_quick_run_trains_both_sides_on_the_same_samples_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, figures = tmp_path / "new" / "bench.png", tmp_path / "bench.json"
    assert bench.main(8, 3, 1, True, figures, picture) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "bounds_kept=6 bounds_missed=0"
    assert "log-normal" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(figures.read_text())
    steps = {one["contestant"]: one for one in found["steps"]}
    assert [*steps] == [*OURS, *THEIRS]
    for one in steps.values():
        assert len(one["losses"]) == 2
        assert len(one["seconds"]) == 1
        assert one["losses"][1] < one["losses"][0], "the second step profits from the first"
    assert steps["packed"]["computed"] == steps["packed"]["tokens"] == steps["padded"]["tokens"]
    assert steps["sorted"]["computed"] < steps["padded"]["computed"]
    assert steps["batched equal"]["computed"] == steps["batched equal"]["tokens"]
    assert found["times_faster"].keys() == {
        "packed / padded",
        "packed / sorted",
        "packed equal / batched equal",
    }
    assert 0 < found["overhead"]["operators"] < 1


def test_batches_of_transformers_hold_every_sample_once() -> None:
    padded = batches_of("padded", LENGTHS, 100)
    assert padded == [[0, 1, 2, 3, 4, 5, 6, 7], [8]]
    by_length = batches_of("sorted", LENGTHS, 100)
    assert by_length == [[1, 4, 6, 7, 3], [0, 5], [8], [2]]
    assert all(len(own) * max(LENGTHS[n] for n in own) <= 100 for own in by_length)
    assert batches_of("batched equal", LENGTHS, 100) == [[*range(9)]]


def test_everyone_runs_once_a_round_and_nobody_is_always_first() -> None:
    turns = order_of_turns(5)
    rounds = [turns[at : at + 5] for at in range(0, 25, 5)]
    assert all(sorted(one) == sorted([*OURS, *THEIRS]) for one in rounds)
    assert {one[0] for one in rounds} == {*OURS, *THEIRS}


def test_microbatches_have_about_the_wanted_tokens(tmp_path: Path) -> None:
    workload = Workload(tmp_path, Sizes(samples=32, tokens=4096))
    assert workload._samples_together("long-tailed", 256.0) == 16
    assert workload._samples_together("long-tailed", 5000.0) == 1
    assert workload._samples_together("equal", 10.0) == 16


# One step of 100 tokens a second for ours, in three rounds.
TIMES = (1.0, 2.0, 1.0)
STEPS = [Steps(name, 100, 100, 1, (2.0, 1.0), TIMES, TIMES) for name in (*OURS, *THEIRS)]


def judged(**changes: Steps) -> dict[str, bool]:
    steps = [changes.get(one.contestant.replace(" ", "_"), one) for one in STEPS]
    return {bound.name: bound.holds for bound in judge(steps)}


def changed(name: str, **values: object) -> dict[str, Steps]:
    (one,) = [step for step in STEPS if step.contestant == name]
    return {name.replace(" ", "_"): replace(one, **values)}  # type: ignore[arg-type]


def test_speed_is_the_median_of_ratios_within_rounds() -> None:
    fast = judged(**changed("padded", seconds=(2.0, 3.0, 2.0)))
    assert fast["packed against padded, times faster"]
    slow = judged(**changed("padded", seconds=(2.0, 3.0, 1.9)))
    assert not slow["packed against padded, times faster"]
    assert not slow["packed equal against batched equal, times faster"]


def test_other_losses_or_tokens_are_another_work() -> None:
    name = "packed, sorted: relative difference of losses"
    assert judged()[name]
    assert not judged(**changed("sorted", losses=(2.0, 1.001)))[name]
    assert not judged(**changed("sorted", tokens=99))["packed, sorted: difference of real tokens"]
