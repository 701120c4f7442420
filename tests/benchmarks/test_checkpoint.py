"""Every way of saving writes the same state, and what is judged. No timings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import checkpoint as bench
from benchmarks.harness import Contest, Run

# Forks of a process with threads: what runs there does without them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@pytest.mark.slow
def test_a_quick_run_saves_the_state_in_every_way_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "bench.json"
    assert bench.main(3, True, figures) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "bounds_kept=1 bounds_missed=0"
    (runs,) = json.loads(figures.read_text())["runs"].values()
    assert (*runs,) == bench.CONTESTANTS
    for saves in runs.values():
        assert saves[0]["seconds"] > 0
        assert saves[0]["result"]["total"] > 0


def judged(speed: bool, **changed: tuple[float, float, int]) -> list[bool]:
    """Judge three ways to save. changed: seconds blocked, seconds in all, and bytes of files."""
    figures = {"async": (0.2, 1.5, 100), "sync": (1.4, 1.5, 100), bench.SAVE: (1.0, 1.0, 100)}
    runs = {
        name: 2 * [Run(blocked, result={"total": total, "files": files})]
        for name, (blocked, total, files) in (figures | changed).items()
    }
    return [bound.holds for bound in bench.judge(Contest("", runs), speed)]


def test_what_is_promised_is_judged_against_torch_save() -> None:
    assert judged(True) == [True] * 4
    changed = {"async": (0.4, 2.1, 100), "sync": (3.0, 3.0, 100), "DCP": (1.0, 1.0, 110)}
    assert judged(True, **changed) == [False] * 4
    assert judged(False, **changed) == [False]
