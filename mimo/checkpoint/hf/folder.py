"""A folder of safetensors: which tensors it holds, and any part of one without reading the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimo.errors import InputError, RecipeError, StartError, file_system_failed
from mimo.families.hf_config import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class WeightsFolder:
    """The tensors of a checkpoint in Hugging Face format; one file is open at a time.

    shapes, dtypes: by key. bytes_read: of tensors, so far. Building it reads the headers only.
    Raises InputError for a folder without safetensors, an incomplete one, or a damaged file;
    StartError where its file system fails.
    """

    def __init__(self, path: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.bytes_read = 0
        self._file_of: dict[str, Path] = {}
        self._open_path: Path | None = None
        self._open: Any = None
        problems: list[str] = []
        for file in _files(path):
            problems += self._read_header(file)
        if (path / INDEX).is_file():
            listed = read_json(path / INDEX).get("weight_map", {})
            found = {key: file.name for key, file in self._file_of.items()}
            wrong = [key for key, file in listed.items() if found.get(key) != file]
            problems += [f"{path / INDEX}: {key} is not in {listed[key]}" for key in wrong]
        if problems:
            raise RecipeError(*problems)

    def __getstate__(self) -> dict[str, Any]:
        """Without the open file, so that rank 0 can send what it has found to other ranks."""
        return vars(self) | {"_open_path": None, "_open": None}

    def _read_header(self, file: Path) -> list[str]:
        try:
            with file.open("rb") as opened:
                opened.read(1)  # safetensors does not say which OSError it met
            reader = self._reader(file)
        except (OSError, SafetensorError) as error:
            if file_system_failed(error):
                raise StartError(f"{file}: cannot be read: {error}") from error
            return [f"{file}: cannot be read ({error}); copy the checkpoint again"]
        problems = []
        for key in reader.keys():  # noqa: SIM118 - not a mapping
            view = reader.get_slice(key)
            dtype = _DTYPES.get(view.get_dtype())
            if dtype is None:
                kinds = ", ".join(_DTYPES)
                problems.append(f"{file}: {key} is {view.get_dtype()}; only {kinds} can be read")
                continue
            if key in self._file_of:
                problems.append(f"{file}: {key} is in {self._file_of[key].name} already")
            self.shapes[key] = tuple(view.get_shape())
            self.dtypes[key] = dtype
            self._file_of[key] = file
        return problems

    def order(self, key: str) -> tuple[str, str]:
        """A sort key of keys by which files are read one after the other."""
        return self._file_of[key].name, key

    def read(self, key: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """Part of a tensor in its stored dtype: rows of its first dimension, and of those columns.

        columns: of a matrix only. Nothing else is read from the file.
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


def shards_of[T](items: Iterable[tuple[T, int]], num_bytes: int) -> Iterator[list[T]]:
    """Consecutive items, each with its size, of so many bytes at most, or a larger one alone."""
    shard: list[T] = []
    size = 0
    for item, own in items:
        if shard and size + own > num_bytes:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += own
    yield shard


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; give one in Hugging Face format")
    index = path / INDEX
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise InputError(f"{index}: lists no tensors; copy the checkpoint again")
        outside = [
            name
            for name in listed.values()
            if not isinstance(name, str)
            or not name.isprintable()
            or name in ("", ".", "..")
            or Path(name).name != name
        ]
        if outside:
            raise InputError(
                f"{index}: names {str(outside[0])[:80]!r}, which is no file of this folder; copy "
                f"the checkpoint again"
            )
        files = [path / name for name in sorted(set(listed.values()))]
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise RecipeError(*(f"{file}: is listed in {INDEX} but missing" for file in missing))
        return files
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    pickled = sorted(path.glob("*.bin"))
    hint = f"; {pickled[0].name} is a pickle, save it as safetensors first" if pickled else ""
    raise InputError(f"{path}: holds neither {SINGLE} nor {INDEX}{hint}")
