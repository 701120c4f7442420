"""The tensors of a checkpoint: one safetensors file per rank, and an index of all pieces.

Every rank writes the rectangles of tensors (`Piece`) that it owns, straight from their memory. The
index, `tensors.json`, says where each piece is. A reader takes the rectangles that it wants from
the pieces that overlap them, so any layout reads what another wrote. Nothing is pickled.

Letters: R rows, C columns of a whole tensor as a matrix.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimo.checkpoint.manifest import (
    Listed,
    Sum,
    Summing,
    listed_files,
    naming,
    parsing,
    read_document,
    write_synced,
)
from mimo.engines.contract import EMA, Piece, key_of
from mimo.errors import InputError

_INDEX = "tensors.json"
_FORMAT = "mimo tensors 1"
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_CHUNK_BYTES = 1 << 22  # copied between a tensor and a file at a time


@dataclass(frozen=True)
class Stored:
    """A rectangle of a tensor in a file: its rows one after the other, from byte ``begin`` on."""

    file: Listed
    begin: int
    row: int
    column: int
    rows: int
    columns: int


@dataclass
class StoredTensor:
    """A whole tensor and where its pieces are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Stored] = field(default_factory=list)

    @property
    def matrix(self) -> tuple[int, int]:
        """R and C."""
        return self.shape[0], math.prod(self.shape[1:])


# ------------------------------------------------------------------------------- writing


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"tensors_{rank}.safetensors"


def write_pieces(
    folder: Path,
    rank: int,
    pieces: Sequence[Piece],
    values_of: Callable[[Piece], Tensor] = lambda piece: piece.values,
) -> Sum:
    """Write this rank's pieces, if any, into its file; it is on disk on return.

    values_of: called for a piece's values when it is written; before, only shape and dtype are
    used. Needs `_CHUNK_BYTES` of memory beside the tensors. Raises OSError, which names the file.
    """
    entries: dict[str, Any] = {}
    position = 0
    for piece in pieces:
        name = f"{piece.key}[{piece.row},{piece.column}]"
        assert name not in entries, f"{name} is written twice by one rank"
        end = position + piece.values.numel() * piece.values.element_size()
        entries[name] = {
            "dtype": _NAMES[piece.values.dtype],
            "shape": list(piece.values.shape),
            "data_offsets": [position, end],
        }
        position = end
    shapes = {piece.key: json.dumps(piece.shape) for piece in pieces}
    header = json.dumps({"__metadata__": shapes, **entries}).encode()
    header += b" " * (-len(header) % 8)
    path, flushed, summing = folder / file_of(rank), 0, Summing()
    with naming(path), path.open("wb") as file:
        bodies = (chunk for piece in pieces for chunk in _chunks(values_of(piece)))
        for chunk in itertools.chain([len(header).to_bytes(8, "little") + header], bodies):
            file.write(chunk)
            summing.add(chunk)
            if (pending := summing.num_bytes - flushed) >= _CHUNK_BYTES:
                file.flush()
                # Lets the disk begin with these bytes while others are copied and summed.
                os.posix_fadvise(file.fileno(), flushed, pending, os.POSIX_FADV_DONTNEED)
                flushed += pending
        file.flush()
        os.fsync(file.fileno())
    return summing.sum(hashlib.sha256(header).hexdigest())


