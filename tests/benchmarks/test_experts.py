"""A quick run sends a token's row to a rank once, and writes everything. No timings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import experts as bench

# Forks of a process with threads: what runs there does without them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@pytest.mark.slow
def test_a_quick_run_sends_a_row_to_a_rank_once_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "bench.json"
    assert bench.main(3, True, figures) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "bounds_kept=6 bounds_missed=0"
    content = json.loads(figures.read_text())
    values = [bound["value"] for bound in content["bounds"][:4]]
    assert values[::2] == [1.0, 1.0]
    assert all(1 < value < 1.05 for value in values[1::2])
    runs = content["runs"]
    assert [*runs] == ["2 ranks", "4 ranks", *(name for name in runs if "delta rule" in name)]
    assert all(run["result"]["peak"] for name in [*runs][2:] for (run,) in runs[name].values())
