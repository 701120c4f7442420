"""Hugging Face checkpoints into any layout and back, to the last bit."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.initial import convert_from_hf
from mimo.errors import InputError, RecipeError
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.checkpoint.hf import folders
from tests.mimo.runs import save

GB = 10**9


@pytest.fixture(scope="module", params=quick(folders.FAMILIES, "qwen3_vl"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.make(request.param, tmp_path_factory.mktemp(request.param) / "model")


def save_in_layout(rank: int, recipe_path: Path, overrides: list[str]) -> int:
    """Start from the folder in a layout and write a checkpoint; the bytes that this rank read."""
    from mimo.checkpoint.folder import Progress
    from mimo.checkpoint.hf.initial import initial_weights
    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.checkpoint.save import Saver
    from mimo.model.build import build_model
    from mimo.model.dataset import open_tokenizer
    from mimo.parallel.build import build_layout
    from mimo.parallel.groups import build_topology

    recipe = load_recipe(recipe_path, overrides)
    # As rank 0 sends it to the others.
    initial = pickle.loads(pickle.dumps(initial_weights(recipe)))
    assert initial is not None
    initial.checkpoint.folder.bytes_read = 0
    topology = build_topology(build_layout(recipe))
    size = open_tokenizer(recipe).vocab_size
    model = build_model(recipe, topology, size, initial)
    save(Saver(model.modules, recipe_path.parent / "run", recipe), Progress(0, 0))
    return initial.checkpoint.folder.bytes_read


LAYOUTS = {
    "tp2_pp2": ["language.grid.tp=2", "language.grid.pp=2"],
    "sp_interleaved_encoder_tp2": [
        "language.grid={tp: 2, sp: true, pp: 2, vpp: 2}",
        "encoders.vision.grid={tp: 2, sp: true}",
    ],
    "colocated_cp2": [
        "language.grid.cp=2",
        "encoders.vision={placement: colocated, grid: {dp: 2}}",
    ],
}


@pytest.mark.parametrize("layout", quick(LAYOUTS, "sp_interleaved_encoder_tp2"))
def test_what_any_layout_read_and_saved_is_exported_bit_for_bit(
    run_ranks: RunRanks, folder: Path, tmp_path: Path, layout: str
) -> None:
    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.parallel.build import build_layout

    recipe = folders.write_recipe(folder, tmp_path / "recipe.yaml")
    world = build_layout(load_recipe(recipe, LAYOUTS[layout])).world_size
    run_ranks(save_in_layout, world, recipe, LAYOUTS[layout])
    convert_to_hf(tmp_path / "run", tmp_path / "exported", shard_bytes=GB)
    folders.assert_same_tensors(tmp_path / "exported", folder)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2_pp2", "colocated_cp2"])
def test_qwen3_5s_heads_for_more_tokens_survive_any_layout(
    run_ranks: RunRanks, tmp_path: Path, layout: str
) -> None:
    heads = {"mtp.fc.weight": torch.arange(12.0).view(3, 4), "mtp.norm.weight": torch.ones(3)}
    folder = folders.make("qwen3_5", tmp_path / "model")
    folders.rewrite(folder, lambda tensors: tensors | heads)
    test_what_any_layout_read_and_saved_is_exported_bit_for_bit(run_ranks, folder, tmp_path, layout)
    assert folders.tensors(tmp_path / "exported").keys() >= heads.keys()


def test_each_rank_reads_only_what_it_owns(
    run_ranks: RunRanks, folder: Path, tmp_path: Path
) -> None:
    recipe = folders.write_recipe(folder, tmp_path / "recipe.yaml")
    vision, *language = run_ranks(save_in_layout, 5, recipe, LAYOUTS["tp2_pp2"])
    stored = folders.tensors(folder)
    sizes = {key: tensor.nbytes for key, tensor in stored.items()}
    tower = sum(n for key, n in sizes.items() if "vis" in key or "multi_modal" in key)
    assert vision == tower
    layers = sum(n for key, n in sizes.items() if ".layers." in key and "vis" not in key)
    # Norms are on both ranks of a stage; embedding and head (or the tied copy) on one stage each.
    embedding = next(n for key, n in sizes.items() if "embed_tokens" in key)
    for rank, read in enumerate(language):
        assert layers / 4 <= read - embedding / 2 <= layers / 4 * 1.1, rank


@pytest.mark.parametrize("shard_bytes", [GB, 10**6, 1])
def test_a_round_trip_keeps_every_bit(folder: Path, tmp_path: Path, shard_bytes: int) -> None:
    exported = folders.assert_round_trip(folder, tmp_path, shard_bytes)
    files = list(exported.glob("*.safetensors"))
    index = exported / "model.safetensors.index.json"
    assert (len(files) == 1) == (shard_bytes == GB) == (not index.exists())


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_vl", {"tied": False, "dtype": "bfloat16"}),
        ("gemma3", {"tied": True, "shard_size": "500KB"}),
        *((family, {}) for family in folders.TEXT_ONLY),
    ],
)
def test_other_forms_of_a_checkpoint_keep_every_bit_too(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    folders.assert_round_trip(folders.make(family, tmp_path / "model", **settings), tmp_path)


def load_completely(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    loader: Any = AutoModelForImageTextToText
    model, report = loader.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model


def test_transformers_loads_an_export_completely(folder: Path, tmp_path: Path) -> None:
    from data.modalities.transformers import load_processor

    convert_from_hf(folder, tmp_path / "ours")
    convert_to_hf(tmp_path / "ours", tmp_path / "exported", 10**6)
    model, original = load_completely(tmp_path / "exported"), load_completely(folder)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, original(input_ids=ids).logits)
    load_processor(tmp_path / "exported")


# Beginnings of names as today's transformers writes them, and as checkpoints have them.
OTHER_NAMES = {
    "qwen2_5_vl, transformers 4.52": (
        "qwen2_5_vl",
        {"visual.": "model.visual.", "model.": "model.language_model."},
    ),
    "gemma3, published": ("gemma3", {"vision_tower.": "vision_tower.vision_model."}),
    "gemma3, transformers 4.52": (
        "gemma3",
        {
            "language_model.model.": "model.language_model.",
            "language_model.lm_head.": "lm_head.",
            "vision_tower.": "model.vision_tower.vision_model.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ),
}


@pytest.mark.parametrize("form", quick(OTHER_NAMES, "gemma3, published"))
def test_other_names_of_the_same_tensors_are_known_and_kept(tmp_path: Path, form: str) -> None:
    family, beginnings = OTHER_NAMES[form]
    folder = folders.make(family, tmp_path / "model")

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {}
        for key, tensor in tensors.items():
            old = next((prefix for prefix in beginnings if key.startswith(prefix)), "")
            renamed[beginnings.get(old, "") + key.removeprefix(old)] = tensor
        return renamed

    folders.rewrite(folder, rename)
    load_completely(folder)
    # Older versions stored this buffer.
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folders.rewrite(folder, lambda tensors: tensors | buffer)
    folders.assert_round_trip(folder, tmp_path)


def test_all_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    folder = folders.make("qwen3_vl", tmp_path / "model")

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["model.visual.merger.norm.bias"]
        del tensors["model.language_model.norm.weight"]
        tensors["model.visual.pos_embed.weight"] = torch.ones(3, 3)
        return {**tensors, "model.visual.extra": torch.ones(1)}

    folders.rewrite(folder, spoil)
    with pytest.raises(RecipeError) as caught:
        convert_from_hf(folder, tmp_path / "ours")
    text = str(caught.value)
    for line in (
        "model.visual.merger.norm.bias is missing",
        "model.language_model.norm.weight is missing",
        "model.visual.pos_embed.weight is [3, 3], the configuration asks for",
        "model.visual.extra is unknown",
    ):
        assert line in text
    assert not (tmp_path / "ours").exists()


def test_a_copy_of_a_tied_embedding_as_head_is_no_unknown_tensor(tmp_path: Path) -> None:
    folder = folders.make("qwen3_vl", tmp_path / "model")
    key = "model.language_model.embed_tokens.weight"
    folders.rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors[key].clone()})
    convert_from_hf(folder, tmp_path / "ours")


def test_folders_that_hold_no_checkpoint_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        convert_from_hf(tmp_path / "nowhere", tmp_path / "ours")
    folder = folders.make("gemma3", tmp_path / "model", shard_size="500KB")
    (folder / "model-00002-of-00007.safetensors").unlink(missing_ok=True)
    next(folder.glob("model-00003*")).write_bytes(b"short")
    with pytest.raises(InputError, match=r"model-0000[23]-of"):
        convert_from_hf(folder, tmp_path / "ours")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(InputError, match=r"holds neither model\.safetensors nor"):
        convert_from_hf(folder, tmp_path / "ours")
    (folder / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(InputError, match=r"model_type is 'clip'; qwen2_5_vl, qwen3_vl, .*gemma3"):
        convert_from_hf(folder, tmp_path / "ours")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    whole = folders.make("gemma3", tmp_path / "whole")
    with pytest.raises(InputError, match="exists already"):
        convert_from_hf(whole, tmp_path / "full")


_CONVERT = """
import sys, threading, time
from pathlib import Path
from mimo.checkpoint.hf.initial import convert_from_hf, minimal_recipe
from mimo.checkpoint.hf.export import convert_to_hf

