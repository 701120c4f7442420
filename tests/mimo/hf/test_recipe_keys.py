"""What a recipe leaves out comes from the folder that it starts from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mimo.families import encoder_settings, language_settings
from mimo.hf.initial import initial_weights
from mimo.job import check_recipe
from mimo.recipe import Recipe, load_recipe
from mimo.recipe_errors import RecipeError
from tests.mimo.hf import folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.make("qwen3_vl", tmp_path_factory.mktemp("folder") / "model")


def recipe_of(folder: Path, path: Path, *overrides: str) -> Recipe:
    return load_recipe(folders.write_recipe(folder, path / "recipe.yaml"), overrides)


def test_families_sizes_tokenizer_and_placeholders_are_filled_in(
    folder: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(folder, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (recipe.language.family, recipe.encoders["vision"].family) == ("qwen3", "qwen3_vl")
    settings = language_settings(recipe)
    assert settings.vocab_size == config["text_config"]["vocab_size"]
    assert settings.num_layers == config["text_config"]["num_hidden_layers"]
    levels = config["vision_config"]["deepstack_visual_indexes"]
    assert list(encoder_settings(recipe, "vision").deepstack_visual_indexes) == levels
    assert recipe.data.tokenizer == str(folder)
    assert set(recipe.encoders["vision"].media_tokens) == {"image", "video"}
    check_recipe(recipe, None)


def test_what_the_recipe_says_stands(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder, tmp_path, "encoders.vision.model.max_pixels=4096")
    assert encoder_settings(recipe, "vision").max_pixels == 4096
    assert encoder_settings(recipe, "vision").hidden_size > 0


def test_without_encoders_there_is_one_and_with_none_the_language_model_is_alone(
    folder: Path, tmp_path: Path
) -> None:
    path = folders.write_recipe(folder, tmp_path / "recipe.yaml")
    text = path.read_text()
    line = next(line for line in text.splitlines() if line.startswith("encoders"))
    path.write_text(text.replace(line, ""))
    assert list(load_recipe(path).encoders) == ["vision"]
    path.write_text(text.replace(line, "encoders: {}"))
    alone = load_recipe(path)
    initial = initial_weights(alone)
    assert initial is not None
    assert set(initial.weights) == {"language"}


def test_a_resolved_recipe_needs_the_folder_no_longer(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "model"
    shutil.copytree(folder, moved)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(recipe_of(moved, tmp_path).to_yaml())
    expected = load_recipe(resolved)
    shutil.rmtree(moved)
    assert load_recipe(resolved).model_dump() == expected.model_dump()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("language.family=gemma3", "language.family: got 'gemma3', but init_from holds 'qwen3'"),
        ("encoders.vision.family=qwen_vl", "init_from holds 'qwen3_vl'; leave the key out"),
        ("encoders.more={grid: {dp: 1}}", "encoders.more: a recipe with init_from has one encoder"),
        ("init_from=nowhere", "init_from: nowhere: no such folder"),
        ("init_from=3", "init_from: should be a valid string"),
    ],
)
def test_what_contradicts_the_folder_is_refused_by_key(
    folder: Path, tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_of(folder, tmp_path, override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("text_config", "attention_bias", True),
        ("text_config", "hidden_act", "gelu"),
        ("vision_config", "in_channels", 1),
        (None, "model_type", "qwen2_vl"),
    ],
)
def test_models_that_are_not_computed_here_are_refused(
    folder: Path, tmp_path: Path, section: str | None, key: str, value: object
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (config if section is None else config[section])[key] = value
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=rf"init_from: .*{key} is"):
        recipe_of(copy, tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("preprocessor", "do_resize", False),
        ("preprocessor", "resample", 0),
        ("video_preprocessor", "cap_pixels_per_frame", True),
        ("video_preprocessor", "image_mean", [0.1, 0.2, 0.3]),
    ],
)
def test_processors_that_do_something_else_are_refused(
    folder: Path, tmp_path: Path, name: str, key: str, value: object
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    path = copy / f"{name}_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(RecipeError, match=rf"processor's configuration\.{key} is"):
        recipe_of(copy, tmp_path)


def test_sizes_that_contradict_the_weights_are_listed_before_any_rank_starts(
    folder: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(folder, tmp_path, "language.model.num_layers=5")
    with pytest.raises(RecipeError) as caught:
        initial_weights(recipe)
    assert "recipe.yaml" in str(caught.value)
    assert "model.language_model.layers.4.input_layernorm.weight is missing" in str(caught.value)
