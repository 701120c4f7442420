"""A trained model as a checkpoint of ours has it: its parameters and what adapts them.

Neither the engine nor the model is needed to read it: our checkpoints name every tensor as in the
whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mimo.checkpoint import tensors as checkpoint_tensors
from mimo.checkpoint.assets import ASSETS, recipe_of
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.architectures import Architecture
from mimo.checkpoint.hf.folder import shards_of
from mimo.checkpoint.hf.recipes import architecture_of_folder
from mimo.checkpoint.integrity import open_checkpoint
from mimo.config.modules import LoRA
from mimo.config.schema import Recipe
from mimo.errors import InputError, RecipeError
from mimo.families.keymap import Weight
from mimo.families.lora import adapter_names, adapter_shapes, is_adapter, merged_weight
from mimo.runtime.progress import progress_of


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
        found = checkpoint_tensors.read(self.checkpoint, dict(sources.values()))
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
    described = checkpoint_tensors.describe(checkpoint)
    weights = _trained_weights(checkpoint, described, recipe, architecture)
    averages = checkpoint_tensors.averages(described) if average else {}
    return TrainedModel(checkpoint, recipe, architecture, weights, averages)


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
