"""An export says how the model was trained, and carries what belongs to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from data.text.chat import ChatTokenizer
from mimo.checkpoint.assets import ASSETS, collect_assets
from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.initial import convert_from_hf
from mimo.checkpoint.hf.recipes import load_processor, load_recipe
from mimo.errors import InputError, RecipeError
from mimo.families.hf_config import read_config, read_processors
from tests.mimo.checkpoint.hf import folders
from tests.mimo.checkpoint.manifests import write_manifest

GB = 10**9


def converted(family: str, path: Path) -> Path:
    folders.make(family, path / "model")
    convert_from_hf(path / "model", path / "ours")
    return path / "ours"


def set_in_recipe(checkpoint: Path, *overrides: str) -> None:
    """As if it had been trained with these."""
    path = checkpoint / "recipe.yaml"
    path.write_text(load_recipe(path, overrides).to_yaml())
    write_manifest(checkpoint)


def test_limits_of_pixels_that_were_trained_with_are_exported(tmp_path: Path) -> None:
    ours = converted("qwen3_vl", tmp_path)
    set_in_recipe(ours, "encoders.vision.model.max_pixels=4096")
    convert_to_hf(ours, tmp_path / "exported", GB)
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(tmp_path / "exported", backend="pil")
    assert processor.size["longest_edge"] == 4096
    before = read_processors(tmp_path / "model").image["size"]["shortest_edge"]
    assert processor.size["shortest_edge"] == before


def test_pan_and_scan_that_was_trained_with_is_exported(tmp_path: Path) -> None:
    ours = converted("gemma3", tmp_path)
    crops = {"": "true", "_min_crop_size": "20", "_max_num_crops": "3"}
    keys = [f"encoders.vision.model.pan_and_scan{key}={value}" for key, value in crops.items()]
    set_in_recipe(ours, *keys)
    convert_to_hf(ours, tmp_path / "exported", GB)
    assert read_processors(tmp_path / "exported").image["do_pan_and_scan"] is True
    processor = load_processor(tmp_path / "exported")
    image = [[Image.new("RGB", (120, 40))]]
    ids = processor(text=[processor.boi_token], images=image)["input_ids"][0]
    assert list(ids).count(processor.image_token_ids[0]) == 4 * 4, "an image and its three crops"


def test_settings_that_no_file_of_theirs_says_are_refused(tmp_path: Path) -> None:
    ours = converted("qwen3_vl", tmp_path)
    set_in_recipe(ours, "language.model.rotary_base=1234.0")
    with pytest.raises(RecipeError, match=r"language\.model\.rotary_base is 1234\.0, .* says"):
        convert_to_hf(ours, tmp_path / "exported", GB)
    assert not (tmp_path / "exported").exists()


def test_todays_file_of_processors_counts_before_older_ones(tmp_path: Path) -> None:
    folder = folders.make("qwen3_vl", tmp_path / "model")
    old = read_processors(folder).image
    new = {**old, "size": {"shortest_edge": 1, "longest_edge": 9999}}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": new}))
    assert read_processors(folder).image == new
    assert read_processors(folder).video["video_processor_type"] == "Qwen3VLVideoProcessor"


def test_of_a_tokenizer_elsewhere_only_its_own_files_are_carried(tmp_path: Path) -> None:
    folder = folders.make("qwen3_vl", tmp_path / "model")
    other = folders.make("gemma3", tmp_path / "other")
    recipe = load_recipe(
        folders.write_recipe(folder, tmp_path / "recipe.yaml"), [f"data.tokenizer={other}"]
    )
    collect_assets(recipe, tmp_path / ASSETS)
    assert read_config(tmp_path / ASSETS)["model_type"] == "qwen3_vl"
    assert (tmp_path / ASSETS / "tokenizer.json").read_bytes() == (
        other / "tokenizer.json"
    ).read_bytes()
    assert not list((tmp_path / ASSETS).glob("*.safetensors*"))
    # A template in another file: that of the model's own tokenizer must not hide it.
    config, template = other / "tokenizer_config.json", other / "chat_template.jinja"
    said = json.loads(config.read_text()) | {"chat_template": template.read_text() + "{# own #}"}
    config.write_text(json.dumps(said))
    template.unlink()
    collect_assets(recipe, tmp_path / "again")
    found, given = ChatTokenizer(tmp_path / "again", {}), ChatTokenizer(other, {})
    assert found.differences(given) == []


def test_a_model_that_did_not_start_from_a_folder_has_no_export(tmp_path: Path) -> None:
    ours = converted("qwen3_vl", tmp_path)
    set_in_recipe(ours, "init_from=null")
    with pytest.raises(InputError, match="did not start from a checkpoint"):
        convert_to_hf(ours, tmp_path / "exported", GB)


def test_a_checkpoint_of_several_dtypes_loses_no_digit(tmp_path: Path) -> None:
    folder = folders.make("qwen3_vl", tmp_path / "model", dtype="bfloat16")
    key = "model.language_model.norm.weight"
    folders.rewrite(folder, lambda found: {**found, key: found[key].float() + 1e-5})
    convert_from_hf(folder, tmp_path / "ours")
    convert_to_hf(tmp_path / "ours", tmp_path / "exported", GB)
    exported, given = folders.tensors(tmp_path / "exported"), folders.tensors(folder)
    assert all(torch.equal(exported[k].double(), given[k].double()) for k in given)


def test_a_configuration_of_wrong_types_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "größe"
    folders.make("gemma3", folder)
    convert_from_hf(folder, tmp_path / "ours")  # a name that no run could have
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["hidden_size"] = "64"
    (folder / "config.json").write_text(json.dumps(config))
    shutil.rmtree(tmp_path / "ours")
    with pytest.raises(InputError, match=r"config\.json: .*hidden_size"):
        convert_from_hf(folder, tmp_path / "ours")
