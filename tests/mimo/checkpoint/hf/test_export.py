"""An export has the settings of the training, and encoders of the folder only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from data.modalities.transformers import load_processor
from data.text.chat import ChatTokenizer
from mimo.checkpoint import reading
from mimo.checkpoint.assets import ASSETS, collect_assets
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.initial import convert_from_hf, initial_weights
from mimo.checkpoint.hf.recipes import architecture_of_folder, load_recipe
from mimo.errors import InputError, RecipeError
from mimo.families.hf_config import read_config, read_processors
from tests.conftest import RunRanks
from tests.mimo import runs, tiny
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


def test_an_export_has_the_pixel_limits_of_the_training(tmp_path: Path) -> None:
    ours = converted("qwen3_vl", tmp_path)
    set_in_recipe(ours, "encoders.vision.model.max_pixels=4096")
    convert_to_hf(ours, tmp_path / "exported", GB)
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(tmp_path / "exported", backend="pil")
    assert processor.size["longest_edge"] == 4096
    before = read_processors(tmp_path / "model").image["size"]["shortest_edge"]
    assert processor.size["shortest_edge"] == before


def test_an_export_has_the_pan_and_scan_of_the_training(tmp_path: Path) -> None:
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


def test_settings_that_no_exported_file_can_hold_are_refused(tmp_path: Path) -> None:
    ours = converted("qwen3_vl", tmp_path)
    set_in_recipe(ours, "language.model.rotary_base=1234.0")
    with pytest.raises(RecipeError, match=r"language\.model\.rotary_base is 1234\.0, .* says"):
        convert_to_hf(ours, tmp_path / "exported", GB)
    assert not (tmp_path / "exported").exists()


def test_the_current_processor_file_overrides_older_ones(tmp_path: Path) -> None:
    folder = folders.make("qwen3_vl", tmp_path / "model")
    old = read_processors(folder).image
    new = {**old, "size": {"shortest_edge": 1, "longest_edge": 9999}}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": new}))
    assert read_processors(folder).image == new
    assert read_processors(folder).video["video_processor_type"] == "Qwen3VLVideoProcessor"


def test_only_tokenizer_files_are_copied_from_a_separate_tokenizer_folder(tmp_path: Path) -> None:
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
    # A template in another file: the model's template must not hide it.
    config, template = other / "tokenizer_config.json", other / "chat_template.jinja"
    settings = json.loads(config.read_text()) | {
        "chat_template": template.read_text() + "{# changed #}"
    }
    config.write_text(json.dumps(settings))
    template.unlink()
    collect_assets(recipe, tmp_path / "again")
    copied, original = ChatTokenizer(tmp_path / "again", {}), ChatTokenizer(other, {})
    assert copied.differences(original) == []


def test_a_model_that_did_not_start_from_a_folder_has_no_export(tmp_path: Path) -> None:
    ours = converted("qwen3_vl", tmp_path)
    set_in_recipe(ours, "init_from=null")
    with pytest.raises(InputError, match="did not start from a checkpoint"):
        convert_to_hf(ours, tmp_path / "exported", GB)


def test_a_checkpoint_of_several_dtypes_loses_no_digit(tmp_path: Path) -> None:
    folder = folders.make("qwen3_vl", tmp_path / "model", dtype="bfloat16")
    key = "model.language_model.norm.weight"
    folders.rewrite(folder, lambda tensors: {**tensors, key: tensors[key].float() + 1e-5})
    convert_from_hf(folder, tmp_path / "ours")
    convert_to_hf(tmp_path / "ours", tmp_path / "exported", GB)
    exported, original = folders.tensors(tmp_path / "exported"), folders.tensors(folder)
    assert all(torch.equal(exported[k].double(), original[k].double()) for k in original)


def test_a_configuration_of_wrong_types_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "größe"
    folders.make("gemma3", folder)
    convert_from_hf(folder, tmp_path / "ours")  # a name that no run could have
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["hidden_size"] = "64"
    (folder / "config.json").write_text(json.dumps(config))
    shutil.rmtree(tmp_path / "ours")
    with pytest.raises(InputError, match=r"config\.json: .*hidden_size"):
        convert_from_hf(folder, tmp_path / "ours")


MODEL = (
    "{num_layers: 2, hidden_size: 16, ffn_hidden_size: 24, num_attention_heads: 2, patch_size: 4, "
    "min_pixels: 64, max_pixels: 1024}"
)
FILM = (
    "{family: qwen3_vl, media: video, placeholder: <|video_pad|>, placement: colocated, "
    f"item_text: '<|vision_start|>{{placeholder}}<|vision_end|>', model: {MODEL}}}"
)
OTHER_FAMILY = (
    "{family: gemma3, media: video, placeholder: <|video_pad|>, placement: colocated, "
    "model: {num_layers: 2, hidden_size: 16, ffn_hidden_size: 24, num_attention_heads: 2}}"
)
RECIPE = """
name: two
init_from: {folder}
encoders: {encoders}
data: {{sources: [{{path: "{shards}/train-*.tar"}}], sequence_length: 512}}
train:
  {{steps: 2, global_batch_size: 2, micro_batch_size: 2, learning_rate: 0.01, threads_per_rank: 1,
   run_dir: "{shards}"}}
