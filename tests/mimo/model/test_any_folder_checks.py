"""What a folder of any class cannot train is refused before any rank starts: key and reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mimo.check.workload import write_shard
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.cli.main import app
from mimo.errors import RecipeError
from mimo.model.recipe_checks import check_data
from tests.mimo.model import any_folder

REFUSED = {
    "delivery": (["bridge.delivery=sharded"], "bridge.delivery", "set it to replicated"),
    "sequence parallelism": (
        ["language.grid={tp: 2, sp: true, dp: 1}"],
        "language.grid.sp",
        "no sequence parallelism",
    ),
    "context parallelism": (["language.grid={cp: 2, dp: 1}"], "language.grid.cp", "dp"),
    "stages": (["language.grid={pp: 2, dp: 1}"], "language.grid.pp", "raise dp"),
    "tower": (["encoders.vision.grid={tp: 2, dp: 1}"], "encoders.vision.grid.tp", "raise dp"),
    "engine": (["language.engine=megatron"], "language.engine", "set it to fsdp"),
    "engine of the tower": (
        ["encoders.vision.engine=megatron"],
        "encoders.vision.engine",
        "set it to fsdp",
    ),
    "audio": (
        ["encoders.vision.other_media={audio: {placeholder: '<|video_pad|>'}}"],
        "encoders.vision.other_media.audio",
        "leave it out",
    ),
    "only audio": (
        ["encoders.vision.media=audio", "encoders.vision.placeholder=<|video_pad|>"],
        "encoders.vision.media",
        "leave it out",
    ),
    "two encoders": (
        [
            "encoders.other={family: transformers, media: video, placeholder: '<|video_pad|>', "
            "model: {num_layers: 1, hidden_size: 8, ffn_hidden_size: 8, num_attention_heads: 1}}"
        ],
        "encoders.other",
        "has one encoder, encoders.vision",
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    any_folder.make("qwen3_5", folder)
    return folder


def refusal(directory: Path, *overrides: str) -> str:
    """Return what `mimo check` prints, in one line; its exit code must be that of bad input."""
    done = CliRunner().invoke(app, ["check", str(directory / "recipe.yaml"), *overrides])
    text = " ".join(done.output.split())
    assert done.exit_code == 2, text
    return text


@pytest.mark.parametrize("case", REFUSED)
def test_a_layout_that_two_halves_cannot_have_is_refused_by_key(directory: Path, case: str) -> None:
    overrides, key, reason = REFUSED[case]
    text = refusal(directory, *overrides)
    assert f"{key}: " in text, text
    assert reason in text


def test_a_class_without_features_of_images_is_refused_by_name(tmp_path: Path) -> None:
    path = any_folder.make("qwen3_5", tmp_path)
    from transformers import BlipConfig

    BlipConfig().save_pretrained(tmp_path / "base")
    text = refusal(path.parent)
    assert "init_from: " in text
    assert "blip" in text.lower()


def test_a_processor_that_writes_another_number_of_placeholders_is_refused(tmp_path: Path) -> None:
    path = any_folder.make("llava_next", tmp_path)
    settings = tmp_path / "base" / "processor_config.json"
    content = json.loads(settings.read_text())
    content["patch_size"] *= 2
    settings.write_text(json.dumps(content))
    runner = CliRunner()
    assert runner.invoke(app, ["data", "index", str(path)]).exit_code == 0
    text = refusal(path.parent)
    assert "data.sources.0.path: " in text, text
    assert "placeholders for an image, but the tower returns" in text


def test_a_sample_whose_images_are_prepared_together_is_refused(tmp_path: Path) -> None:
    path = any_folder.make("llava_onevision", tmp_path)
    write_shard(tmp_path / "train-00000.tar", any_folder.SAMPLES)
    with pytest.raises(RecipeError, match=r"data\.sources\.0\.path: sample .* 2 images together"):
        check_data(load_recipe(path))


# -------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(
    ("family", "overrides"), [("internvl", []), ("qwen3_5", ["language.family=transformers"])]
)
def test_parity_compares_two_halves_of_a_tiny_copy(
    tmp_path: Path, family: str, overrides: list[str]
) -> None:
    write_tiny(TinyCheckpoint(family), tmp_path / "base")
    done = CliRunner().invoke(app, ["parity", str(tmp_path / "base"), *overrides])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("equal: loss and every gradient")
