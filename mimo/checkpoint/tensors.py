"""The tensors of a checkpoint: one safetensors file per rank, and an index of all pieces.

Every rank writes rectangles of tensors (`Piece`), those that it owns, straight from the memory
where they are; nothing is gathered. The index, `tensors.json`, says where each piece is. A reader
takes the rectangles that it wants from the pieces that overlap them, and reads nothing else. So any
layout reads what another wrote.

Nothing is pickled: a file is a header in JSON and plain numbers, as safetensors defines it.

Letters: R rows, C columns of a whole tensor as a matrix.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import stat
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
    read_document,
    reading,
    write_synced,
)
from mimo.engines.piece import EMA, Piece, key_of
from mimo.errors import InputError

_INDEX = "tensors.json"
_FORMAT = "mimo tensors 1"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FILE = re.compile(r"tensors_[0-9]+\.safetensors")
_CHUNK_BYTES = 1 << 22
"""Bytes that are copied between a tensor and a file at a time."""


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
        return _matrix(self.shape)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


# ------------------------------------------------------------------------------- writing


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"tensors_{rank}.safetensors"


@dataclass(frozen=True)
class Written:
    """A rank's file that is on disk. header: a digest of what it says of the pieces in it."""

    sum: Sum
    header: str


def write_pieces(
    folder: Path,
    rank: int,
    pieces: Sequence[Piece],
    values_of: Callable[[Piece], Tensor] = lambda piece: piece.values,
) -> Written:
    """Write this rank's pieces into its file; without any, an empty one. It is on disk on return.

    values_of: asked for a piece's values when its turn comes; of ``piece.values`` only shape and
    dtype are needed before. Beside the tensors, `_CHUNK_BYTES` of memory are used.
    Raises OSError, which names the file.
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
    path, begun, summing = folder / file_of(rank), 0, Summing()
    with naming(path), path.open("wb") as file:
        bodies = (chunk for piece in pieces for chunk in _chunks(values_of(piece)))
        for chunk in itertools.chain([len(header).to_bytes(8, "little") + header], bodies):
            file.write(chunk)
            summing.add(chunk)
            if (grown := summing.num_bytes - begun) >= _CHUNK_BYTES:
                file.flush()
                # Lets the disk begin with these bytes while others are copied and summed.
                os.posix_fadvise(file.fileno(), begun, grown, os.POSIX_FADV_DONTNEED)
                begun += grown
        file.flush()
        os.fsync(file.fileno())
    return Written(summing.sum(), hashlib.sha256(header).hexdigest())


def _chunks(values: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in order, in place if it is on the CPU."""
    flat = values.detach().reshape(-1)
    for part in flat.split(_CHUNK_BYTES // flat.element_size()):
        yield memoryview(part.cpu().view(torch.uint8).numpy())


def write_index(folder: Path, num_ranks: int, text: str | None = None) -> str:
    """Write the index of the ranks' files, once they are complete; one rank calls it.

    text: what this returned for files with the same headers, which are not looked at again.
    """
    text = text or _index_of(folder, num_ranks)
    write_synced(folder / _INDEX, text)
    return text


def _index_of(folder: Path, num_ranks: int) -> str:
    """The index of the ranks' files, which is a function of their headers alone.

    It asserts that the pieces cover every tensor, each element once. Files are opened by name, as
    a listing of a folder on a shared file system may lack those of other machines.
    Raises FileNotFoundError if the file of a rank is missing.
    """
    tensors: dict[str, StoredTensor] = {}
    for name_of_file in map(file_of, range(num_ranks)):
        with (folder / name_of_file).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        shapes = header.pop("__metadata__")
        for name, entry in header.items():
            key, _, place = name.rpartition("[")
            row, column = map(int, place.removesuffix("]").split(","))
            whole = StoredTensor(tuple(json.loads(shapes[key])), _DTYPES[entry["dtype"]])
            known = tensors.setdefault(key, whole)
            assert (known.shape, known.dtype) == (whole.shape, whole.dtype), f"{key} differs"
            begin = 8 + length + entry["data_offsets"][0]
            file_known = Listed(name_of_file, 0, None)
            known.pieces.append(Stored(file_known, begin, row, column, *entry["shape"]))
    for key, tensor in tensors.items():
        gap = _gap(tensor)
        assert gap is None, f"{key}: {gap}"
    document = {
        "format": _FORMAT,
        "tensors": {
            key: {
                "shape": tensor.shape,
                "dtype": _NAMES[tensor.dtype],
                "pieces": [
                    [piece.file.name, *list(vars(piece).values())[1:]] for piece in tensor.pieces
                ],
            }
            for key, tensor in sorted(tensors.items())
        },
    }
    return json.dumps(document)


def _gap(tensor: StoredTensor) -> str | None:
    """Where the pieces have a gap or an overlap; None if they are the whole tensor."""
    rows, columns = tensor.matrix
    ends = {p.row for p in tensor.pieces} | {p.row + p.rows for p in tensor.pieces} | {0, rows}
    waiting = sorted(tensor.pieces, key=lambda piece: piece.row, reverse=True)
    open_pieces: list[Stored] = []
    # Between two of these rows the same pieces lie side by side.
    for top, bottom in itertools.pairwise(sorted(ends)):
        open_pieces = [piece for piece in open_pieces if piece.row + piece.rows > top]
        while waiting and waiting[-1].row <= top:
            open_pieces.append(waiting.pop())
        beside = sorted(open_pieces, key=lambda piece: piece.column)
        ends_of_columns = itertools.accumulate((piece.columns for piece in beside), initial=0)
        if bottom > rows or list(ends_of_columns) != [*(piece.column for piece in beside), columns]:
            return f"rows {top}..{bottom} are not there exactly once"
    return None


# ------------------------------------------------------------------------------- reading


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by key.

    Raises InputError for one without an index, with an index of another version or with another
    checksum, or with one whose pieces are not whole tensors in files of this folder.
    """
    with reading(folder / _INDEX):
        is_there = (folder / _INDEX).exists()
    if not is_there:
        if (folder / ".metadata").exists():
            raise InputError(
                f"checkpoint {folder}: it was written by a former version, in Megatron's format, "
                f"which is not read any more; export it with `mimo convert to-hf` of the version "
                f"that wrote it and start from that folder (init_from)"
            )
        raise InputError(f"checkpoint {folder}: {_INDEX} is missing; copy it again")
    try:
        manifest = listed_files(folder)
        listed = {one.name: one for one in manifest or ()}
        own = listed.get(_INDEX)
        document = read_document(folder / _INDEX, own and own.crc32)
        if document.get("format") != _FORMAT:
            raise InputError(
                f"checkpoint {folder}: {_INDEX} has format {document.get('format')!r}, this "
                f"version reads {_FORMAT!r}; use the version that wrote it"
            )
        files = dict[str, Listed]()

        def file_named(name: str) -> Listed:
            if name not in files:
                size = _size_of(folder, name)
                files[name] = listed[name] if manifest is not None else Listed(name, size, None)
                if files[name].num_bytes != size:
                    raise ValueError(f"{name} has {size} bytes, not {files[name].num_bytes}")
            return files[name]

        index = {
            key: StoredTensor(
                tuple(entry["shape"]),
                _DTYPES[entry["dtype"]],
                [Stored(file_named(name), *place) for name, *place in entry["pieces"]],
            )
            for key, entry in document["tensors"].items()
        }
        _check(index)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"checkpoint {folder}: {_INDEX} or a file of it is damaged ({error}); copy it again"
        ) from error
    return index


def _size_of(folder: Path, name: str) -> int:
    """The bytes of a file of tensors. Raises ValueError, TypeError or OSError if it is none."""
    if not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is no file of tensors")
    with reading(folder / name):
        found = (folder / name).lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{name} is a link or not a regular file")
    return found.st_size


def _check(index: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError or TypeError if the index is not one of these files."""
    used: dict[str, list[tuple[int, int]]] = {}
    for key, tensor in index.items():
        if not tensor.shape or any(type(size) is not int or size < 1 for size in tensor.shape):
            raise ValueError(f"{key} has shape {tensor.shape}")
        for piece in tensor.pieces:
            file, *numbers = vars(piece).values()
            if any(type(n) is not int or n < 0 for n in numbers):
                raise ValueError(f"{key} has a piece {file.name!r}, {numbers}")
            end = piece.begin + piece.rows * piece.columns * tensor.dtype.itemsize
            if end > file.num_bytes:
                raise ValueError(f"{file.name} has {file.num_bytes} bytes, not {end}")
            if end > piece.begin:
                used.setdefault(file.name, []).append((piece.begin, end))
        if gap := _gap(tensor):
            raise ValueError(f"{key}: {gap}")
    for name, stretches in used.items():
        # Else a small file could claim to be tensors that fill any memory.
        if any(one[1] > other[0] for one, other in itertools.pairwise(sorted(stretches))):
            raise ValueError(f"{name} has bytes that belong to several tensors")


def averages(stored: Collection[str]) -> dict[str, str]:
    """By the key of each weight that has one, the key of its moving average.

    Raises InputError if there is none.
    """
    beginning = key_of(EMA, "")
    found = {key.removeprefix(beginning): key for key in stored if key.startswith(beginning)}
    if not found:
        raise InputError(
            "--ema: the checkpoint has no moving average of the weights; train with "
            "train.ema_decay, or leave --ema out"
        )
    return found


# --------------------------------------------------------------------------- whole tensors


def write(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensor_of: Callable[[str], Tensor],
) -> dict[str, Sum]:
    """Write a checkpoint's tensors; each is asked for when its turn comes, in order.

    Returns the sums of the files with tensors, by name.
    """
    described = {k: torch.empty(shape, dtype=dtype, device="meta") for k, shape in shapes.items()}
    pieces = [whole_piece(*one) for one in described.items()]
    written = write_pieces(folder, 0, pieces, lambda piece: tensor_of(piece.key))
    write_index(folder, 1)
    return {file_of(0): written.sum}


def whole_piece(key: str, tensor: Tensor) -> Piece:
    """Return a piece that covers a whole tensor."""
    shape = tuple(tensor.shape)
    return Piece(key, shape, 0, 0, tensor.view(_matrix(shape)))