def anonymous_bytes():
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny  # imports what conversion does not
source, target = Path(sys.argv[1]), Path(sys.argv[2])
warm = target / "warm"
convert_from_hf(Path(sys.argv[3]), warm / "ours")
convert_to_hf(warm / "ours", warm / "exported", 10**9)
before = peak = anonymous_bytes()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
convert_from_hf(source, target / "ours")
convert_to_hf(target / "ours", target / "exported", 16 * 10**6)
done = True
thread.join()
print(peak - before)
"""


@pytest.mark.slow
def test_conversion_needs_far_less_memory_than_the_model(tmp_path: Path) -> None:
    """A checkpoint of 300 MB in which no tensor has more than 8 MB."""
    small = folders.make("qwen3_vl", tmp_path / "small")
    large = _make_large(tmp_path / "large")
    command = [sys.executable, "-c", _CONVERT, str(large), str(tmp_path / "out"), str(small)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    size = sum(tensor.nbytes for tensor in folders.tensors(large).values())
    assert size > 250 * 10**6
    assert int(answer.stdout.split()[-1]) < size / 3
    folders.assert_same_tensors(tmp_path / "out" / "exported", large)


def _make_large(folder: Path) -> Path:
    """A Qwen3-VL with many layers."""
    import json

    from transformers import AutoConfig, AutoModelForImageTextToText

    folders.make("qwen3_vl", folder)
    content = json.loads((folder / "config.json").read_text())
    content["text_config"] |= {
        "num_hidden_layers": 24,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    content["vision_config"]["out_hidden_size"] = 512
    (folder / "config.json").write_text(json.dumps(content))
    config = AutoConfig.from_pretrained(folder)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder, max_shard_size="32MB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return folder
