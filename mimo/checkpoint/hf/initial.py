"""The weights of a Hugging Face folder that a recipe starts from; `mimo convert from-hf`."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimo.checkpoint.assets import ASSETS, collect_assets
from mimo.checkpoint.folder import Progress, complete
from mimo.checkpoint.hf.architectures import Architecture, KeyLayout
from mimo.checkpoint.hf.recipes import (
    DEFAULT_ENCODER,
    architecture_of_folder,
    fill_recipe,
    tower_settings,
)
from mimo.checkpoint.tensors import TORCH_DTYPES, write
from mimo.config.schema import LANGUAGE, Recipe
from mimo.errors import InputError, RecipeError, StartError, file_system_failed
from mimo.families.hf_config import new_folder, read_config, read_json
from mimo.families.keymap import Run, Source, Weight
from mimo.families.registry import language_settings
from mimo.families.wire import DTYPES, precision_of
from mimo.runtime.progress import counter_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Buffers that older versions stored; they follow from the configuration.
_COMPUTED = ("rotary_emb.inv_freq", "embeddings.position_ids")
_COMPARED_ROWS = 1 << 14
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class WeightsFolder:
    """The tensors of a folder of safetensors; one file is open at a time. shapes, dtypes: by key.

    bytes_read: of tensors, so far. Building it reads the headers only. Raises InputError for an
    incomplete or damaged folder; StartError if its file system fails.
    """

    def __init__(self, path: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.bytes_read = 0
        self._file_of: dict[str, Path] = {}
        self._open_path: Path | None = None
        self._open: Any = None
        weight_map = _weight_map(path)
        problems: list[str] = []
        for file in _files(path, weight_map):
            problems += self._read_header(file)
        for key, name in weight_map.items():
            if key not in self._file_of or self._file_of[key].name != name:
                problems.append(f"{path / INDEX}: {key} is not in {name}")
        if problems:
            raise RecipeError(*problems)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open file, so that rank 0 can send it to other ranks."""
        return vars(self) | {"_open_path": None, "_open": None}

    def _read_header(self, file: Path) -> Iterator[str]:
        """Add the tensors of a file; yield what is wrong with it."""
        try:
            with file.open("rb") as opened:
                opened.read(1)  # safetensors does not say which OSError it met
            reader = self._reader(file)
        except (OSError, SafetensorError) as error:
            if file_system_failed(error):
                raise StartError(f"{file}: cannot be read: {error}") from error
            yield f"{file}: cannot be read ({error}); copy the checkpoint again"
            return
        for key in reader.keys():  # noqa: SIM118 - not a mapping
            view = reader.get_slice(key)
            dtype = TORCH_DTYPES.get(view.get_dtype())
            if dtype is None:
                kinds = ", ".join(TORCH_DTYPES)
                yield f"{file}: {key} is {view.get_dtype()}; only {kinds} can be read"
                continue
            if key in self._file_of:
                yield f"{file}: {key} is in {self._file_of[key].name} already"
            self.shapes[key] = tuple(view.get_shape())
            self.dtypes[key] = dtype
            self._file_of[key] = file

    def file_of(self, key: str) -> str:
        """Return the name of the file with a tensor."""
        return self._file_of[key].name

    def read(self, key: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """Return these rows of a tensor, and of a matrix these columns of them, as stored.

        Nothing else is read from the file.
        """
        view = self._reader(self._file_of[key]).get_slice(key)
        part = view[rows] if columns is None else view[rows, columns]
        self.bytes_read += math.prod(part.shape) * part.element_size()
        return part

    def _reader(self, file: Path) -> Any:
        if self._open_path != file:
            self._open_path, self._open = None, None  # closes the other one first
            self._open, self._open_path = safe_open(file, framework="pt"), file
        return self._open


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file name of each tensor by the index; empty if there is none."""
    index = path / INDEX
    if not index.is_file():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: lists no tensors; copy the checkpoint again")
    for name in weight_map.values():
        is_name = isinstance(name, str) and name.isprintable() and name not in ("", "..")
        if not is_name or Path(name).name != name:
            raise InputError(
                f"{index}: names {str(name)[:80]!r}, which is no file of this folder; copy the "
                f"checkpoint again"
            )
    return weight_map


def _files(path: Path, weight_map: Mapping[str, str]) -> list[Path]:
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; give one in Hugging Face format")
    if weight_map:
        files = [path / name for name in sorted(set(weight_map.values()))]
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise RecipeError(*(f"{file}: is listed in {INDEX} but missing" for file in missing))
        return files
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    pickled = sorted(path.glob("*.bin"))
    hint = f"; {pickled[0].name} is a pickle, save it as safetensors first" if pickled else ""
    raise InputError(f"{path}: holds neither {SINGLE} nor {INDEX}{hint}")


class HFCheckpoint:
    """Tensors of a folder under the names of the key map, whatever they are called on disk.

    weights: what is to be read, by module. Building it reads headers only (and a head that is
    stored beside the embedding that it is tied to). Raises RecipeError with every tensor that is
    missing, unknown or has another shape.
    """

    def __init__(
        self, path: Path, architecture: Architecture, weights: Mapping[str, Iterable[Weight]]
    ) -> None:
        self.folder = WeightsFolder(path)
        sources = {s.key: s for module in weights.values() for w in module for s in w.sources}
        # Of the layouts, the one with most of the names on disk.
        self.layout: KeyLayout = max(
            architecture.layouts,
            key=lambda layout: sum(layout.on_disk(key) in self.folder.shapes for key in sources),
        )
        self._disk = {key: self.layout.on_disk(key) for key in sources}
        problems = [*self._unfit(sources), *self._unknown(architecture, set(weights))]
        if problems:
            raise RecipeError(f"{path} does not fit the model:", *problems)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that holds every number of all tensors."""
        used = {self.folder.dtypes[disk] for disk in self._disk.values()}
        return functools.reduce(torch.promote_types, used)

    def matrix(self, run: Run, columns: slice | None = None) -> Tensor:
        """Return the rows of a run, (count, C) or (count,); of a matrix only these columns."""
        key, rows = self._disk[run.source.key], slice(run.start, run.start + run.count)
        if run.source.transposed:
            return self.folder.read(key, columns or slice(None), rows).T
        if columns is not None and len(run.source.shape) > 2:
            return run.source.matrix(self.folder.read(key, rows))[:, columns]
        return run.source.matrix(self.folder.read(key, rows, columns))

    def part(self, key: str, rows: slice, columns: slice) -> Tensor:
        """Return rows of the tensor with this name in memory, of a matrix only these columns."""
        disk = self._disk[key]
        is_matrix = len(self.folder.shapes[disk]) == 2
        return self.folder.read(disk, rows, columns if is_matrix else None)

    def stored(self, sources: Iterable[Source]) -> dict[str, Tensor]:
        """Return whole tensors as they are stored, by name in memory."""
        return {source.key: self.folder.read(self._disk[source.key]) for source in sources}

    def num_bytes(self, source: Source) -> int:
        """Return the bytes of a whole tensor as it is stored."""
        return math.prod(source.shape) * self.folder.dtypes[self._disk[source.key]].itemsize

    def order(self, weight: Weight) -> tuple[str, str]:
        """Return a sort key of weights by which files are read one after the other."""
        disk = self._disk[weight.sources[0].key]
        return self.folder.file_of(disk), disk

    def _unfit(self, sources: Mapping[str, Source]) -> Iterator[str]:
        for key, source in sources.items():
            disk, needed = self._disk[key], list(source.shape)
            shape = self.folder.shapes.get(disk)
            if shape is None:
                yield f"  {disk} is missing"
            elif list(shape) != needed:
                yield f"  {disk} is {list(shape)}, the configuration asks for {needed}"

    def _unknown(self, architecture: Architecture, modules: set[str]) -> Iterator[str]:
        head = self.layout.on_disk("lm_head.weight")
        towers = tuple(self.layout.on_disk(prefix) for prefix in architecture.tower_prefixes)
        unused = towers if modules == {"language"} else ()  # the recipe has no encoders
        for disk in sorted(set(self.folder.shapes) - set(self._disk.values())):
            if disk.endswith(_COMPUTED) or disk.startswith(unused):
                continue
            if disk != head or not self._is_copy_of_embedding(disk, architecture):
                yield f"  {disk} is unknown"

    def _is_copy_of_embedding(self, head: str, architecture: Architecture) -> bool:
        embedding = self.layout.on_disk(architecture.language_prefix + "embed_tokens.weight")
        shape = self.folder.shapes.get(embedding)
        if shape is None or shape != self.folder.shapes[head]:
            return False
        read = self.folder.read
        parts = (slice(n, n + _COMPARED_ROWS) for n in range(0, shape[0], _COMPARED_ROWS))
        return all(torch.equal(read(head, rows), read(embedding, rows)) for rows in parts)


# ------------------------------------------------------------------------ start of a recipe


@dataclass(frozen=True)
class InitialWeights:
    """A checkpoint to start from, and its weights by module; other encoders are drawn afresh."""

    checkpoint: HFCheckpoint
    weights: Mapping[str, Sequence[Weight]]


def initial_weights(recipe: Recipe) -> InitialWeights | None:
    """Return the weights that a recipe starts from. Raises RecipeError if they do not fit."""
    if recipe.init_from is None:
        return None
    folder = Path(recipe.init_from)
    try:
        architecture = architecture_of_folder(folder)
        weights = architecture.weights_of(recipe)
        return InitialWeights(HFCheckpoint(folder, architecture, weights), weights)
    except StartError as error:
        raise StartError(recipe.problem(("init_from",), str(error))) from error
    except InputError as error:
        first, *others = error.args
        raise RecipeError(recipe.problem(("init_from",), first), *others) from error


def original_tower(recipe: Recipe) -> InitialWeights | None:
    """Return the tower of a checkpoint whose language model was trained alone; None without one.

    Raises InputError if the folder is gone, and RecipeError if it does not fit.
    """
    if recipe.encoders or recipe.init_from is None:
        return None
    folder = Path(recipe.init_from)
    if not folder.is_dir():
        raise InputError(
            f"init_from is {folder}, and no folder is there; the recipe has no encoders, so the "
            f"weights of the tower are still to be read from it: put it back"
        )
    architecture, config = architecture_of_folder(folder), read_config(folder)
    settings = tower_settings(architecture, config, folder)
    if settings is None:
        return None
    tower = architecture.encoder_family().Settings(**settings)
    weights = architecture.weights(language_settings(recipe), {DEFAULT_ENCODER: tower})
    checkpoint = HFCheckpoint(folder, architecture, weights)
    return InitialWeights(checkpoint, {DEFAULT_ENCODER: weights[DEFAULT_ENCODER]})


def convert_from_hf(source: Path, target: Path) -> None:
    """Write the checkpoint folder ``target``: weights, ``recipe.yaml`` and assets, no optimizer.

    Raises InputError for a source that does not fit.
    """
    recipe = minimal_recipe(source)
    initial = initial_weights(recipe)
    assert initial is not None, "the recipe starts from the folder"
    checkpoint = initial.checkpoint
    precision = precision_of(checkpoint.dtype)
    train = recipe.train.model_copy(update={"precision": precision})
    recipe = recipe.model_copy(update={"train": train})
    settings = language_settings(recipe)
    tensors: dict[str, tuple[Weight, int]] = {}
    for module, weights in initial.weights.items():
        for weight in weights:
            rows = weight.num_rows
            if module == LANGUAGE and weight.name in _VOCABULARY:
                rows = settings.padded_vocab_size(rows)
            tensors[f"{module}.{weight.name}"] = (weight, rows)
    ordered = sorted(tensors, key=lambda key: checkpoint.order(tensors[key][0]))
    shapes = {key: _shape(*tensors[key]) for key in ordered}

    def tensor_of(key: str) -> Tensor:
        advance()
        return whole_tensor(*tensors[key], checkpoint, DTYPES[precision])

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
    elements = torch.Size(first.shape).numel()
    return (num_rows, elements // first.num_rows)
