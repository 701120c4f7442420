"""A checkpoint of ours whose model has a form in Hugging Face format."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mimo.checkpoint.assets import ASSETS
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf import pipelines
from mimo.checkpoint.hf.architectures import Architecture
from mimo.checkpoint.hf.recipes import architecture_of_folder, load_recipe
from mimo.checkpoint.reading import read
from mimo.checkpoint.resume import open_checkpoint
from mimo.checkpoint.tensors import StoredTensor, averages
from mimo.config.modules import LoRA
from mimo.config.schema import LANGUAGE, Recipe
from mimo.errors import InputError
from mimo.families.keymap import Weight, adapter_names, is_adapter, merged_weight
from mimo.families.registry import generator_family, generator_settings, query_weights


@dataclass(frozen=True)
class TrainedWeight:
    """A parameter of ours.

    stored: the padded tensor and those of its adapters, by key. lora: of its module.
    """

    key: str
    weight: Weight
    stored: Mapping[str, StoredTensor]
    lora: LoRA | None

    @property
    def tensor(self) -> StoredTensor:
        return self.stored[self.key]

    @property
    def num_bytes(self) -> int:
        """Bytes after export: without padding, with its adapter merged."""
        return self.weight.num_rows * self.tensor.matrix[1] * self.tensor.dtype.itemsize

    def merged(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the parameter with its adapter, (R, ...); removes both from ``tensors``."""
        weight, *adapter = [tensors.pop(key) for key in self.stored]
        if self.lora is None:
            return weight
        lora_a, lora_b = adapter
        return merged_weight(weight, lora_a, lora_b, self.lora.scale)


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint of ours whose model has a form in Hugging Face format.

    weights: those that can be exported. averages: keys to read in place of the parameters' keys.
    generator: the one in the folder of diffusers. queries: of all generators.
    """

    checkpoint: Path
    recipe: Recipe
    architecture: Architecture
    weights: list[TrainedWeight]
    averages: Mapping[str, str]
    generator: str | None = None
    generator_weights: list[TrainedWeight] = field(default_factory=list)
    queries: list[TrainedWeight] = field(default_factory=list)

    def print_left_out(self) -> None:
        for name in self.recipe.generators:
            if name != self.generator:
                print(f"generators.{name}: a folder of diffusers has one generator, so not written")
        tower, kind = self.architecture.tower_of(self.recipe), self.architecture.model_type
        for name in self.recipe.encoders:
            if name != tower:
                print(f"encoders.{name}: no part of {kind} in Hugging Face format, so not written")

    def read(
        self, weights: Iterable[TrainedWeight], only_adapters: bool = False
    ) -> dict[str, Tensor]:
        """Return parameters and their adapters, or only the adapters, by key."""
        stored = {key: tensor for weight in weights for key, tensor in weight.stored.items()}
        sources = {k: self.averages.get(k, k) for k in stored if is_adapter(k) or not only_adapters}
        tensors = read(self.checkpoint, sources.values())
        # Averages are kept in fp32.
        return {key: tensors[source].to(stored[key].dtype) for key, source in sources.items()}


def open_trained(run: Path, average: bool = False) -> TrainedModel:
    """Open the model of a run or checkpoint, or its moving average. Raises InputError."""
    checkpoint = find_checkpoint(run)
    index = open_checkpoint(checkpoint)
    recipe = load_recipe(checkpoint / "recipe.yaml")
    assets = checkpoint / ASSETS
    if recipe.init_from is None or not (assets / "config.json").is_file():
        raise InputError(
            f"{checkpoint}: its model did not start from a checkpoint in Hugging Face format, so "
            f"there is no configuration that describes it (train with init_from)"
        )
    architecture = architecture_of_folder(assets, recipe.language.family)
    missing: list[str] = []

    def trained(module: str, weights: Iterable[Weight]) -> Iterator[TrainedWeight]:
        lora = recipe.module(module).lora
        for weight in weights:
            key = f"{module}.{weight.name}"
            if key not in index:
                missing.append(key)
                continue
            keys = [key, *(name for name in adapter_names(key) if name in index)]
            stored = {name: index[name] for name in keys}
            yield TrainedWeight(key, weight, stored, lora if len(keys) > 1 else None)

    modules = architecture.weights_of(recipe).items()
    weights = [w for module, of_module in modules for w in trained(module, of_module)]
    generator = pipelines.folders_generator(recipe) or next(iter(recipe.generators), None)
    of_generator: list[TrainedWeight] = []
    if generator is not None:
        settings = generator_settings(recipe, generator)
        family = generator_family(recipe, generator)
        of_generator = [*trained(generator, family.weights(settings))]
    of_queries = [*trained(LANGUAGE, query_weights(recipe))]
    if missing:
        kind = architecture.model_type
        raise InputError(f"{checkpoint} is not a whole {kind}: it lacks {', '.join(missing)}")
    return TrainedModel(
        checkpoint=checkpoint,
        recipe=recipe,
        architecture=architecture,
        weights=weights,
        averages=averages(index) if average else {},
        generator=generator,
        generator_weights=of_generator,
        queries=of_queries,
    )
