"""A recipe that starts from a folder may have encoders that the folder does not hold."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from webdataset.writer import TarWriter

from mimo.checkpoint import reading
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import architecture_of_folder, load_recipe
from mimo.errors import RecipeError
from mimo.model.dataset import open_tokenizer
from tests.conftest import RunRanks
from tests.mimo import runs
from tests.mimo.checkpoint.hf import folders

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


def write_samples(path: Path, count: int) -> None:
    """Each with an image and a video of two frames."""
    rng = np.random.default_rng(0)
    with TarWriter(str(path), encoder=False) as tar:
        for number in range(count):
            parts = [{"type": "image"}, {"type": "video", "frames": 2}]
            user = {"role": "user", "content": [*parts, {"type": "text", "text": "what is this ?"}]}
            answer = {"role": "assistant", "content": str(number % 10)}
            files = {"json": json.dumps({"messages": [user, answer]}).encode()}
            for file in range(3):
                pixels = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
                buffer = io.BytesIO()
                Image.fromarray(pixels).save(buffer, "PNG")
                files[f"{file}.png"] = buffer.getvalue()
            tar.write({"__key__": f"sample{number}", **files})


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
    for one in (recipe, load_recipe(resolved)):
        initial = initial_weights(one)
        assert initial is not None
        assert set(initial.weights) == {"language", "vision"}
        assert architecture_of_folder(folder).tower_of(one) == "vision"
        assert one.encoders["film"].model["hidden_size"] == 16
        assert one.encoders["film"].media_tokens.keys() == {"video"}


def test_a_further_encoders_placeholder_must_be_in_the_tokenizer(
    folder: Path, tmp_path: Path
) -> None:
    encoders = f"{{vision: {VISION}, film: {FILM}}}".replace("<|video_pad|>", "<|film|>")
    recipe = load_recipe(write_recipe(folder, tmp_path, encoders))
    with pytest.raises(RecipeError, match=r"data\.tokenizer: .*<\|film\|>"):
        open_tokenizer(recipe)


@pytest.mark.slow
def test_a_further_encoder_trains_from_fresh_weights_and_stays_out_of_the_export(
    run_ranks: RunRanks, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples(tmp_path / "train-00000.tar", 4)
    recipe = write_recipe(folder, tmp_path, f"{{vision: {VISION}, film: {FILM}}}")
    runs.run(run_ranks, recipe, "train.save_every=1")
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    first, last = (tmp_path / "two" / "checkpoints" / f"step_{step}" for step in (1, 2))
    assert find_checkpoint(tmp_path / "two") == last
    described = reading.describe(last)
    key = "film.blocks.layers.1.mlp.linear_fc1.weight"
    assert described[key][0] == (24, 16)
    before, after = (reading.read(one, {key: described[key]})[key] for one in (first, last))
    assert not torch.equal(before, after)

    capsys.readouterr()
    convert_to_hf(last, tmp_path / "exported", 10**9)
    told = capsys.readouterr().out
    assert "encoders.film: no part of qwen3_vl in Hugging Face format" in told
    base, exported = folders.tensors(folder), folders.tensors(tmp_path / "exported")
    assert {k: t.shape for k, t in exported.items()} == {k: t.shape for k, t in base.items()}
    moved = [k for k in base if not torch.equal(base[k], exported[k])]
    assert any("visual" in k for k in moved)
    assert any("language_model" in k for k in moved)
