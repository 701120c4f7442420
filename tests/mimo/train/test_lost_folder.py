"""A run folder that disappears, fills its disk or is read-only: the run ends soon and says so."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
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
from tests.mimo.runs import LAYOUT, command
from tests.ranks import MarkedJob

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


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


FAULTS: dict[str, Callable[[Path], object]] = {
    "gone": lambda run_dir: run_dir.rename(run_dir.with_name("elsewhere")),
    "replaced": lambda run_dir: shutil.copytree(
        run_dir.rename(run_dir.with_name("elsewhere")), run_dir
    ),
    "no room for metrics": lambda run_dir: _limit_files(64),
    "no room for a checkpoint": lambda run_dir: _limit_files(20_000),
}
SAID = {
    "gone": r"rank 1 failed: .*No such file or directory: '{run}/metrics\.jsonl'",
    "replaced": r"rank 1 failed: .*the run folder was replaced: '{run}/metrics\.jsonl'",
    "no room for metrics": r"rank 1 failed: .*File too large: '{run}/metrics\.jsonl'",
    # All ranks say the same of a save, whichever is the first.
    "no room for a checkpoint": r"rank \d failed: .* rank 1: .*File too large: '{run}/checkpoints",
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
    assert reading.read(checkpoint, reading.describe(checkpoint))
    assert fault != "gone" or not (runs / "tiny").exists(), "it was made anew"


def mounts_may_be_made() -> bool:
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0


MOUNTED = {
    "full": ("size=500k", "true", "No space left on device"),
    "read-only": (
        "size=64m",
        "(until [ -e $C/latest ]; do sleep 0.1; done;"
        " mount --bind $C $C; mount -o remount,ro,bind $C) & true",
        "Read-only file system",
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(not mounts_may_be_made(), reason="this user may not mount file systems")
@pytest.mark.parametrize("case", MOUNTED)
def test_a_disk_that_is_full_or_turns_read_only_ends_the_run_and_keeps_its_checkpoint(
    tmp_path: Path, recipe: Path, case: str
) -> None:
    size, background, reason = MOUNTED[case]
    job = MarkedJob()
    (tmp_path / "runs").mkdir()
    train = " ".join(f"'{word}'" for word in command("train", recipe, *SETTINGS))
    script = f"""
        C=runs/tiny/checkpoints
        mount -t tmpfs -o {size} none runs; cd .; {background}
        {train}; code=$?
        cat $C/latest; exit $code
    """
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=tmp_path,
        env={**job.environment, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 1, done.stderr
    assert reason in done.stderr.splitlines()[-1]
    assert str(tmp_path / "runs" / "tiny") in done.stderr.splitlines()[-1]
    assert done.stdout.splitlines()[-1].startswith("step_")
    assert not job.leftovers()
