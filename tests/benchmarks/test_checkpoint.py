"""Every way of saving writes the same state, and what is judged. No timings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import checkpoint as bench
from benchmarks.harness import Run

# Forks of a process with threads: what runs there does without them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@pytest.mark.slow
def test_a_quick_run_saves_the_state_in_every_way_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "bench.json"
    assert bench.main(3, True, figures) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "bounds_kept=2 bounds_missed=0"
    found = json.loads(figures.read_text())["runs"]
    assert (*found,) == bench.OPTIMIZERS
    for runs in found.values():
        assert (*runs,) == bench.CONTESTANTS
        for own in runs.values():
            assert own[0]["seconds"] > 0
            assert own[0]["result"]["total"] > 0


def test_what_is_promised_is_judged_against_torch_save() -> None:
    def run(blocked: float, total: float, files: int = 100, share: float = 1.0) -> list[Run]:
        found = {"total": total, "files": files, "state": 100, "share": share}
        return 2 * [Run(blocked, result=found)]

    runs = {"async": run(0.2, 1.5), "sync": run(1.4, 1.5), bench.SAVE: run(1.0, 1.0)}
    assert all(bound.holds for bound in bench.judge("plain", runs, speed=True))
    other = {"async": run(0.4, 2.1, share=1.3), "sync": run(3.0, 3.0), "DCP": run(1, 1, files=110)}
    judged = bench.judge("plain", runs | other, speed=True)
    assert [bound.holds for bound in judged] == [False] * 5
    assert len(bench.judge("plain", runs | other, speed=False)) == 1


def test_a_turn_takes_as_long_as_its_last_rank_and_writes_what_all_write() -> None:
    def rank(seconds: float, growth: int) -> Run:
        found = {"longer": seconds / 2, "total": 2 * seconds}
        found |= {"growth": growth, "state": 10, "files": 21}
        return Run(seconds, result=found)

    turn = bench.together([lambda: rank(2.0, 5), lambda: rank(1.0, 12)])
    found = {"longer": 1.0, "total": 4.0, "growth": 12, "share": 1.2, "state": 20, "files": 21}
    assert turn == Run(2.0, result=found)
