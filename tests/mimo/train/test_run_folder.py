"""What a start does with a folder that exists, and what a resumed run may change."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_phases, load_recipe
from mimo.errors import RecipeError
from mimo.model.recipe_checks import check_recipe
from mimo.train import main as job
from mimo.train.main import Request
from mimo.train.restarts import is_requeued
from tests.mimo import tiny
from tests.mimo.checkpoint.hf import folders
from tests.mimo.checkpoint.manifests import small_checkpoint, write_manifest
from tests.mimo.drawings import GENERATOR
from tests.mimo.runs import shards


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
    job_of(recipe, *overrides, resume=False).begin()
    assert f"saves a checkpoint {often}\n" in capsys.readouterr().out


def test_an_older_run_moves_aside_and_the_launch_of_this_job_stays(recipe: Path) -> None:
    path = launched(recipe)
    run_dir = path.parent.parent
    (run_dir / "metrics.jsonl").write_text("{}")
    Request(path).check(None).begin()
    assert names(run_dir) == {"launch", "recipe.yaml"}
    assert names(run_dir / "launch") == {"job.sh", "recipe.yaml"}
    assert names(run_dir.parent / "tiny.1") == {"metrics.jsonl"}
    # The launch of an older run goes with it.
    other = path.rename(path.parents[3] / "tiny.yaml")
    Request(other).check(None).begin()
    assert names(run_dir) == {"recipe.yaml"}
    assert names(run_dir.parent / "tiny.2") == {"launch", "recipe.yaml"}


def test_a_job_that_slurm_starts_again_or_after_another_waits_for_locks_of_lost_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not is_requeued()
    for count, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        assert is_requeued() == expected
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    monkeypatch.setenv("SLURM_JOB_DEPENDENCY", "afterany:12")
    assert is_requeued()


def trained(path: Path, *overrides: str, step: int = 2) -> Path:
    """The checkpoint of a run of the recipe, as it would be but for the tensors."""
    recipe = load_recipe(path, overrides)
    recipe.run_dir.mkdir(parents=True)
    (recipe.run_dir / "recipe.yaml").write_text(recipe.to_yaml())
    checkpoint = small_checkpoint(recipe.run_dir / "checkpoints", step, recipe.to_yaml())
    for folder in (recipe.init_from, recipe.data.tokenizer):
        if folder is not None:
            shutil.copytree(folder, checkpoint / "assets", dirs_exist_ok=True)
    write_manifest(checkpoint)
    return checkpoint


def job_of(
    path: Path, *overrides: str, resume: bool = True, resume_from: Path | None = None
) -> job.Job:
    """A job that resumes, checked but for its data."""
    phased = load_phases(path, overrides)
    layouts = phased.each(lambda recipe: check_recipe(recipe, None))
    return job.Job(phased, layouts, resume and resume_from is None, resume_from)


def refusals(path: Path, *overrides: str) -> list[str]:
    """The problems of a resume that is refused and leaves every file as it was."""
    before = files_in(path.parent)
    with pytest.raises(RecipeError) as caught:
        job_of(path, *overrides).begin()
    assert files_in(path.parent) == before
    return [*caught.value.problems]


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changes(path: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """The lines about changes of a resume that begins."""
    capsys.readouterr()
    assert job_of(path, *overrides).begin()
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line[:2] == "  "]


# Settings before and now, the key that is refused, and words of the message.
VISION = "encoders.vision.model"
REFUSED = {
    "size": ([], ["language.model.num_layers=4"], "language.model.num_layers", "got 4", "with 2"),
    "default": ([], [f"{VISION}.patch_size=28"], f"{VISION}.patch_size", "got 28", "with 14"),
    "family": ([], ["language.family=qwen2_5"], "language.family", "'qwen2_5'", "'qwen3'"),
    "encoder": ([], [tiny.SECOND_ENCODER], "encoders.glyphs", "got {'family'", "with None"),
    "no encoder": ([tiny.SECOND_ENCODER], [], "encoders.glyphs", "got None", "with {'family'"),
    "no adapters": (["language.lora={rank: 2}"], [], "language.lora", "got None", "be lost"),
    "rank": (
        ["language.lora={rank: 2}"],
        ["language.lora={rank: 4}"],
        "language.lora.rank",
        "got 4",
        "with 2",
    ),
    "targets": (
        ["language.lora={rank: 2}"],
        ["language.lora={rank: 2, targets: [qkv]}"],
        "language.lora.targets",
        "got ['qkv']",
        "be lost",
    ),
    "generator": (
        [GENERATOR],
        [GENERATOR, "generators.image.model.axes_dims_rope=[8, 4, 4]"],
        "generators.image.model.axes_dims_rope",
        "got [8, 4, 4]",
        "with [4, 6, 6]",
    ),
    "condition": (
        [GENERATOR],
        [GENERATOR, "generators.image.queries=2"],
        "generators.image.queries",
        "got 2",
        "is conditioned on",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_resume_with_another_model_is_refused_before_anything_is_written(
    recipe: Path, case: tuple[list[str], list[str], str, str, str]
) -> None:
    before, now, key, got, other = case
    checkpoint = trained(recipe, *before)
    (problem,) = refusals(recipe, *now)
    assert f"{key}: " in problem
    assert got in problem
    assert other in problem
    assert str(checkpoint) in problem
    assert "set it back, or start another run" in problem


def test_a_resume_from_another_folder_is_refused_and_one_that_has_moved_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_samples(tmp_path)
    model = folders.make("qwen3_vl", tmp_path / "model")
    path = folders.write_recipe(model, tmp_path / "recipe.yaml")
    settings = [shards(path, "train"), f"train.run_dir={tmp_path}/runs", "train.steps=9"]
    trained(path, *settings)
    other = shutil.copytree(model, tmp_path / "other")
    for folder in (other, folders.make("qwen3_vl", tmp_path / "wider", num_layers=4)):
        (problem,) = refusals(path, *settings, f"init_from={folder}")
        assert f"init_from: got '{folder}', but " in problem
        assert f"was trained with '{model}'" in problem
    shutil.rmtree(model)
    lines = changes(path, capsys, *settings, f"init_from={other}")
    assert f"init_from: '{model}' before, '{other}' now" in lines


def change_template(folder: Path) -> None:
    with (folder / "chat_template.jinja").open("a") as file:
        file.write("{# other #}")


def change_vocabulary(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"digits"', '"numbers"'))


@pytest.mark.parametrize(
    ("change", "name"),
    [(change_template, "chat template"), (change_vocabulary, "tokenizer")],
    ids=["chat template", "tokenizer"],
)
def test_a_tokenizer_that_changed_in_its_folder_is_refused_on_resuming(
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    name: str,
) -> None:
    carried = trained(recipe) / "assets"
    tokenizer = recipe.parent / "tokenizer"
    copied = shutil.copytree(tokenizer, recipe.parent / "copied")
    change(tokenizer)
    (problem,) = refusals(recipe)
    assert f"data.tokenizer: the {name} in {tokenizer} changed since {carried.parent}" in problem
    assert f"with that in {carried}; copy it back from there" in problem
    lines = changes(recipe, capsys, f"data.tokenizer={copied}")
    assert lines == [f"data.tokenizer: '{tokenizer}' before, '{copied}' now"]


def test_what_may_change_on_resuming_is_said_in_a_line_each(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = trained(recipe)
    assert changes(recipe, capsys) == []
    overrides = {
        "train.steps": ("3", "9"),
        "data.sources.0.weight": ("1.0", "2.0"),
        "language.grid.dp": ("1", "2"),
        "train.global_batch_size": ("12", "8"),
        "encoders.vision.freeze": ("False", "'tower'"),
        f"{VISION}.jpeg_draft": ("False", "True"),
        "language.model.init_std": ("0.2", "0.1"),
    }
    settings = [f"{key}={now}".lower() for key, (_, now) in overrides.items()]
    lines = changes(recipe, capsys, *settings, "language.lora={rank: 2}", "name=tiny")
    for key, (before, now) in overrides.items():
        assert f"{key}: {before} before, {now} now" in lines
    assert any(line.startswith("language.lora: None before, {'rank': 2,") for line in lines)
    for module in ("language", "vision"):
        assert f"learning rate of {module} at step 2: 0.0325 before, 0.08947 now" in lines
    assert len(lines) == len(overrides) + 3
    # Of another folder, too, whose name and place are no change.
    runs = shutil.copytree(checkpoint.parent, recipe.parent / "elsewhere")
    capsys.readouterr()
    where = [f"train.run_dir={recipe.parent}/more", "name=more"]
    job_of(recipe, *where, resume_from=runs / "step_2").begin()
    assert "changed since" not in capsys.readouterr().out


@pytest.mark.parametrize("steps", [2, 1])
def test_a_run_at_or_past_its_last_step_is_done_and_says_so(
    recipe: Path, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    trained(recipe)
    before = files_in(recipe.parent / "runs")
    assert job.train_here(job_of(recipe, f"train.steps={steps}"), 0, time.monotonic()) == 0
    assert f"already at step 2 of {steps};" in capsys.readouterr().out
    assert files_in(recipe.parent / "runs") == before


def test_a_job_past_the_last_step_of_its_last_phase_is_done(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text("phases: [{name: one}, {name: two}]\n" + recipe.read_text())
    phase = load_phases(recipe).phases[1].recipe
    plain = recipe.with_name("phase.yaml")
    plain.write_text(phase.to_yaml())
    trained(plain)
    for steps in (2, 1):
        assert (
            job.train_here(job_of(recipe, f"phases.1.train.steps={steps}"), 0, time.monotonic())
            == 0
        )
        assert f"phase 2 of 2, two: already at step 2 of {steps};" in capsys.readouterr().out
