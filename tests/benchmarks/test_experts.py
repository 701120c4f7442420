"""A quick run sends a row for each choice, and writes everything. No timings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import experts as bench

# Forks of a process with threads: what runs there does without them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@pytest.mark.slow
def test_a_quick_run_sends_a_row_for_each_choice_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "bench.json"
    assert bench.main(3, True, figures) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "bounds_kept=2 bounds_missed=0"
    content = json.loads(figures.read_text())
    assert [bound["value"] for bound in content["bounds"]] == [1.0, 1.0]
