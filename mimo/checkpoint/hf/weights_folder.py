"""The tensors of a folder in Hugging Face format."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimo.checkpoint.tensors import TORCH_DTYPES
from mimo.errors import InputError, RecipeError, StartError, file_system_failed
from mimo.families.hf_config import read_json

STEM = "model"
"""Beginning of the names of the files of a model of transformers."""
# Includes dtypes that cannot be trained; an export carries such tensors.
_DTYPES = TORCH_DTYPES | {
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{"U8": torch.uint8, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


class WeightsFolder:
    """The tensors of a folder of safetensors; one file is open at a time. shapes, dtypes: by key.

    stem: beginning of the files' names. bytes_read: of tensors, so far. Building it reads headers
    only. Raises InputError or StartError.
    """

    def __init__(self, path: Path, stem: str = STEM) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.bytes_read = 0
        self._file_of: dict[str, Path] = {}
        self._open_path: Path | None = None
        self._open: Any = None
        weight_map = _weight_map(path / index_name(stem))
        problems: list[str] = []
        for file in _files(path, stem, weight_map):
            problems += self._read_header(file)
        for key, name in weight_map.items():
            if key not in self._file_of or self._file_of[key].name != name:
                problems.append(f"{path / index_name(stem)}: {key} is not in {name}")
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

    def file_of(self, key: str) -> str:
        return self._file_of[key].name

    def read(self, key: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """Return these rows, of a matrix these columns of them, as stored; nothing else is read."""
        reader = self._reader(self._file_of[key])
        if not self.shapes[key]:
            return reader.get_tensor(key)  # no slice of a scalar can be read
        view = reader.get_slice(key)
        part = view[rows] if columns is None else view[rows, columns]
        self.bytes_read += math.prod(part.shape) * part.element_size()
        return part

    def _reader(self, file: Path) -> Any:
        if self._open_path != file:
            self._open_path, self._open = None, None  # closes the other one first
            self._open, self._open_path = safe_open(file, framework="pt"), file
        return self._open


def index_name(stem: str = STEM) -> str:
    """Return the name of the file that lists the tensors of all files."""
    return f"{stem}.safetensors.index.json"


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor by the index; empty if there is none."""
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


def _files(path: Path, stem: str, weight_map: Mapping[str, str]) -> list[Path]:
    index, single = index_name(stem), f"{stem}.safetensors"
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; give one in Hugging Face format")
    if weight_map:
        files = [path / name for name in sorted(set(weight_map.values()))]
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise RecipeError(*(f"{file}: is listed in {index} but missing" for file in missing))
        return files
    if (path / single).is_file():
        return [path / single]
    pickled = sorted(path.glob("*.bin"))
    hint = f"; {pickled[0].name} is a pickle, save it as safetensors first" if pickled else ""
    raise InputError(f"{path}: holds neither {single} nor {index}{hint}")
