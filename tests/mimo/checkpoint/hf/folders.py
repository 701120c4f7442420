"""Tiny checkpoints in Hugging Face format, and what tests ask of such folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.initial import convert_from_hf
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3")
TEXT_ONLY = ("qwen3", "qwen2", "gemma3_text")


def make(family: str, folder: Path, **settings: object) -> Path:
    """The tiny checkpoint of a family."""
    write_tiny(TinyCheckpoint(family, **settings), folder)  # type: ignore[arg-type]
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by key."""
    tensors_by_key = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            tensors_by_key |= {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
    return tensors_by_key


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace the tensors of a folder with a single file."""
    changed = change(tensors(folder))
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same_tensors(got: Path, expected: Path) -> None:
    """Keys, dtypes and every bit."""
    actual, wanted = tensors(got), tensors(expected)
    assert actual.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert actual[key].dtype == tensor.dtype, key
        assert torch.equal(actual[key], tensor), key


def assert_round_trip(folder: Path, path: Path, shard_bytes: int = 10**9) -> Path:
    """Assert that import and export keep every bit; return the exported folder."""
    convert_from_hf(folder, path / "ours")
    convert_to_hf(path / "ours", path / "exported", shard_bytes)
    assert_same_tensors(path / "exported", folder)
    return path / "exported"


RECIPE = """
name: from_hf
init_from: {folder}
language: {{grid: {{dp: 1}}}}
encoders: {{vision: {{grid: {{dp: 1}}}}}}
data: {{sources: [{{path: "{folder}/train-*.tar"}}], sequence_length: 256}}
train: {{steps: 1, global_batch_size: 4, run_dir: "{folder}/runs"}}
"""


def write_recipe(folder: Path, path: Path) -> Path:
    """A recipe that starts from ``folder``."""
    path.write_text(RECIPE.format(folder=folder))
    return path
