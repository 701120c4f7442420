"""`mimo checkpoint`: what people see of checkpoints, and what is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mimo.cli.main import app
from mimo.runtime.run_lock import run_lock
from tests.mimo import tiny
from tests.mimo.checkpoint.manifests import flip_bit, small_checkpoint


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
    recipe = tiny.write_recipe(tmp_path).read_text()
    small_checkpoint(tmp_path / "run" / "checkpoints", 7, recipe)
    code, printed, _ = call("inspect", tmp_path / "run")
    assert code == 0
    text = " ".join(printed.split())
    assert "step 7, 28 samples used" in text
    assert "in 7 files, with checksums" in text
    row = [cell.strip() for cell in printed.split("│")[1:7]]
    assert row[:5] == ["language", "4,000", "-", "float32", "none"]
    assert "tp 1" in printed


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
    assert lines[0] == f"{checkpoints / 'step_1'}: readable, no checksums"
    assert sorted(line.split(": ")[1].split(" ")[0] for line in lines if "step_2:" in line) == [
        *("assets/tokenizer.json", "tensors_0.safetensors")
    ]
    assert f"{checkpoints / 'step_4'}: progress.json is missing, or is a link" in lines
    assert call("verify", checkpoints / "step_3")[0] == 0
    assert call("verify", checkpoints / "step_4")[0] == 1
    assert call("verify", run.parent)[0] == 2


def test_prune_keeps_what_it_is_told_and_what_latest_names(run: Path) -> None:
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


def test_prune_goes_through_all_phases(tmp_path: Path) -> None:
    for phase in ("phase_1_a", "phase_2_b"):
        for step in (1, 2):
            small_checkpoint(tmp_path / "run" / phase / "checkpoints", step)
    assert call("prune", tmp_path / "run", "--keep", 1)[0] == 0
    for phase in ("phase_1_a", "phase_2_b"):
        assert steps_in(tmp_path / "run" / phase) == ["step_2"]


@pytest.mark.parametrize("phase", ["", "phase_1_a"])
def test_prune_leaves_a_run_alone_that_is_running(tmp_path: Path, phase: str) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        small_checkpoint(run / phase / "checkpoints", step)
    with run_lock(run):
        code, printed, said = call("prune", run / phase, "--keep", 1)
    assert (code, printed) == (1, "")
    assert "another job is writing to this run folder" in said
    assert steps_in(run / phase) == ["step_1", "step_2"]


def test_prune_wants_a_run_folder(run: Path) -> None:
    for path in (run / "checkpoints", run / "checkpoints" / "step_1", run.parent):
        assert call("prune", path)[0] == 2
    assert len(steps_in(run)) == 5
