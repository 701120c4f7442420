"""Whole runs of the tiny recipe through the launcher: resume, bad input, corrupt samples."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mimo import tiny

LAYOUT = ["language.grid.dp=2", "train.micro_batch_size=2"]
ADAM = ["train.optimizer=adam", "train.learning_rate=0.003", "train.clip_grad_norm=1.0"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny.write_samples(tmp_path)
    return tiny.write_recipe(tmp_path)


def mimo(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mimo.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def train(recipe: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return mimo("train", recipe, *LAYOUT, *ADAM, *arguments)


def metrics(recipe: Path, run: str = "tiny") -> list[dict]:
    path = recipe.parent / "runs" / run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def no_ranks_of(recipe: Path) -> bool:
    """Whether no process still mentions the test's folder."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return str(recipe.parent) not in listed


def test_resumed_run_continues_the_loss_curve_to_the_last_bit(recipe: Path) -> None:
    whole = train(recipe, "train.steps=6", "name=whole", "train.save_every=3")
    assert whole.returncode == 0, whole.stderr
    # The interrupted run: same recipe, ended after its checkpoint at step 3.
    folder = recipe.parent / "runs" / "part"
    shutil.copytree(recipe.parent / "runs" / "whole", folder)
    (folder / "checkpoints" / "latest").write_text("step_3")
    shutil.rmtree(folder / "checkpoints" / "step_6")
    resumed = train(recipe, "train.steps=6", "name=part", "train.save_every=3", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    expected, got = metrics(recipe, "whole"), metrics(recipe, "part")
    assert [m["step"] for m in got] == [0, 1, 2, 3, 4, 5]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [m[key] for m in got] == [m[key] for m in expected], key


def test_checkpoint_of_one_layout_resumes_in_another(recipe: Path) -> None:
    assert train(recipe, "train.steps=4", "train.save_every=2").returncode == 0
    whole = metrics(recipe)
    other = ["language.grid.tp=2", "language.grid.sp=true", "encoders.vision.grid.dp=2"]
    resumed = mimo(
        "train",
        recipe,
        *other,
        *ADAM,
        "train.steps=4",
        "train.save_every=2",
        "name=other",
        "--resume-from",
        recipe.parent / "runs" / "tiny" / "checkpoints" / "step_2",
    )
    assert resumed.returncode == 0, resumed.stderr
    for got, expected in zip(metrics(recipe, "other"), whole[2:], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_corrupt_image_is_skipped_counted_and_named(recipe: Path) -> None:
    # Break pixels inside the file: the header, which the index reads, stays good.
    assert mimo("prepare", recipe).returncode == 0
    shard = recipe.parent / "train-00000.tar"
    data = bytearray(shard.read_bytes())
    first = data.index(b"IDAT")
    data[first + 8 : first + 40] = bytes(32)
    shard.write_bytes(data)
    done = train(recipe, "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert [m["skipped_samples"] for m in metrics(recipe)] == [1, 2]  # once in each epoch
    logs = "".join(p.read_text() for p in (recipe.parent / "runs" / "tiny").glob("log_rank_*.txt"))
    assert "sample0000" in logs
    assert "train-00000.tar" in logs


def test_too_many_corrupt_samples_end_the_run_with_the_limit_named(recipe: Path) -> None:
    assert mimo("prepare", recipe).returncode == 0
    shard = recipe.parent / "train-00000.tar"
    data = bytearray(shard.read_bytes())
    first = data.index(b"IDAT")
    data[first + 8 : first + 40] = bytes(32)
    shard.write_bytes(data)
    done = train(recipe, "train.steps=2", "data.max_skipped_samples=0")
    assert done.returncode == 1
    assert "data.max_skipped_samples" in done.stderr
    assert no_ranks_of(recipe)


def test_sample_with_more_placeholders_than_images_is_bad_input(recipe: Path) -> None:
    shard = recipe.parent / "train-00000.tar"
    shard.write_bytes(shard.read_bytes().replace(b"sample0003.2.png", b"sampleX003.2.png"))
    done = train(recipe)
    assert done.returncode == 2, done.stderr
    assert "sample0003" in done.stderr
    assert "3" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("override", "mentions"),
    [
        ("train.stepps=3", ["train.stepps", "did you mean 'steps'"]),
        ("data.sources.0.path=nowhere/*.tar", ["data.sources.0.path", "nowhere/*.tar"]),
        ("data.tokenizer=nowhere", ["data.tokenizer", "nowhere"]),
        ("language.model.hidden_sizes=3", ["language.model.hidden_sizes", "hidden_size"]),
        ("language.grid.tp=3", ["language.grid", "num_attention_heads"]),
        ("language.family=qwen4", ["language.family", "qwen3"]),
        ("encoders.vision.family=siglop", ["encoders.vision.family", "qwen_vl"]),
        ("data.sequence_length=8", ["data.sources.0.path", "8"]),
    ],
)
def test_bad_input_ends_with_one_message_and_exit_code_2(
    recipe: Path, override: str, mentions: list[str]
) -> None:
    done = train(recipe, override)
    assert done.returncode == 2, done.stderr
    for text in mentions:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (recipe.parent / "runs").exists()


def test_grid_that_does_not_tile_the_ranks_is_bad_input(recipe: Path) -> None:
    done = train(recipe, "--num-ranks=4")
    assert done.returncode == 2
    assert "4 ranks" in done.stderr


def test_generate_answers_from_a_run_of_any_layout(recipe: Path) -> None:
    assert train(recipe, "train.steps=1", "language.grid.dp=1", "language.grid.pp=2").returncode == 0
    image = recipe.parent / "image.png"
    from PIL import Image

    Image.new("L", (56, 28), 128).save(image)
    run = recipe.parent / "runs" / "tiny"
    answers = [
        mimo("generate", run, "--image", image, "--prompt", "what is this ?") for _ in range(2)
    ]
    for done in answers:
        assert done.returncode == 0, done.stderr
    assert answers[0].stdout == answers[1].stdout


def test_generate_without_a_checkpoint_says_what_to_give(tmp_path: Path) -> None:
    done = mimo("generate", tmp_path, "--prompt", "what is this ?")
    assert done.returncode == 2
    assert "no checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
