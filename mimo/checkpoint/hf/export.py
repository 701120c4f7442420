"""Export."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mimo.checkpoint.assets import ASSETS, copy_assets, recipe_of
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.architectures import Architecture
from mimo.checkpoint.hf.folder import INDEX, SINGLE, new_folder
from mimo.checkpoint.hf.initial import original_tower
from mimo.checkpoint.hf.recipes import architecture_of_folder
from mimo.checkpoint.reading import describe, read, shards_of
from mimo.checkpoint.resume import open_checkpoint
from mimo.checkpoint.tensors import averages
from mimo.config.modules import LoRA
from mimo.config.schema import LANGUAGE, Recipe, key_of
from mimo.config.source import dotted
from mimo.errors import InputError, RecipeError
from mimo.families.contracts import FamilySettings
from mimo.families.hf_config import (
    TOKENIZER,
    WHOLE,
    image_defaults_of_processor,
    read_config,
    read_json,
    read_processors,
    write_json,
)
from mimo.families.keymap import Weight, adapter_names, adapter_shapes, is_adapter, merged_weight
from mimo.families.registry import encoder_settings, language_settings
from mimo.runtime.progress import counter_of, progress_of

# Settings that no configuration of theirs has: how fresh weights are drawn, and padding.
_OURS = {"init_std", "vocab_multiple"}
# Of the image processor: their name by ours. Limits of pixels are written in several ways.
_LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_CROPS = [f"pan_and_scan_{k}" for k in ("min_crop_size", "max_num_crops", "min_ratio_to_activate")]
_SAME = ("image_mean", "image_std", *_CROPS)
_IMAGE_KEYS = {"pan_and_scan": "do_pan_and_scan", **{key: key for key in _SAME}}


@dataclass(frozen=True)
class Difference:
    """A setting of a recipe's module that a folder says otherwise. expected: what that says."""

    module: str
    key: str
    value: Any
    expected: Any

    @property
    def is_of_images(self) -> bool:
        """Whether it only says how images are prepared."""
        return self.module != LANGUAGE and self.key in (*_LIMITS, *_IMAGE_KEYS)


def differences(recipe: Recipe, architecture: Architecture, folder: Path) -> Iterator[Difference]:
    """What the recipe has set otherwise than the folder, of the modules that are in it."""
    config, processors = read_config(folder), read_processors(folder)
    language = architecture.language_family()
    said: FamilySettings = language.Settings(**language.settings_from_hf(config))
    modules: list[tuple[str, FamilySettings, FamilySettings]] = [
        (LANGUAGE, language_settings(recipe), said)
    ]
    if (tower := architecture.tower_of(recipe)) is not None:
        family = architecture.encoder_family()
        said = family.Settings(**family.settings_from_hf(config, processors))
        modules.append((tower, encoder_settings(recipe, tower), said))
    for name, given, said in modules:
        expected = said.model_dump()
        for key, value in given.model_dump().items():
            if key not in _OURS and value != expected[key]:
                yield Difference(name, key, value, expected[key])


def changed_settings(recipe: Recipe, architecture: Architecture, folder: Path) -> dict[str, Any]:
    """What the recipe has set otherwise than the folder for images, by our key.

    Raises RecipeError for settings that differ and cannot be written into its files: the exported
    model would compute something else than the one that was trained.
    """
    found = [*differences(recipe, architecture, folder)]
    problems = [
        f"  {dotted((*key_of(one.module), 'model'))}.{one.key} is {one.value}, "
        f"{folder} says {one.expected}"
        for one in found
        if not one.is_of_images
    ]
    if problems:
        raise RecipeError(
            "the model was trained with settings that its configuration in Hugging Face format "
            "does not say, so it would compute something else there:",
            *problems,
        )
    return {one.key: one.value for one in found}


