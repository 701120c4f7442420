"""`mimo convert to-hf`: a checkpoint of ours, from whatever layout, in Hugging Face format.

No engine is needed: our checkpoints name every tensor as in the whole model. One file of the result
is in memory at a time. Adapters are merged; `mimo.checkpoint.hf.adapter` writes them separately.
A model with a generator becomes a folder of diffusers, see `mimo.checkpoint.hf.pipelines`.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mimo.checkpoint.assets import ASSETS, copy_assets, move_tokenizer
from mimo.checkpoint.hf import pipelines
from mimo.checkpoint.hf.architectures import Architecture
from mimo.checkpoint.hf.carried import carried_of
from mimo.checkpoint.hf.conversion import Conversion, SameNames
from mimo.checkpoint.hf.trained import TrainedModel, TrainedWeight, open_trained
from mimo.checkpoint.hf.weights_folder import STEM, index_name
from mimo.checkpoint.reading import shards_of
from mimo.config.schema import LANGUAGE, Recipe
from mimo.config.source import dotted
from mimo.errors import RecipeError
from mimo.families.contracts import FamilySettings
from mimo.families.hf_config import (
    TOKENIZER,
    WHOLE,
    image_defaults_of_processor,
    new_folder,
    read_config,
    read_json,
    read_processors,
    write_json,
)
from mimo.families.registry import QUERIES, encoder_settings, language_settings
from mimo.runtime.progress import counter_of

# Settings that no configuration of theirs has: initialization of weights, padding, losses.
_OURS = {"init_std", "vocab_multiple", "folder", "balance_loss", "z_loss", "pool_layers"}
# Of the image processor: their name by ours. Limits of pixels are written in several ways.
_LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_CROPS = [f"pan_and_scan_{k}" for k in ("min_crop_size", "max_num_crops", "min_ratio_to_activate")]
_SAME = ("image_mean", "image_std", *_CROPS)
_IMAGE_KEYS = {"pan_and_scan": "do_pan_and_scan", **{key: key for key in _SAME}}
_QUERIES_FILE = "queries.safetensors"
_File = Callable[[], dict[str, Tensor]]
"""Returns the tensors of a file by name on disk."""


def convert_to_hf(
    run: Path, target: Path, shard_bytes: int = 5 * 10**9, average: bool = False
) -> None:
    """Write the folder ``target``: weights, index, configuration, tokenizer and processor files.

    run: a run or checkpoint folder. shard_bytes: the largest size of a file; a larger tensor has a
    file to itself. average: write the moving average of the weights. Tensors and files of the
    original folder that are not trained are copied, so is the autoencoder. Raises InputError, also
    if one of them is gone.
    """
    trained = open_trained(run, average)
    assets = trained.checkpoint / ASSETS
    changed = _changed_settings(trained.recipe, trained.architecture, assets)
    sources = [source for weight in trained.weights for source in weight.weight.sources]
    folder = Path(trained.recipe.init_from or "")
    carried = carried_of(folder, assets, sources)

    def files_of(weights: Iterable[TrainedWeight], conversion: Conversion) -> list[_File]:
        shards = _whole_groups(weights, conversion, shard_bytes)
        return [partial(_merged_tensors, trained, conversion, shard) for shard in shards]

    files = files_of(trained.weights, carried.to_disk)
    shards = shards_of(carried.tensors.items(), shard_bytes)
    files += [partial(carried.read, shard) for shard in shards]
    beside = (*trained.generator_weights, *trained.queries)
    names = SameNames({s.key: s.shape for w in beside for s in w.weight.sources})
    generator_files = files_of(trained.generator_weights, names)
    num_files = len(files) + len(generator_files)
    with new_folder(target) as whole, counter_of("files", num_files) as advance:
        folder = whole if trained.generator is None else whole / pipelines.TEXT_ENCODER
        folder.mkdir(exist_ok=True)
        carried.copy_files(folder)
        copy_assets(assets, folder)
        _write_image_settings(folder, changed)
        _set_dtype(folder / "config.json", trained.weights[0].tensor.dtype)
        _write_files(folder, files, advance)
        if trained.generator is not None:
            move_tokenizer(folder, whole / pipelines.TOKENIZER)
            pipelines.write_around(trained.recipe, trained.generator, assets, whole)
            _write_files(whole / pipelines.TRANSFORMER, generator_files, advance, pipelines.WEIGHTS)
        if trained.queries:
            queries = _merged_tensors(trained, names, trained.queries)
            by_generator = {name.removeprefix(QUERIES): rows for name, rows in queries.items()}
            save_file(by_generator, whole / _QUERIES_FILE)
            shutil.copymode(folder / "config.json", whole / _QUERIES_FILE)
    trained.print_left_out()


def _whole_groups(
    weights: Iterable[TrainedWeight], conversion: Conversion, num_bytes: int
) -> Iterator[list[TrainedWeight]]:
    """Yield shards of parameters; parameters that are converted together share a shard."""
    groups = defaultdict[str, list[TrainedWeight]](list)
    for weight in weights:
        groups[conversion.group(weight.weight.sources[0].key)].append(weight)
    sizes = ((group, sum(weight.num_bytes for weight in group)) for group in groups.values())
    for shard in shards_of(sizes, num_bytes):
        yield [weight for group in shard for weight in group]


def _merged_tensors(
    trained: TrainedModel, conversion: Conversion, shard: list[TrainedWeight]
) -> dict[str, Tensor]:
    """Return the Hugging Face tensors of a shard, adapters merged, by name on disk."""
    ours = trained.read(shard)
    tensors: dict[str, Tensor] = {}
    for weight in shard:
        # Each of ours is freed before the next is unpacked: two copies of a tensor, not of a file.
        unpacked = weight.weight.unpack(weight.merged(ours))
        tensors |= {key: tensor.contiguous() for key, tensor in unpacked.items()}
    return conversion.to_disk(tensors)


def _write_files(
    folder: Path, files: Sequence[_File], advance: Callable[[], None], stem: str = STEM
) -> None:
    """Write the files, whose names begin with ``stem``, and their index."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, read_tensors in enumerate(files, start=1):
        part = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        path = folder / f"{stem}{part}.safetensors"
        tensors = read_tensors()
        save_file(tensors, path, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", path)  # else only its owner may read it
        weight_map |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        advance()
    if len(files) > 1:
        metadata, weight_map = {"total_size": total}, dict(sorted(weight_map.items()))
        write_json(folder / index_name(stem), {"metadata": metadata, "weight_map": weight_map})


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    content = read_json(config)
    for key in ("dtype", "torch_dtype"):
        if key in content:
            content[key] = str(dtype).removeprefix("torch.")
    write_json(config, content)


# ----------------------------------------------------------------------- its configuration


@dataclass(frozen=True)
class Difference:
    """A setting of a recipe's module, and the different one that a folder's files have."""

    module: str
    key: str
    value: Any
    expected: Any

    @property
    def is_of_images(self) -> bool:
        return self.module != LANGUAGE and self.key in (*_LIMITS, *_IMAGE_KEYS)


def differences(recipe: Recipe, architecture: Architecture, folder: Path) -> Iterator[Difference]:
    """Yield the settings of the recipe that differ from the folder's files."""
    config, processors = read_config(folder), read_processors(folder)
    language = architecture.language_family()
    expected: FamilySettings = language.Settings(**language.settings_from_hf(config))
    modules: list[tuple[str, FamilySettings, FamilySettings]] = [
        (LANGUAGE, language_settings(recipe), expected)
    ]
    if (tower := architecture.tower_of(recipe)) is not None:
        family = architecture.encoder_family()
        expected = family.Settings(**family.settings_from_hf(config, processors))
        modules.append((tower, encoder_settings(recipe, tower), expected))
    for name, settings, expected in modules:
        values = expected.model_dump()
        for key, value in settings.model_dump().items():
            if key not in _OURS and value != values[key]:
                yield Difference(name, key, value, values[key])


def _changed_settings(recipe: Recipe, architecture: Architecture, folder: Path) -> dict[str, Any]:
    """Return image settings that differ from the folder's. Raises RecipeError for others."""
    changed = [*differences(recipe, architecture, folder)]
    problems = [
        f"  {dotted((*recipe.key_of(item.module), 'model'))}.{item.key} is {item.value}, "
        f"{folder} says {item.expected}"
        for item in changed
        if not item.is_of_images
    ]
    if problems:
        raise RecipeError(
            "the model was trained with settings that its configuration in Hugging Face format "
            "does not say, so it would compute something else there:",
            *problems,
        )
    return {item.key: item.value for item in changed}


def _write_image_settings(folder: Path, changed: Mapping[str, Any]) -> None:
    if not changed:
        return
    for name, nested in ((WHOLE, "image_processor"), ("preprocessor_config.json", None)):
        content = read_json(folder / name) if (folder / name).is_file() else {}
        section = content if nested is None else content.get(nested)
        if not section:
            continue
        for key, value in changed.items():
            if key in _IMAGE_KEYS:
                section[_IMAGE_KEYS[key]] = value
                continue
            section.setdefault("size", {})[_LIMITS[key]] = value
            if section.get(key) is not None:
                section[key] = value
        write_json(folder / name, content)
    # If the whole processor has a default, only the arguments of the tokenizer override it.
    defaults = image_defaults_of_processor(folder)
    stronger = {_IMAGE_KEYS[k]: v for k, v in changed.items() if _IMAGE_KEYS.get(k) in defaults}
    if stronger:
        write_json(folder / TOKENIZER, {**read_json(folder / TOKENIZER), **stronger})
