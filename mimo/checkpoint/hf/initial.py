"""The weights of a Hugging Face folder that a recipe starts from; `mimo convert from-hf`."""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimo.checkpoint.assets import ASSETS, collect_assets
from mimo.checkpoint.folder import Progress, complete
from mimo.checkpoint.hf import pipelines
from mimo.checkpoint.hf.architectures import Architecture
from mimo.checkpoint.hf.conversion import Conversion, SameNames
from mimo.checkpoint.hf.recipes import architecture_of_folder, fill_recipe
from mimo.checkpoint.hf.weights_folder import WeightsFolder
from mimo.checkpoint.tensors import TORCH_DTYPES, write
from mimo.config.schema import LANGUAGE, Recipe
from mimo.errors import InputError, RecipeError, kind_of
from mimo.families.hf_config import new_folder
from mimo.families.keymap import Run, Source, Weight
from mimo.families.registry import generator_family, generator_settings, language_settings
from mimo.families.wire import DTYPES, precision_of
from mimo.runtime.progress import counter_of

# Buffers that older versions stored; they follow from the configuration.
COMPUTED = ("rotary_emb.inv_freq", "embeddings.position_ids")
# Tensors that transformers does not load, but other programs may: heads that predict more tokens.
CARRIED = ("mtp.",)
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class HFCheckpoint:
    """Tensors of a folder under the names of the key map, whatever they are called on disk.

    architecture: None for the transformer of a folder of diffusers. weights: what is to be read, by
    module. Building it reads headers, and tied tensors that are stored twice. Raises RecipeError
    with every tensor that is missing, unknown or does not fit.
    """

    def __init__(
        self, path: Path, architecture: Architecture | None, weights: Mapping[str, Iterable[Weight]]
    ) -> None:
        sources = {s.key: s for module in weights.values() for w in module for s in w.sources}
        if architecture is None:
            self.folder = WeightsFolder(path, pipelines.WEIGHTS)
            self.conversion: Conversion = SameNames(self.folder.shapes)
        else:
            self.folder = WeightsFolder(path)
            self.conversion = Conversion.of_folder(path, self.folder.shapes)
        self._used = {disk for key in sources for disk in self.conversion.sources(key)}
        problems = [*self._unfit(sources)]
        if architecture is None:
            problems += self._unknown(())
        elif not architecture.is_general:  # else transformers ignores it, and an export carries it
            untrained = architecture.tower_prefixes if set(weights) == {LANGUAGE} else ()
            problems += self._unknown(tuple(untrained))
        problems = problems or [*self._differing_copies(sources)]
        if problems:
            raise RecipeError(f"{path} does not fit the model:", *problems)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that holds every number of all tensors."""
        return functools.reduce(torch.promote_types, {self.folder.dtypes[k] for k in self._used})

    def matrix(self, run: Run, columns: slice | None = None) -> Tensor:
        """Return the rows of a run, (count, C) or (count,); of a matrix only these columns."""
        key, rows = run.source.key, slice(run.start, run.start + run.count)
        if run.source.transposed:
            return self._read(key, columns or slice(None), rows).T
        if run.source.stacked:
            each = run.source.rows_each
            first, last = run.start // each, -(-(run.start + run.count) // each)
            matrix = run.source.matrix(self._read(key, slice(first, last)))
            rows = slice(run.start - first * each, run.start - first * each + run.count)
            return matrix[rows, columns or slice(None)]
        if columns is not None and len(run.source.shape) > 2:
            return run.source.matrix(self._read(key, rows))[:, columns]
        return run.source.matrix(self._read(key, rows, columns))

    def _read(self, key: str, rows: slice, columns: slice | None = None) -> Tensor:
        return self.conversion.read(self.folder, key, rows, columns)

    def part(self, key: str, rows: slice, columns: slice) -> Tensor:
        """Return rows of the tensor with this name in memory, of a matrix only these columns."""
        shape = self.conversion.shape(key)
        assert shape is not None, f"{key} was compared"
        return self._read(key, rows, columns if len(shape) == 2 else None)

    def order(self, weight: Weight) -> tuple[str, str]:
        """Return a sort key of weights by which files are read one after the other."""
        disk = self.conversion.sources(weight.sources[0].key)[0]
        return self.folder.file_of(disk), disk

    def _unfit(self, sources: Mapping[str, Source]) -> Iterator[str]:
        for key, source in sources.items():
            shape, needed = self.conversion.shape(key), list(source.shape)
            dtypes = {self.folder.dtypes[disk] for disk in self.conversion.sources(key)}
            if (problem := self.conversion.problems.get(key)) is not None:
                yield f"  {key} {problem}"
            elif shape is None:
                yield f"  {key} is missing"
            elif odd := dtypes - {*TORCH_DTYPES.values()}:
                kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in odd)
                yield f"  {key} is {kinds}; only {', '.join(TORCH_DTYPES)} can be trained"
            elif list(shape) != needed:
                yield f"  {key} is {list(shape)}, the configuration asks for {needed}"

    def _differing_copies(self, sources: Iterable[str]) -> Iterator[str]:
        """Yield tensors that the model ties, but that are stored with other numbers."""
        for key in sources:
            first, *others = self.conversion.sources(key)
            for other in others if self.conversion.is_tied(key) else ():
                if not torch.equal(self.folder.read(other), self.folder.read(first)):
                    yield f"  {other} is tied to {first}, but holds other numbers"

    def _unknown(self, untrained: tuple[str, ...]) -> Iterator[str]:
        """Yield tensors that no weight is read from. untrained: beginnings of names in memory."""
        for disk in sorted(set(self.folder.shapes) - self._used):
            is_known = disk.endswith(COMPUTED) or disk.startswith(CARRIED)
            if not is_known and not self.conversion.in_memory(disk).startswith(untrained):
                yield f"  {disk} is unknown"


@dataclass(frozen=True)
class InitialWeights:
    """A checkpoint to start from, and its weights by module; others are drawn afresh.

    checkpoint: of the language model and its tower. generators: checkpoints of their own, by
    module.
    """

    checkpoint: HFCheckpoint
    weights: Mapping[str, Sequence[Weight]]
    generators: Mapping[str, HFCheckpoint] = field(default_factory=dict)

    def checkpoint_of(self, module: str) -> HFCheckpoint:
        """Return the checkpoint that has the module's weights."""
        return self.generators.get(module, self.checkpoint)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that holds every number of all tensors."""
        dtypes = [c.dtype for c in (self.checkpoint, *self.generators.values())]
        return functools.reduce(torch.promote_types, dtypes)


def initial_weights(recipe: Recipe) -> InitialWeights | None:
    """Return the weights that a recipe starts from. Raises RecipeError if they do not fit."""
    if recipe.init_from is None:
        return None
    folder = Path(recipe.init_from)
    try:
        architecture = architecture_of_folder(folder, recipe.language.family)
        weights = architecture.weights_of(recipe)
        checkpoint = HFCheckpoint(folder, architecture, weights)
        generators: dict[str, HFCheckpoint] = {}
        if (name := pipelines.folders_generator(recipe)) is not None:
            family = generator_family(recipe, name)
            weights[name] = family.weights(generator_settings(recipe, name))
            path = folder.parent / pipelines.TRANSFORMER
            generators[name] = HFCheckpoint(path, None, {name: weights[name]})
        return InitialWeights(checkpoint, weights, generators)
    except InputError as error:
        first, *others = error.args
        problem = recipe.problem(("init_from",), first)
        raise kind_of(error, RecipeError)(problem, *others) from error


def convert_from_hf(source: Path, target: Path) -> None:
    """Write the checkpoint ``target`` (weights, recipe and assets). Raises InputError."""
    recipe = minimal_recipe(source)
    initial = initial_weights(recipe)
    assert initial is not None, "the recipe starts from the folder"
    precision = precision_of(initial.dtype)
    train = recipe.train.model_copy(update={"precision": precision})
    recipe = recipe.model_copy(update={"train": train})
    settings = language_settings(recipe)
    tensors: dict[str, tuple[Weight, int, HFCheckpoint]] = {}
    for module, weights in initial.weights.items():
        for weight in weights:
            rows = weight.num_rows
            if module == LANGUAGE and weight.name in _VOCABULARY:
                rows = settings.padded_vocab_size(rows)
            tensors[f"{module}.{weight.name}"] = (weight, rows, initial.checkpoint_of(module))
    ordered = sorted(tensors, key=lambda key: tensors[key][2].order(tensors[key][0]))
    shapes = {key: _shape(*tensors[key][:2]) for key in ordered}

    def tensor_of(key: str) -> Tensor:
        advance()
        return whole_tensor(*tensors[key], DTYPES[precision])

    with new_folder(target) as folder, counter_of("tensors", len(tensors)) as advance:
        sums = write(folder, shapes, DTYPES[precision], tensor_of)
        collect_assets(recipe, folder / ASSETS)
        complete(folder, Progress(step=0, samples=0), recipe.to_yaml(), sums)


def minimal_recipe(source: Path) -> Recipe:
    """Return a recipe with a folder's families and sizes, and stand-ins for data and steps."""
    if not source.is_dir():
        raise InputError(f"{source}: no such folder; give a checkpoint in Hugging Face format")
    name = re.sub(r"[^A-Za-z0-9._-]", "_", source.resolve().name)
    data: dict[str, Any] = {
        "name": name.lstrip("._-") or "converted",
        "init_from": str(source),
        "data": {"sources": [{"path": "shards/*.tar"}], "sequence_length": 4096},
        "train": {"steps": 1, "global_batch_size": 1},
    }
    problems = [message for _, message in fill_recipe(data)]
    if problems:
        raise InputError("\n".join(problems))
    return Recipe.model_validate(data)


def whole_tensor(
    weight: Weight, num_rows: int, checkpoint: HFCheckpoint, dtype: torch.dtype
) -> Tensor:
    """Return our parameter (num_rows, ...), with zeros for padding rows."""
    tensor = torch.zeros(_shape(weight, num_rows), dtype=dtype)
    position = 0
    for run in weight.runs:
        tensor[position : position + run.count].copy_(checkpoint.matrix(run))
        position += run.count
    return tensor


def _shape(weight: Weight, num_rows: int) -> tuple[int, ...]:
    first = weight.sources[0]
    if len(first.shape) == 1:
        return (num_rows,)
    return (num_rows, torch.Size(first.shape).numel() // first.num_rows)