"""
VISION = "{placement: colocated, other_media: {}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.make("qwen3_vl", tmp_path_factory.mktemp("folder") / "model")


def write_recipe(folder: Path, directory: Path, encoders: str) -> Path:
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder, shards=directory, encoders=encoders))
    return path


@pytest.mark.parametrize(
    "encoders",
    [
        f"{{vision: {VISION}, film: {FILM}}}",
        f"{{film: {OTHER_FAMILY}, vision: {VISION}}}",
    ],
    ids=["first of the family", "only one of the family"],
)
def test_the_folder_gives_one_encoder_its_sizes_and_weights(
    folder: Path, tmp_path: Path, encoders: str
) -> None:
    recipe = load_recipe(write_recipe(folder, tmp_path, encoders))
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(recipe.to_yaml())
    for loaded in (recipe, load_recipe(resolved)):
        initial = initial_weights(loaded)
        assert initial is not None
        assert set(initial.weights) == {"language", "vision"}
        assert architecture_of_folder(folder).tower_of(loaded) == "vision"
        assert loaded.encoders["film"].model["hidden_size"] == 16
        assert loaded.encoders["film"].media_tokens.keys() == {"video"}


@pytest.mark.slow
def test_a_further_encoder_trains_from_fresh_weights_and_stays_out_of_the_export(
    run_ranks: RunRanks, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_samples(tmp_path, (1,) * 4, videos_per_sample=(1,) * 4)
    recipe = write_recipe(folder, tmp_path, f"{{vision: {VISION}, film: {FILM}}}")
    runs.run(run_ranks, recipe, "train.save_every=1")
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    first, last = (tmp_path / "two" / "checkpoints" / f"step_{step}" for step in (1, 2))
    assert find_checkpoint(tmp_path / "two") == last
    key = "film.blocks.layers.1.mlp.linear_fc1.weight"
    before, after = (reading.read(checkpoint, [key])[key] for checkpoint in (first, last))
    assert after.shape == (24, 16)
    assert not torch.equal(before, after)

    capsys.readouterr()
    convert_to_hf(last, tmp_path / "exported", 10**9)
    printed = capsys.readouterr().out
    assert "encoders.film: no part of qwen3_vl in Hugging Face format" in printed
    base, exported = folders.tensors(folder), folders.tensors(tmp_path / "exported")
    assert {k: t.shape for k, t in exported.items()} == {k: t.shape for k, t in base.items()}
    moved = [k for k in base if not torch.equal(base[k], exported[k])]
    assert any("visual" in k for k in moved)
    assert any("language_model" in k for k in moved)


# ------------------------------------------- what the model does not train

EXTRA = {
    "mtp.fc.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "mtp.layers.0.experts": torch.arange(8, dtype=torch.int64).view(2, 2, 2),
    "mtp.scale": torch.tensor(0.1, dtype=torch.float64),
}


def with_extras(family: str, folder: Path) -> Path:
    folders.make(family, folder)
    folders.rewrite(folder, lambda tensors: tensors | EXTRA)
    (folder / "README.md").write_text("a model\n")
    (folder / "figure.png").write_bytes(bytes(range(256)))
    (folder / "consolidated.pth").write_bytes(b"old weights")
    return folder


@pytest.mark.parametrize("shard_bytes", [GB, 20_000])
def test_an_export_carries_what_the_model_does_not_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shard_bytes: int
) -> None:
    folder = with_extras("qwen3_vl", tmp_path / "model")
    exported = folders.assert_round_trip(folder, tmp_path, shard_bytes)
    files = {path.name for path in exported.iterdir() if path.suffix not in (".safetensors",)}
    expected = {path.name for path in folder.iterdir() if path.suffix not in (".safetensors",)}
    assert files - {"model.safetensors.index.json"} == expected - {
        "consolidated.pth",
        "mimo_tiny.json",
    }
    for name in ("README.md", "figure.png"):
        assert (exported / name).read_bytes() == (folder / name).read_bytes()
    printed = capsys.readouterr().out
    first = ", ".join(EXTRA)
    assert f"3 tensors ({first}), 96 bytes" in printed
    assert "2 files (README.md, figure.png), 264 bytes" in printed
    if shard_bytes < GB:
        index = json.loads((exported / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == folders.tensors(folder).keys()


def test_an_export_whose_folder_lost_its_extra_tensors_is_refused(tmp_path: Path) -> None:
    folder = with_extras("qwen3_vl", tmp_path / "model")
    convert_from_hf(folder, tmp_path / "ours")
    folder.rename(tmp_path / "moved")
    message = r"init_from is .*model, which no longer has 3 tensors .*mtp\.fc\.weight.*put .* back"
    with pytest.raises(InputError, match=message) as raised:
        convert_to_hf(tmp_path / "ours", tmp_path / "exported", GB)
    assert raised.value.exit_code == 2
    folders.make("qwen3_vl", folder)  # the same model, without them
    with pytest.raises(InputError, match=message):
        convert_to_hf(tmp_path / "ours", tmp_path / "exported", GB)
    assert not (tmp_path / "exported").exists()
    shutil.rmtree(folder)
    (tmp_path / "moved").rename(folder)
    convert_to_hf(tmp_path / "ours", tmp_path / "exported", GB)
    folders.assert_same_tensors(tmp_path / "exported", folder)


def test_files_that_are_gone_are_named_and_do_not_end_an_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders.make("qwen3_vl", tmp_path / "model")
    (folder / "README.md").write_text("a model\n")
    convert_from_hf(folder, tmp_path / "ours")
    original = folder.rename(tmp_path / "moved")
    convert_to_hf(tmp_path / "ours", tmp_path / "exported", GB)
    folders.assert_same_tensors(tmp_path / "exported", original)
    assert "so not carried: 1 files (README.md)" in capsys.readouterr().out


def test_a_model_of_transformers_is_exported_under_the_names_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = folders.make("qwen3", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = AutoConfig.for_model("olmo3", vocab_size=vocab, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    # Saved from the base model, with a buffer of another dtype, and a head that is not loaded.
    folders.rewrite(
        folder, lambda tensors: {k.removeprefix("model."): x for k, x in tensors.items()} | EXTRA
    )
    original = folders.tensors(folder)
    assert "layers.0.self_attn.q_proj.weight" in original
    exported = folders.assert_round_trip(folder, tmp_path)
    assert "3 tensors (mtp.fc.weight" in capsys.readouterr().out
    model_again = AutoModelForCausalLM.from_pretrained(exported)
    for key, tensor in model.state_dict().items():
        assert torch.equal(model_again.state_dict()[key], tensor), key
    # The names on disk are recorded.
    folders.rewrite(folder, lambda tensors: {k: x for k, x in tensors.items() if k not in EXTRA})
    shutil.rmtree(tmp_path / "ours")
    convert_from_hf(folder, tmp_path / "ours")
    folder.rename(tmp_path / "moved")
    convert_to_hf(tmp_path / "ours", tmp_path / "moved too", GB)
    folders.assert_same_tensors(tmp_path / "moved too", tmp_path / "moved")