def write_image_settings(folder: Path, changed: Mapping[str, Any]) -> None:
    """Write settings from `changed_settings` into the files that decide in ``folder``."""
    if not changed:
        return
    sections: list[tuple[Path, dict[str, Any], dict[str, Any]]] = []  # path, content, part of it
    path = folder / WHOLE
    if path.is_file() and (content := read_json(path)).get("image_processor"):
        sections.append((path, content, content["image_processor"]))
    path = folder / "preprocessor_config.json"
    if path.is_file():
        content = read_json(path)
        sections.append((path, content, content))
    for path, content, section in sections:
        for key, value in changed.items():
            if key in _IMAGE_KEYS:
                section[_IMAGE_KEYS[key]] = value
                continue
            size = section.setdefault("size", {})
            size[_LIMITS[key]] = value
            if section.get(key) is not None:
                section[key] = value
        write_json(path, content)
    # Where the whole processor has a default, only what the tokenizer is made with counts more.
    fixed = image_defaults_of_processor(folder)
    stronger = {_IMAGE_KEYS[k]: v for k, v in changed.items() if _IMAGE_KEYS.get(k) in fixed}
    if stronger:
        write_json(folder / TOKENIZER, {**read_json(folder / TOKENIZER), **stronger})


@dataclass(frozen=True)
class Adapter:
    """What adapts a linear: the keys of its two matrices in a checkpoint, and its sizes."""

    lora_a: str
    lora_b: str
    lora: LoRA


