"""A run folder that disappears, or has no room for metrics: the run ends soon and says so."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mimo.checkpoint import reading
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.resume import Start
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.disturbed import disturbing, when_at
from tests.mimo.runs import LAYOUT

HERE = "tests.mimo.train.test_lost_folder"
SETTINGS = [*LAYOUT, "train.global_batch_size=4", "train.steps=50", "train.save_every=2"]
STRUCK = "struck"  # beside the run folders


# ----------------------------------------------------------------- what runs inside ranks


def disturb(fault: str, attempt: int, run_dir: Path, start: Start) -> None:
    def strike() -> None:
        (run_dir.parent / STRUCK).touch()
        FAULTS[fault](run_dir)

    # The checkpoint of step 2 is there; rank 1 writes the metrics, all write checkpoints.
    if os.environ["RANK"] == "1":
        when_at(2, "batch", strike)


FAULTS: dict[str, Callable[[Path], object]] = {
    "gone": lambda run_dir: run_dir.rename(run_dir.with_name("elsewhere")),
    "no room for metrics": lambda run_dir: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)),
}
SAID = {
    # Whichever file is written first: TensorBoard has a thread of its own.
    "gone": r"rank 1 failed: .*No such file or directory: b?'{run}/(metrics|tensorboard/).+'",
    "no room for metrics": r"rank 1 failed: .*File too large: '{run}/metrics\.jsonl'",
}


# -------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("fault", quick(FAULTS, "gone"))
def test_a_folder_that_cannot_be_written_ends_the_run_with_reason_and_path(
    run_ranks: RunRanks,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    runs = tmp_path / "runs"
    train = disturbing(monkeypatch, f"{HERE}:disturb", fault)
    assert train(recipe, SETTINGS) == 1
    assert time.time() - (runs / STRUCK).stat().st_mtime < 10
    text = capfd.readouterr().err
    assert re.match(SAID[fault].format(run=runs / "tiny"), text.splitlines()[-1]), text
    kept = runs / ("elsewhere" if (runs / "elsewhere").exists() else "tiny")
    checkpoint = find_checkpoint(kept)
    assert checkpoint.name == "step_2"
    assert reading.read(checkpoint)
    assert fault != "gone" or not (runs / "tiny").exists(), "it was made anew"
