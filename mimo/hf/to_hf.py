"""`mimo convert to-hf`: a checkpoint of ours, from whatever layout, in Hugging Face format.

One file of the result is in memory at a time. Neither the engine nor the model is needed: our
checkpoints name every tensor as in the whole model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mimo.assets import ASSETS, copy_assets, recipe_of
from mimo.checkpoint_folder import find_checkpoint
from mimo.families import encoder_settings, language_settings
from mimo.hf import stored
from mimo.hf.architectures import Architecture
from mimo.hf.config import read_json
from mimo.hf.folder import INDEX, SINGLE
from mimo.hf.keymap import Weight
from mimo.hf.recipe_keys import architecture_of_folder
from mimo.new_folder import new_folder
from mimo.progress_bar import counter_of
from mimo.recipe import Recipe
from mimo.recipe_errors import InputError, RecipeError


@dataclass(frozen=True)
class Stored:
    """A parameter of ours in a checkpoint: its key, shape and dtype there."""

    key: str
    weight: Weight
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of what it becomes: without padding."""
        columns = self.shape.numel() // self.shape[0]
        return self.weight.num_rows * columns * self.dtype.itemsize


def convert(run: Path, target: Path, shard_bytes: int) -> None:
    """Write the folder ``target``: weights, index, configuration, tokenizer and processor files.

    run: a run or checkpoint folder whose model started from a Hugging Face checkpoint. shard_bytes:
    the largest size of a file; a larger tensor has one of its own. The folder appears complete or
    not at all.

    Raises InputError for a checkpoint of another kind, and RecipeError with every tensor that is
    missing or has another shape.
    """
    checkpoint = find_checkpoint(run)
    recipe = recipe_of(checkpoint)
    assets = checkpoint / ASSETS
    if not (assets / "config.json").is_file():
        raise InputError(
            f"{checkpoint}: its model did not start from a checkpoint in Hugging Face format, so "
            f"there is no configuration that describes it (train with init_from)"
        )
    architecture = architecture_of_folder(assets)
    weights = stored_weights(checkpoint, recipe, architecture)
    shards = list(_shards(weights, shard_bytes))
    to_disk = architecture.layouts[0].on_disk
    with new_folder(target) as folder, counter_of("files", len(shards)) as advance:
        copy_assets([assets], folder)
        _set_dtype(folder / "config.json", weights[0].dtype)
        _write(folder, checkpoint, shards, to_disk, advance)


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB". Raises InputError."""
    number, unit = text[:-2], text[-2:].upper()
    if unit not in _UNITS or not number.isdigit() or int(number) < 1:
        raise InputError(f"--shard-size {text}: give a whole number of KB, MB or GB, such as 5GB")
    return int(number) * _UNITS[unit]


def stored_weights(checkpoint: Path, recipe: Recipe, architecture: Architecture) -> list[Stored]:
    """Every parameter of the recipe's model, as ``checkpoint`` has it."""
    settings = {name: encoder_settings(recipe, name) for name in recipe.encoders}
    described = stored.describe(checkpoint)
    found, problems = [], []
    if not settings:
        problems.append("  the tower: the recipe has no encoders")
    for module, weights in architecture.weights(language_settings(recipe), settings).items():
        for weight in weights:
            key = f"{module}.{weight.name}"
            if key not in described:
                problems.append(f"  {key} is missing")
                continue
            shape, dtype = described[key]
            if shape[0] < weight.num_rows:
                problems.append(f"  {key} is {list(shape)}, needs {weight.num_rows} rows at least")
            found.append(Stored(key, weight, shape, dtype))
    if problems:
        raise RecipeError(f"{checkpoint} is not a whole {architecture.model_type}:", *problems)
    return found


def _shards(weights: list[Stored], shard_bytes: int) -> Iterator[list[Stored]]:
    """Consecutive parameters that fit into a file together."""
    shard, size = [], 0
    for one in weights:
        if shard and size + one.num_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(one)
        size += one.num_bytes
    yield shard


def _write(
    folder: Path,
    checkpoint: Path,
    shards: list[list[Stored]],
    to_disk: Callable[[str], str],
    advance: Callable[[], None],
) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path = folder / (SINGLE if len(shards) == 1 else name)
        ours = stored.read(checkpoint, {one.key: (one.shape, one.dtype) for one in shard})
        tensors: dict[str, Tensor] = {}
        for one in shard:
            # Each goes before the next is taken apart: two copies of one tensor, not of a file.
            unpacked = one.weight.unpack(ours.pop(one.key))
            tensors |= {to_disk(key): tensor.contiguous() for key, tensor in unpacked.items()}
        save_file(tensors, path, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", path)  # else only its owner may read it
        weight_map |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        advance()
    if len(shards) > 1:
        _write_index(folder / INDEX, weight_map, total)


def _write_index(path: Path, weight_map: Mapping[str, str], total: int) -> None:
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    """Say in the configuration what the weights are stored in now."""
    content = read_json(config)
    for key in ("dtype", "torch_dtype"):
        if key in content:
            content[key] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