@dataclass(frozen=True)
class TrainedWeight:
    """A parameter of ours in a checkpoint: its key, shape and dtype there."""

    key: str
    weight: Weight
    shape: torch.Size
    dtype: torch.dtype
    adapter: Adapter | None = None

    @property
    def num_bytes(self) -> int:
        """Of the result: without padding, with its adapter merged."""
        columns = self.shape.numel() // self.shape[0]
        return self.weight.num_rows * columns * self.dtype.itemsize

    def stored(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype by key: the parameter and what adapts it."""
        found = {self.key: (self.shape, self.dtype)}
        if self.adapter is not None:
            keys = self.adapter.lora_a, self.adapter.lora_b
            shapes = adapter_shapes(self.shape, self.adapter.lora.rank)
            found |= {k: (torch.Size(s), self.dtype) for k, s in zip(keys, shapes, strict=True)}
        return found

    def merged(self, tensors: dict[str, Tensor]) -> Tensor:
        """The parameter with its adapter, (R, ...), from what `stored` names in ``tensors``.

        Those are removed from ``tensors``.
        """
        weight, *adapter = [tensors.pop(key) for key in self.stored()]
        if self.adapter is None:
            return weight
        lora_a, lora_b = adapter
        return merged_weight(weight, lora_a, lora_b, self.adapter.lora.scale)


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint of ours whose model has a form in Hugging Face format.

    weights: every parameter of the modules that have that form. averages: by its key, the key of
    the moving average that is read in a parameter's place.
    """

    checkpoint: Path
    recipe: Recipe
    architecture: Architecture
    weights: list[TrainedWeight]
    averages: Mapping[str, str]

    def tell_what_is_left_out(self) -> None:
        """One line on the console, where an encoder stays in our checkpoint alone."""
        tower = self.architecture.tower_of(self.recipe)
        names = ", ".join(f"encoders.{name}" for name in self.recipe.encoders if name != tower)
        if names:
            print(
                f"{names}: no part of {self.architecture.model_type} in Hugging Face format, so "
                f"not written; kept in {self.checkpoint} only"
            )

    @property
    def assets(self) -> Path:
        """The folder with the configuration, the tokenizer and the processor's files."""
        return self.checkpoint / ASSETS

    def shards(self, num_bytes: int) -> Iterator[list[TrainedWeight]]:
        """Groups of consecutive parameters of at most so many bytes; a larger one is alone."""
        return shards_of(((one, one.num_bytes) for one in self.weights), num_bytes)

    def read(
        self, weights: Iterable[TrainedWeight], only_adapters: bool = False
    ) -> dict[str, Tensor]:
        """Parameters and what adapts them, or only that, by key."""
        stored = [pair for one in weights for pair in one.stored().items()]
        sources = {
            key: (self.averages.get(key, key), form)
            for key, form in stored
            if is_adapter(key) or not only_adapters
        }
        found = read(self.checkpoint, dict(sources.values()))
        return {key: found[source] for key, (source, _) in sources.items()}


def open_trained(run: Path, average: bool = False) -> TrainedModel:
    """run: a run or checkpoint folder whose model started from a Hugging Face checkpoint.

    average: read the moving average of the weights that have learned.
    Raises InputError for a checkpoint of another kind or without an average, and RecipeError with
    every tensor that is missing, unknown or has another shape.
    """
    checkpoint = find_checkpoint(run)
    with progress_of("verifying") as progress:
        open_checkpoint(checkpoint, progress)
    recipe = recipe_of(checkpoint)
    assets = checkpoint / ASSETS
    if recipe.init_from is None or not (assets / "config.json").is_file():
        raise InputError(
            f"{checkpoint}: its model did not start from a checkpoint in Hugging Face format, so "
            f"there is no configuration that describes it (train with init_from)"
        )
    architecture = architecture_of_folder(assets)
    described = describe(checkpoint)
    weights = _trained_weights(checkpoint, described, recipe, architecture)
    average_keys = averages(described) if average else {}
    return TrainedModel(checkpoint, recipe, architecture, weights, average_keys)


def _trained_weights(
    checkpoint: Path,
    described: Mapping[str, tuple[torch.Size, torch.dtype]],
    recipe: Recipe,
    architecture: Architecture,
) -> list[TrainedWeight]:
    found: list[TrainedWeight] = []
    problems: list[str] = []
    wanted = architecture.weights_of(recipe)
    for module, weights in wanted.items():
        lora = recipe.module(module).lora
        for weight in weights:
            key = f"{module}.{weight.name}"
            if key not in described:
                problems.append(f"  {key} is missing")
                continue
            shape, dtype = described[key]
            if shape[0] < weight.num_rows:
                problems.append(f"  {key} is {list(shape)}, needs {weight.num_rows} rows at least")
            lora_a, lora_b = adapter_names(key)
            adapter = None
            if lora is not None and (lora_a in described or lora_b in described):
                adapter = Adapter(lora_a, lora_b, lora)
            found.append(TrainedWeight(key, weight, shape, dtype, adapter))
    problems += _adapter_problems(recipe, list(wanted), found, described)
    if problems:
        raise RecipeError(f"{checkpoint} is not a whole {architecture.model_type}:", *problems)
    return found


def _adapter_problems(
    recipe: Recipe,
    modules: Sequence[str],
    weights: list[TrainedWeight],
    described: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> Iterator[str]:
    """Adapters that are incomplete, of another size than the recipe's, or unknown.

    modules: whose weights these are.
    """
    expected = {
        key: shape
        for one in weights
        if one.adapter is not None
        for key, (shape, _) in one.stored().items()
        if key != one.key
    }
    for key, shape in expected.items():
        if key not in described:
            yield f"  {key} is missing"
        elif described[key][0] != shape:
            yield f"  {key} is {list(described[key][0])}, the recipe asks for {list(shape)}"
    for key in sorted(described.keys() - expected.keys()):
        # What the optimizers hold of the adapters has other beginnings.
        if is_adapter(key) and key.partition(".")[0] in modules:
            yield f"  {key} is unknown: the recipe has no adapter there"
    for module in modules:
        part = recipe.module(module)
        if part.lora is not None and not any(key.startswith(f"{module}.") for key in expected):
            yield f"  the adapters of {module} are missing"


def convert_to_hf(run: Path, target: Path, shard_bytes: int, average: bool = False) -> None:
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
