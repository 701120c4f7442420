"""A run that cannot write a checkpoint: it ends soon, says why, and keeps the last good one."""

from __future__ import annotations

import re
import resource
import subprocess
import time
from pathlib import Path

import pytest

from mimo.checkpoint.folder import latest_checkpoint
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.resume import FromScratch
from mimo.checkpoint.save import Saver
from mimo.config.schema import Recipe
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.runtime.ranks import launch, rank_environment
from mimo.train.run_folder import make_run_dir
from tests.cases import quick_values
from tests.mimo import tiny
from tests.mimo.checkpoint.test_saving import assert_intact
from tests.mimo.runs import metrics

HERE = "tests.mimo.train.test_failed_saves"

# What is done before the save of step 20, and the error.
FAULTS = {
    "limit": r"rank 0: \[Errno 27\] File too large: '.*/tensors_0.safetensors'",
    "full disk": r"rank \d: \[Errno 28\] No space left on device: '.*'",
    "read-only": r"rank 0: \[Errno 30\] Read-only file system: '.*'",
}
CASES = {
    f"{fault}, {kind}": (fault, kind == "async") for fault in FAULTS for kind in ("sync", "async")
}


def mount(folder: Path, *options: str) -> bool:
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def run_spoilt_rank(fault: str, recipe: Recipe, layout: Layout, run_dir: Path) -> None:
    """Runs inside ranks: train, and spoil the folder before the second save, of step 20."""
    from mimo.train.entry import run_rank

    environment, begin = rank_environment(), Saver.begin
    assert environment is not None

    def spoil(self, progress):
        if progress.step == 20:
            self.wait()
            if environment.rank == 0 and fault == "limit":  # it has the vision tower
                resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
            if environment.rank == 0 and fault == "read-only":
                assert mount(run_dir / "checkpoints", "-o", "remount,ro")
        return begin(self, progress)

    Saver.begin = spoil  # type: ignore[method-assign]
    run_rank(recipe, layout, run_dir, FromScratch(), run_dir, time.monotonic())


@pytest.mark.parametrize("case", quick_values(CASES, "limit, async"))
def test_a_run_that_cannot_save_ends_with_file_reason_and_the_last_good_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], case: tuple[str, bool]
) -> None:
    fault, overlap = case
    tiny.write_samples(tmp_path)
    settings = [f"train.async_save={str(overlap).lower()}", "train.steps=30"]
    settings += ["train.save_every=10"]
    recipe = load_recipe(tiny.write_recipe(tmp_path), settings)
    layout = check_recipe(recipe, None)
    run_dir = make_run_dir(recipe, resumes=False)
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir()
    # There is room for one checkpoint and a half.
    is_mounted = fault != "limit" and mount(checkpoints, "-o", "size=250k")
    if fault != "limit" and not is_mounted:
        pytest.skip("mounting a folder is for the superuser")
    try:
        args = (fault, recipe, layout, run_dir)
        code = launch(f"{HERE}:run_spoilt_rank", args, layout.world_size, log_dir=run_dir)
        assert code == 1
        start = f"the checkpoint of step 20 in {checkpoints} was not written: {FAULTS[fault]}; "
        end = f"the last good checkpoint is {checkpoints / 'step_10'}"
        errors = capfd.readouterr().err
        assert re.search(rf"\nrank \d failed: \S+CheckpointFailed: {start}{end}\n", errors), errors
        lines = metrics(tmp_path / "tiny.yaml")
        saved = [line["step"] for line in lines if "save_seconds" in line]
        assert saved == ([9, 19] if overlap and fault != "read-only" else [9])
        assert len(lines) < 29, "it does not wait for the next save"
        assert latest_checkpoint(run_dir) == checkpoints / "step_10"
        assert_intact(checkpoints / "step_10")
        assert {path.name for path in checkpoints.iterdir()} <= {"step_10", "latest"}
    finally:
        if is_mounted:
            subprocess.run(["umount", str(checkpoints)], check=True)
