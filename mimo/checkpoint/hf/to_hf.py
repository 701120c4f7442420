"""`mimo convert to-hf`: a checkpoint of ours, from whatever layout, in Hugging Face format.

One file of the result is in memory at a time. Adapters are merged into what they adapt;
`mimo.checkpoint.hf.adapter` writes them separately.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mimo.checkpoint.assets import copy_assets
from mimo.checkpoint.hf.export_config import changed_settings, write_image_settings
from mimo.checkpoint.hf.folder import INDEX, SINGLE, shards_of
from mimo.checkpoint.hf.initial import original_tower
from mimo.checkpoint.hf.new_folder import new_folder
from mimo.checkpoint.hf.trained_model import TrainedModel, TrainedWeight, open_trained
from mimo.errors import InputError
from mimo.families.hf_config import read_json, write_json
from mimo.runtime.progress import counter_of


def convert(run: Path, target: Path, shard_bytes: int, average: bool = False) -> None:
    """Write the folder ``target``: weights, index, configuration, tokenizer and processor files.

    run: a run or checkpoint folder whose model started from a Hugging Face checkpoint. shard_bytes:
    the largest size of a file; a larger tensor has one of its own. average: write the moving
    average of the weights. Where the language model was trained without the checkpoint's tower, the
    tower goes along as it was, from the folder that the recipe starts from. Encoders that the
    format has no place for are named on the console.

    Raises InputError for a checkpoint of another kind, and RecipeError with every tensor that is
    missing, unknown or has another shape.
    """
    trained = open_trained(run, average)
    changed = changed_settings(trained.recipe, trained.architecture, trained.assets)
    files: list[Callable[[], dict[str, Tensor]]] = [
        partial(_trained_tensors, trained, shard) for shard in trained.shards(shard_bytes)
    ]
    if (tower := original_tower(trained.recipe)) is not None:
        stored = tower.checkpoint
        sources = [s for own in tower.weights.values() for weight in own for s in weight.sources]
        sizes = ((source, stored.num_bytes(source)) for source in sources)
        files += [partial(stored.stored, shard) for shard in shards_of(sizes, shard_bytes)]
    to_disk = trained.architecture.layouts[0].on_disk
    with new_folder(target) as folder, counter_of("files", len(files)) as advance:
        copy_assets(trained.assets, folder)
        write_image_settings(folder, changed)
        _set_dtype(folder / "config.json", trained.weights[0].dtype)
        _write(folder, files, to_disk, advance)
    trained.tell_what_is_left_out()


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB". Raises InputError."""
    number, unit = text[:-2], text[-2:].upper()
    if unit not in _UNITS or not number.isdigit() or int(number) < 1:
        raise InputError(f"--shard-size {text}: give a whole number of KB, MB or GB, such as 5GB")
    return int(number) * _UNITS[unit]


def _trained_tensors(trained: TrainedModel, shard: list[TrainedWeight]) -> dict[str, Tensor]:
    """The tensors of theirs that a shard consists of, adapters merged, by name in memory."""
    ours = trained.read(shard)
    tensors: dict[str, Tensor] = {}
    for one in shard:
        # Each goes before the next is taken apart: two copies of one tensor, not of a file.
        unpacked = one.weight.unpack(one.merged(ours))
        tensors |= {key: tensor.contiguous() for key, tensor in unpacked.items()}
    return tensors


def _write(
    folder: Path,
    files: Sequence[Callable[[], dict[str, Tensor]]],
    to_disk: Callable[[str], str],
    advance: Callable[[], None],
) -> None:
    """files: each gives the tensors of one file by name in memory, when its turn comes."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors_of in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path = folder / (SINGLE if len(files) == 1 else name)
        tensors = {to_disk(key): tensor for key, tensor in tensors_of().items()}
        save_file(tensors, path, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", path)  # else only its owner may read it
        weight_map |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        advance()
    if len(files) > 1:
        metadata, weight_map = {"total_size": total}, dict(sorted(weight_map.items()))
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    """Say in the configuration what the weights are stored in now."""
    content = read_json(config)
    for key in ("dtype", "torch_dtype"):
        if key in content:
            content[key] = str(dtype).removeprefix("torch.")
    write_json(config, content)
