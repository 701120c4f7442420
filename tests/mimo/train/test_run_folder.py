"""What a start does with a folder that is there already, and with `launch` in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_phases
from mimo.model.recipe_checks import check_recipe
from mimo.train.main import Job, Request
from mimo.train.restarts import is_requeued


def launched(recipe: Path) -> Path:
    """The recipe as `mimo launch` puts it into the run folder."""
    launch = load_phases(recipe).run_dir / "launch"
    launch.mkdir(parents=True)
    (launch / "job.sh").write_text("srun")
    return Path(recipe.rename(launch / "recipe.yaml"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "anew"])
def test_a_folder_that_holds_only_launch_is_where_the_run_begins(
    recipe: Path, resume: bool
) -> None:
    path = launched(recipe)
    run_dir = path.parent.parent
    Request(path, resume=resume).check(None).begin()
    assert names(run_dir) == {"launch", "recipe.yaml"}
    assert names(run_dir.parent) == {"tiny"}


@pytest.mark.parametrize(
    ("overrides", "often"),
    [
        (["train.steps=1500"], "every 150 steps"),
        (["train.save_every=2"], "every 2 steps"),
        ([], "after the last step only"),
        (["train.steps=1500", "train.save_every=null"], "after the last step only"),
    ],
)
def test_a_start_says_how_often_it_saves(
    recipe: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], often: str
) -> None:
    phased = load_phases(recipe, overrides)
    Job(phased, phased.each(lambda recipe: check_recipe(recipe, None))).begin()
    assert f"saves a checkpoint {often}\n" in capsys.readouterr().out


def test_an_older_run_moves_aside_and_the_launch_of_this_job_stays(recipe: Path) -> None:
    path = launched(recipe)
    run_dir = path.parent.parent
    (run_dir / "metrics.jsonl").write_text("{}")
    Request(path).check(None).begin()
    assert names(run_dir) == {"launch", "recipe.yaml"}
    assert names(run_dir / "launch") == {"job.sh", "recipe.yaml"}
    assert names(run_dir.parent / "tiny.1") == {"metrics.jsonl"}


def test_the_launch_of_an_older_run_goes_with_it(recipe: Path) -> None:
    run_dir = load_phases(recipe).run_dir
    (run_dir / "launch").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("{}")
    Request(recipe).check(None).begin()
    assert names(run_dir) == {"recipe.yaml"}
    assert names(run_dir.parent / "tiny.1") == {"launch", "metrics.jsonl"}


def test_a_job_that_slurm_starts_again_or_after_another_waits_for_locks_of_lost_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not is_requeued()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert not is_requeued()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert is_requeued()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    monkeypatch.setenv("SLURM_JOB_DEPENDENCY", "afterany:12")
    assert is_requeued()
