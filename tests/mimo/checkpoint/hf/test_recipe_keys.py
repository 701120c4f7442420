"""What a recipe leaves out comes from the folder that it starts from."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.errors import RecipeError, StartError
from mimo.families.registry import encoder_settings, language_settings
from mimo.model.recipe_checks import check_recipe
from tests.mimo.checkpoint.hf import folders


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
    settings: Any = language_settings(recipe)
    assert settings.vocab_size == config["text_config"]["vocab_size"]
    assert settings.num_layers == config["text_config"]["num_hidden_layers"]
    levels = config["vision_config"]["deepstack_visual_indexes"]
    tower: Any = encoder_settings(recipe, "vision")
    assert list(tower.deepstack_visual_indexes) == levels
    assert recipe.data.tokenizer == str(folder)
    assert set(recipe.encoders["vision"].media_tokens) == {"image", "video"}
    check_recipe(recipe, None)


def test_values_in_the_recipe_override_the_folder(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder, tmp_path, "encoders.vision.model.max_pixels=4096")
    tower: Any = encoder_settings(recipe, "vision")
    assert tower.max_pixels == 4096
    assert tower.hidden_size > 0


def test_a_missing_encoders_key_means_one_and_an_empty_one_means_text_only(
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


def test_a_resolved_recipe_does_not_need_the_folder(folder: Path, tmp_path: Path) -> None:
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
        (
            "encoders.more={grid: {dp: 1}}",
            "encoders.more.family: this key is required: init_from holds encoders.vision",
        ),
        ("init_from=nowhere", "init_from: nowhere: no such folder"),
        ("init_from=org/na.me", "init_from: org/na.me: no such folder; .* `hf download org/na.me`"),
        ("init_from=3", "init_from: should be a valid string"),
    ],
)
def test_keys_that_contradict_the_folder_are_refused(
    folder: Path, tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of(folder, tmp_path, override)


def test_a_hub_id_resolves_to_the_local_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the form that `hf download` writes: links to blobs."""
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "0123abc", cache / "blobs"
    shutil.copytree(folder, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    recipe = recipe_of(folder, tmp_path, "init_from=org/name")
    assert recipe.init_from == recipe.data.tokenizer == str(snapshot)
    assert recipe.language.model == recipe_of(folder, tmp_path).language.model
    assert initial_weights(recipe) is not None


@pytest.mark.parametrize("value", ["3", "nowhere", "broken"])
def test_a_refused_folder_is_reported_beside_other_errors_of_the_recipe(
    folder: Path, tmp_path: Path, value: str
) -> None:
    """Not what the recipe lacks because the folder could not be read."""
    if value == "broken":
        broken = changed(folder, tmp_path, "config.json", ["text_config", "attention_bias"], True)
        value = str(broken)
    with pytest.raises(RecipeError) as caught:
        recipe_of(folder, tmp_path, f"init_from={value}", "train.steps=none")
    assert [line.split(": ")[1] for line in caught.value.problems] == ["init_from", "train.steps"]


def changed(folder: Path, path: Path, file: str, keys: list[str], value: object) -> Path:
    """A copy of a folder with one value of a JSON file set, or removed where it is `...`."""
    copy = path / "model"
    shutil.copytree(folder, copy)
    content = json.loads((copy / file).read_text())
    section = content
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    if value is ...:
        del section[keys[-1]]
    (copy / file).write_text(json.dumps(content))
    return copy


ROPE = "rope_parameters"
GLOBAL = f"text_config.{ROPE}.full_attention"
# What transformers would compute otherwise: family, file, keys, value, and what config.json says.
REFUSED = [
    ("qwen3_vl", "config.json", "text_config.attention_bias", True),
    ("qwen3_vl", "config.json", "text_config.hidden_act", "gelu"),
    ("qwen3_vl", "config.json", "vision_config.in_channels", 1),
    ("qwen3_vl", "config.json", "model_type", "vit"),
    ("qwen3_vl", "config.json", "quantization_config", {"quant_method": "fp8"}),
    # Dropout.
    ("qwen2_5_vl", "config.json", "text_config.attention_dropout", 0.1),
    ("qwen3_vl", "config.json", "text_config.attention_dropout", 0.1),
    ("gemma3", "config.json", "vision_config.attention_dropout", 0.1),
    ("gemma3", "config.json", "text_config.hidden_dropout_prob", 0.1),
    # Rotary settings.
    ("qwen2_5_vl", "config.json", f"text_config.{ROPE}.rope_type", "other"),
    ("qwen3_vl", "config.json", f"vision_config.{ROPE}.rope_type", "other"),
    ("gemma3", "config.json", f"{GLOBAL}.rope_type", "yarn"),
    ("gemma3", "config.json", f"{GLOBAL}.partial_rotary_factor", 0.5),
    ("gemma3", "config.json", f"text_config.{ROPE}.sliding_attention.rope_type", "other"),
    # Processors that do something else.
    ("qwen3_vl", "preprocessor_config.json", "do_resize", False),
    ("qwen3_vl", "preprocessor_config.json", "resample", 0),
    ("qwen3_vl", "preprocessor_config.json", "image_processor_type", "CLIPImageProcessor"),
    ("qwen3_vl", "video_preprocessor_config.json", "cap_pixels_per_frame", True),
    ("qwen3_vl", "video_preprocessor_config.json", "image_mean", [0.1, 0.2, 0.3]),
    # What contradicts config.json.
    ("qwen2_5_vl", "preprocessor_config.json", "patch_size", 14, 9),
    ("qwen2_5_vl", "preprocessor_config.json", "merge_size", 2, 3),
    ("qwen3_vl", "preprocessor_config.json", "temporal_patch_size", 2, 3),
    ("qwen3_vl", "preprocessor_config.json", "image_token_id", 63),
    ("qwen3_vl", "video_preprocessor_config.json", "merge_size", 2, 3),
    ("gemma3", "preprocessor_config.json", "patch_size", 14, 10),
    ("gemma3", "preprocessor_config.json", "image_seq_length", 256, 4),
    ("gemma3", "processor_config.json", "image_seq_length", 256, 4),
    ("gemma3", "processor_config.json", "image_token_id", 63),
    # What transformers has for a key that is missing contradicts it too.
    ("qwen3_vl", "preprocessor_config.json", "patch_size", ..., 10),
    ("gemma3", "processor_config.json", "image_seq_length", ..., 4),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("made")
    others = {name: folders.make(name, path / name) for name in ("qwen2_5_vl", "gemma3")}
    return {"qwen3_vl": folder, **others}


@pytest.mark.parametrize(
    ("family", "file", "key", "value", "config"), [(*case, None)[:5] for case in REFUSED]
)
def test_settings_that_we_do_not_compute_are_refused_by_key(
    made: dict[str, Path],
    tmp_path: Path,
    family: str,
    file: str,
    key: str,
    value: object,
    config: int | None,
) -> None:
    copy = changed(made[family], tmp_path, file, key.split("."), value)
    with pytest.raises(RecipeError, match=rf"init_from: .*{key.rpartition('.')[2]} is") as caught:
        recipe_of(copy, tmp_path)
    assert len(caught.value.problems) == 1
    if config is not None:
        assert f"but config.json says {config}" in str(caught.value)


# Of families that pay no attention to a key where the kind of rotary settings does not read it.
IGNORED = [
    ("qwen2_5_vl", f"text_config.{ROPE}", {"factor": 8.0, "mrope_interleaved": True}),
    ("qwen3_vl", f"text_config.{ROPE}", {"factor": 8.0, "partial_rotary_factor": 0.5}),
    ("qwen3_vl", f"vision_config.{ROPE}", {"factor": 8.0, "attention_factor": 2.0}),
]


@pytest.mark.parametrize(("family", "section", "keys"), IGNORED)
def test_rotary_keys_that_transformers_does_not_read_change_nothing(
    made: dict[str, Path], tmp_path: Path, family: str, section: str, keys: dict[str, object]
) -> None:
    config = json.loads((made[family] / "config.json").read_text())
    first, second = section.split(".")
    rope = {**config[first][second], **keys}
    copy = changed(made[family], tmp_path, "config.json", [first, second], rope)
    plain, other = (recipe_of(each, tmp_path) for each in (made[family], copy))
    assert other.language.model == plain.language.model
    assert other.encoders["vision"].model == plain.encoders["vision"].model


def test_sizes_that_contradict_the_weights_are_listed_before_any_rank_starts(
    folder: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(folder, tmp_path, "language.model.num_layers=5")
    with pytest.raises(RecipeError) as caught:
        initial_weights(recipe)
    assert "recipe.yaml" in str(caught.value)
    assert "model.language_model.layers.4.input_layernorm.weight is missing" in str(caught.value)


def test_a_hub_id_whose_download_finds_a_full_disk_is_no_unknown_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, local_files_only: bool) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: a\ninit_from: org/model\n")
    with pytest.raises(StartError, match="org/model: its download failed: .*No space left"):
        load_recipe(recipe)
