"""The times of a start: each phase's largest, with its rank."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mimo.train.startup import Startup, began_at
from tests.conftest import RunRanks


def start(rank: int, folder: Path) -> list[str]:
    """One rank; the later its number, the longer its start. What is said."""
    said, startup = list[str](), Startup()
    startup.begin(time.time() - 10 * (rank + 1))
    startup.ends("start and imports")
    startup.ends("groups")
    for _ in range(2):  # once
        startup.tell(folder, said.append if rank == 1 else None)
    return said


def test_one_rank_says_which_rank_was_the_slowest_in_each_phase(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    first, (line,), last = run_ranks(start, 3, tmp_path)
    assert first == last == []
    assert line.startswith("startup 30.")
    assert "start and imports 30." in line
    assert "(rank 2)" in line
    assert "meeting" not in line
    told = json.loads((tmp_path / "startup.json").read_text())
    assert told["ranks"] == 3
    phase = told["phases"]["start and imports"]
    assert phase["rank"] == 2
    assert phase["seconds"] == pytest.approx(30, abs=5)
    assert phase["mean"] == pytest.approx(20, abs=5)


def test_a_job_of_srun_began_when_its_script_called_srun_and_others_when_the_process_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert time.time() - 24 * 3600 < began_at() < time.time()
    monkeypatch.setenv("MIMO_BEGAN", "1700000000.25")
    assert began_at() == 1700000000.25
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of an earlier attempt, perhaps")
    assert began_at() > 1700000000.25
