"""Checkpoints in their folder: which stay, how a run continues its data, `mimo checkpoint`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mimo.checkpoint.folder import (
    Progress,
    drop_old,
    publish,
    read_progress,
    to_remove,
    write_progress,
)
from mimo.cli.main import app
from mimo.errors import InputError
from mimo.runtime.run_lock import run_lock
from tests.mimo.checkpoint.manifests import flip_bit, small_checkpoint


def make_folders(checkpoints: Path, *steps: int) -> None:
    """Make empty folders of checkpoints, the newest last."""
    for age, step in enumerate(steps):
        (checkpoints / f"step_{step}").mkdir(parents=True)
        os.utime(checkpoints / f"step_{step}", (1000 + age, 1000 + age))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoint_stays_whatever_its_step(tmp_path: Path, keep: int) -> None:
    make_folders(tmp_path, 1500, 300, 600)  # resumed from an earlier step
    drop_old(tmp_path, keep, newest=tmp_path / "step_600")
    remaining = {path.name for path in tmp_path.iterdir()}
    assert remaining == set(["step_600", "step_300", "step_1500"][:keep])


def test_keep_every_keeps_checkpoints_beside_the_last_ones(tmp_path: Path) -> None:
    make_folders(tmp_path, 100, 200, 250, 300, 350, 400)
    (tmp_path / "step_300.old").mkdir()  # somebody's copy
    newest = tmp_path / "step_400"
    removed = [path.name for path in to_remove(tmp_path, 2, 200, newest)]
    assert removed == ["step_100", "step_250", "step_300"]
    assert [p.name for p in to_remove(tmp_path, 3, None)] == ["step_100", "step_200", "step_250"]
    drop_old(tmp_path, 2, newest, 200)
    remaining = {path.name for path in tmp_path.iterdir()}
    assert remaining == {"step_200", "step_350", "step_400", "step_300.old"}


def test_the_checkpoint_of_latest_stays_though_another_is_newer(tmp_path: Path) -> None:
    make_folders(tmp_path, 100, 300, 200)
    (tmp_path / "latest").write_text("step_100")
    (tmp_path / "step_100" / "progress.json").write_text("{}")
    assert [path.name for path in to_remove(tmp_path, 1, None)] == ["step_300", "step_200"]


def test_a_checkpoint_is_on_disk_before_an_older_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: events.append(Path(f"/proc/self/fd/{fd}").readlink().name)
    )
    rmtree = shutil.rmtree

    def remove(path: Path, ignore_errors: bool) -> None:
        events.append(f"removed {path.name}")
        rmtree(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove)
    for step in (1, 2):
        events.clear()
        partial = tmp_path / "checkpoints" / ".partial"
        partial.mkdir(parents=True)
        publish(partial, Progress(step, step), "name: x", keep=1)
    synced = events[: events.index("removed .step_1.removed")]
    assert {".progress.json", ".recipe.yaml", ".latest", "checkpoints"} <= set(synced)
    assert synced.index(".manifest.json") < synced.index(".partial") < synced.index(".latest")
    assert synced[-2:] == [".latest", "checkpoints"]


@pytest.mark.parametrize(
    "text",
    ['{"step": 5, "samples": 2, "passed_over": ["x"]}', '{"step": 5', "[]"],
)
def test_damaged_progress_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "progress.json").write_text(text)
    with pytest.raises(
        InputError, match=r"(?s)progress.json is damaged: .*copy the checkpoint again"
    ):
        read_progress(tmp_path)


def test_a_sample_that_is_skipped_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    once = Progress(step=5, samples=60).with_skipped({(0, 7)})
    write_progress(tmp_path, once)
    assert read_progress(tmp_path) == once
    assert once.with_skipped({(0, 7), (1, 7)}).skipped_samples == 2


def call(*arguments: object) -> tuple[int, str, str]:
    """Exit code, output, and errors of `mimo checkpoint`."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def steps_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3, 4, 5):
        small_checkpoint(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run"


def test_inspect_shows_what_a_checkpoint_holds(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "run" / "checkpoints", 7)
    code, printed, _ = call("inspect", tmp_path / "run")
    assert code == 0
    assert "step 7, 28 samples used" in " ".join(printed.split())
    row = [cell.strip() for cell in printed.split("│")[1:5]]
    assert row == ["language", "4,000", "float32", "none"]


def test_verify_names_every_damaged_file_of_every_checkpoint_of_a_run(run: Path) -> None:
    checkpoints = run / "checkpoints"
    code, printed, _ = call("verify", run)
    assert (code, printed.count(": intact\n")) == (0, 5)
    (checkpoints / "step_1" / "manifest.json").unlink()
    flip_bit(checkpoints / "step_2" / "tensors_0.safetensors")
    flip_bit(checkpoints / "step_2" / "assets" / "tokenizer.json")
    (checkpoints / "step_4" / "progress.json").unlink()
    code, printed, _ = call("verify", run)
    assert code == 1
    assert printed.count(": intact\n") == 2
    lines = printed.splitlines()
    assert "manifest.json is missing or without checksums of blocks" in lines[0]
    assert sorted(line.split(": ")[1].split(" ")[0] for line in lines if "step_2:" in line) == [
        *("assets/tokenizer.json", "tensors_0.safetensors")
    ]
    assert f"{checkpoints / 'step_4'}: progress.json is missing" in lines
    assert call("verify", checkpoints / "step_3")[0] == 0
    assert call("verify", checkpoints / "step_4")[0] == 1
    assert call("verify", run.parent)[0] == 2


def test_prune_keeps_the_requested_checkpoints_and_the_latest(run: Path) -> None:
    (run / "checkpoints" / "latest").write_text("step_1")
    code, printed, _ = call("prune", run, "--keep", 1, "--keep-every", 2, "--dry-run")
    assert code == 0
    gone = [(run / "checkpoints" / f"step_{step}").resolve() for step in (3, 5)]
    assert printed == "".join(f"would remove {path}\n" for path in gone)
    assert len(steps_in(run)) == 5
    code, printed, _ = call("prune", run, "--keep", 1, "--keep-every", 2)
    assert code == 0
    assert printed == "".join(f"removed {path}\n" for path in gone)
    assert steps_in(run) == ["step_1", "step_2", "step_4"]
    assert call("prune", run)[0] == 0
    assert steps_in(run) == ["step_1", "step_4"]


def test_prune_covers_all_phases(tmp_path: Path) -> None:
    phases = [tmp_path / "run" / name for name in ("phase_1_a", "phase_2_b")]
    for phase in phases:
        for step in (1, 2):
            small_checkpoint(phase / "checkpoints", step)
    assert call("prune", tmp_path / "run", "--keep", 1)[0] == 0
    assert [steps_in(phase) for phase in phases] == [["step_2"], ["step_2"]]


@pytest.mark.parametrize("phase", ["", "phase_1_a"])
def test_prune_refuses_a_running_run(tmp_path: Path, phase: str) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        small_checkpoint(run / phase / "checkpoints", step)
    with run_lock(run):
        code, printed, errors = call("prune", run / phase, "--keep", 1)
    assert (code, printed) == (1, "")
    assert "another job is writing to this run folder" in errors
    assert steps_in(run / phase) == ["step_1", "step_2"]


def test_prune_needs_a_run_folder(run: Path) -> None:
    for path in (run / "checkpoints", run / "checkpoints" / "step_1", run.parent):
        assert call("prune", path)[0] == 2
    assert len(steps_in(run)) == 5