def _chunks(values: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order, in place if it is on the CPU."""
    flat = values.detach().reshape(-1)
    for part in flat.split(_CHUNK_BYTES // flat.element_size()):
        yield memoryview(part.cpu().view(torch.uint8).numpy())


def write_index(folder: Path, num_ranks: int, text: str | None = None) -> str:
    """Write and return the index, on one rank. text: the index, if no file's header has changed."""
    text = text or _index_of(folder, num_ranks)
    write_synced(folder / _INDEX, text)
    return text


def _index_of(folder: Path, num_ranks: int) -> str:
    """Return the index, a function of the files' headers; assert that pieces cover all tensors."""
    tensors: dict[str, StoredTensor] = {}
    # Opened by name: a listing of a shared file system may lack files of other machines.
    for file_name in map(file_of, range(num_ranks)):
        with (folder / file_name).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        shapes = header.pop("__metadata__")
        for name, entry in header.items():
            key, _, place = name.rpartition("[")
            row, column = map(int, place.removesuffix("]").split(","))
            shape, dtype = tuple(json.loads(shapes[key])), TORCH_DTYPES[entry["dtype"]]
            tensor = tensors.setdefault(key, StoredTensor(shape, dtype))
            assert (tensor.shape, tensor.dtype) == (shape, dtype), f"{key} differs between ranks"
            position = (8 + length + entry["data_offsets"][0], row, column, *entry["shape"])
            tensor.pieces.append(Stored(Listed(file_name, 0, 0), *position))
    for key, tensor in tensors.items():
        gap = _gap(tensor)
        assert gap is None, f"{key}: {gap}"
    entries = {
        key: {
            "shape": tensor.shape,
            "dtype": _NAMES[tensor.dtype],
            "pieces": [[p.file.name, *list(vars(p).values())[1:]] for p in tensor.pieces],
        }
        for key, tensor in sorted(tensors.items())
    }
    return json.dumps({"format": _FORMAT, "tensors": entries})


def _gap(tensor: StoredTensor) -> str | None:
    """Return where the pieces leave a gap or overlap; None if they are the whole tensor."""
    rows, columns = tensor.matrix
    ends = {p.row for p in tensor.pieces} | {p.row + p.rows for p in tensor.pieces} | {0, rows}
    pending = sorted(tensor.pieces, key=lambda piece: piece.row, reverse=True)
    open_pieces: list[Stored] = []
    # Between two of these rows the same pieces lie side by side.
    for top, bottom in itertools.pairwise(sorted(ends)):
        open_pieces = [piece for piece in open_pieces if piece.row + piece.rows > top]
        while pending and pending[-1].row <= top:
            open_pieces.append(pending.pop())
        beside = sorted(open_pieces, key=lambda piece: piece.column)
        ends_of_columns = itertools.accumulate((piece.columns for piece in beside), initial=0)
        if bottom > rows or list(ends_of_columns) != [*(piece.column for piece in beside), columns]:
            return f"rows {top}..{bottom} are not covered exactly once"
    return None


# ------------------------------------------------------------------------------- reading


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors by key. Raises InputError for a missing or damaged index."""
    files = {file.name: file for file in listed_files(folder)}
    with parsing(folder / _INDEX):
        document = read_document(folder / _INDEX, files[_INDEX].crc32)
        if (version := document["format"]) != _FORMAT:
            raise ValueError(f"its format is {version!r}, this version reads {_FORMAT!r}")
        return {
            key: StoredTensor(
                shape=tuple(entry["shape"]),
                dtype=TORCH_DTYPES[entry["dtype"]],
                pieces=[Stored(files[name], *place) for name, *place in entry["pieces"]],
            )
            for key, entry in document["tensors"].items()
        }


def averages(stored: Collection[str]) -> dict[str, str]:
    """Return the keys of moving averages by the weight's key. Raises InputError without any."""
    prefix = key_of(EMA, "")
    keys = {key.removeprefix(prefix): key for key in stored if key.startswith(prefix)}
    if not keys:
        raise InputError(
            "--ema: the checkpoint has no moving average of the weights; train with "
            "train.ema_decay, or leave --ema out"
        )
    return keys


def write(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensor_of: Callable[[str], Tensor],
) -> dict[str, Sum]:
    """Write whole tensors as the only file; return its sum by name. tensor_of: called in order."""
    pieces = [
        whole_piece(key, torch.empty(shape, dtype=dtype, device="meta"))
        for key, shape in shapes.items()
    ]
    sums = {file_of(0): write_pieces(folder, 0, pieces, lambda piece: tensor_of(piece.key))}
    write_index(folder, 1)
    return sums


def whole_piece(key: str, tensor: Tensor) -> Piece:
    """Return a piece that covers a whole tensor."""
    return Piece(key, tuple(tensor.shape), 0, 0, tensor.view(len(tensor), -1))
