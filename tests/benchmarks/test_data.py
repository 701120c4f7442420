"""`python -m benchmarks.data`: all loaders do the same work, and what is judged. No timings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import data as bench
from benchmarks.harness import Contest, Run

# Forks of a process with threads: what runs there does without them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@pytest.mark.slow  # what is judged of a run is quick, below
def test_a_quick_run_gives_all_loaders_the_same_samples_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    figures = tmp_path / "new" / "bench.json"
    assert bench.main(3, True, figures) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "bounds_kept=2 bounds_missed=0"
    found = json.loads(figures.read_text())
    rivals = {where: [*loaders][1] for where, loaders in found["runs"].items()}
    assert rivals == {
        "0 workers": "webdataset",
        "2 workers": "webdataset",
        "1 ranks of a lane": "DataLoader",
        "2 ranks of a lane": "DataLoader",
    }
    for loaders in found["runs"].values():
        assert {passes[0]["result"]["samples"] for passes in loaders.values()} == {16}
        assert all(len(passes) == 1 for passes in loaders.values())


def judged(*processor_seconds: float, samples: int = 8, tokens: int = 99) -> dict[str, bool]:
    ours = [Run(n, n, result={"samples": 8, "tokens": 99}) for n in (1, 2, 1)]
    result = {"samples": samples, "tokens": tokens}
    theirs = [Run(9, seconds, result=result) for seconds in processor_seconds]
    contest = Contest("small", {"ours": ours, "webdataset": theirs})
    return {bound.name: bound.holds for bound in bench.judge([contest], 8)}


def test_the_speed_is_the_median_of_ratios_of_cpu_seconds_within_rounds() -> None:
    name = "CPU time of webdataset: small, by ours"
    assert judged(1.5, 3, 9)[name]
    assert not judged(1.4, 2.8, 9)[name]


def test_missing_samples_and_other_tokens_are_missed_bounds() -> None:
    assert all(judged(2, 4, 2).values())
    assert not judged(2, 4, 2, samples=7)["samples that a pass left out"]
    assert not judged(2, 4, 2, tokens=98)["difference of tokens"]


def test_a_single_rank_of_a_lane_is_not_judged() -> None:
    runs = {
        name: [Run(1, 1, result={"samples": 8, "tokens": 9})] for name in ("ours", "DataLoader")
    }
    contests = [Contest(f"{number} ranks of a lane", runs) for number in (1, 2)]
    names = [bound.name for bound in bench.judge(contests, 8)][2:]
    assert names == ["CPU time of DataLoader: 2 ranks of a lane, by ours"]
