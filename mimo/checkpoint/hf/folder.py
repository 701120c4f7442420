"""A checkpoint in Hugging Face format: any part of a tensor without reading the rest."""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimo.checkpoint.hf.architectures import Architecture, KeyLayout
from mimo.errors import InputError, RecipeError, StartError, file_system_failed
from mimo.families.hf_config import read_json
from mimo.families.keymap import Run, Source, Weight

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Buffers that older versions stored; they follow from the configuration.
_COMPUTED = ("rotary_emb.inv_freq", "embeddings.position_ids")
_COMPARED_ROWS = 1 << 14


@contextmanager
def new_folder(target: Path, marker: str = "", writer: str = "") -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``target`` at the end, or is removed on an error.

    marker: a file that marks a folder which may be replaced. writer: the command that wrote it.
    Raises InputError, before anything is written, if ``target`` holds something else already.
    """
    target = target.absolute()
    is_free = target.is_dir() and (
        not any(target.iterdir()) or (marker and (target / marker).is_file())
    )
    if not is_free and (target.exists() or target.is_symlink()):
        state = f"exists and was not written by `{writer}`" if writer else "exists already"
        raise InputError(f"{target} {state}; give an empty or a new folder")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if marker:
            shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class WeightsFolder:
    """The tensors of a folder of safetensors; one file is open at a time.

    shapes, dtypes: by key. bytes_read: of tensors, so far. Building it reads the headers only.
    Raises InputError for a folder without safetensors, an incomplete one, or a damaged file;
    StartError if its file system fails.
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
            dtype = _DTYPES.get(view.get_dtype())
            if dtype is None:
                kinds = ", ".join(_DTYPES)
                yield f"{file}: {key} is {view.get_dtype()}; only {kinds} can be read"
                continue
            if key in self._file_of:
                yield f"{file}: {key} is in {self._file_of[key].name} already"
            self.shapes[key] = tuple(view.get_shape())
            self.dtypes[key] = dtype
            self._file_of[key] = file

    def order(self, key: str) -> tuple[str, str]:
        """Return a sort key by which files are read one after the other."""
        return self._file_of[key].name, key

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
        return self.folder.order(self._disk[weight.sources[0].key])

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
