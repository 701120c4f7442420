"""The tensors of a checkpoint: one safetensors file per rank, and an index of all pieces.

Every rank writes rectangles of tensors (`Piece`), those that it owns, straight from the memory
where they are; nothing is gathered. The index, `tensors.json`, says where each piece is. A reader
takes the rectangles that it wants from the pieces that overlap them, and reads nothing else. So any
layout reads what another wrote.

Nothing is pickled: a file is a header in JSON and plain numbers, as safetensors defines it.

Letters: R rows, C columns of a whole tensor as a matrix.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimo.checkpoint.folder import read_document, write_synced
from mimo.engines.piece import Piece
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

    file: str
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


def _file_of(rank: int) -> str:
    return f"tensors_{rank}.safetensors"


def write_pieces(
    folder: Path,
    rank: int,
    pieces: Sequence[Piece],
    values_of: Callable[[Piece], Tensor] = lambda piece: piece.values,
) -> None:
    """Write this rank's pieces into its file; without any, an empty one.

    values_of: asked for a piece's values when its turn comes; of ``piece.values`` only shape and
    dtype are needed before. Beside the tensors, `_CHUNK_BYTES` of memory are used.
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
    with (folder / _file_of(rank)).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for piece in pieces:
            for chunk in _chunks(values_of(piece)):
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _chunks(values: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in order, in place if it is on the CPU."""
    flat = values.detach().reshape(-1)
    for part in flat.split(_CHUNK_BYTES // flat.element_size()):
        yield memoryview(part.cpu().view(torch.uint8).numpy())


def write_index(folder: Path, num_ranks: int) -> None:
    """Write the index of the ranks' files, once they are complete; one rank calls it.

    It asserts that the pieces cover every tensor, each element once. Files are opened by name, as
    a listing of a folder on a shared file system may lack those of other machines.
    Raises FileNotFoundError if the file of a rank is missing.
    """
    tensors: dict[str, StoredTensor] = {}
    for name_of_file in map(_file_of, range(num_ranks)):
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
            known.pieces.append(Stored(name_of_file, begin, row, column, *entry["shape"]))
    for key, tensor in tensors.items():
        gap = _gap(tensor)
        assert gap is None, f"{key}: {gap}"
    document = {
        "format": _FORMAT,
        "tensors": {
            key: {
                "shape": tensor.shape,
                "dtype": _NAMES[tensor.dtype],
                "pieces": [list(vars(piece).values()) for piece in tensor.pieces],
            }
            for key, tensor in sorted(tensors.items())
        },
    }
    write_synced(folder / _INDEX, json.dumps(document))


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

    Raises InputError for one without an index, with an index of another version, or with one whose
    pieces are not whole tensors in files of this folder.
    """
    if not (folder / _INDEX).exists():
        if (folder / ".metadata").exists():
            raise InputError(
                f"checkpoint {folder}: it was written by a former version, in Megatron's format, "
                f"which is not read any more; export it with `mimo convert to-hf` of the version "
                f"that wrote it and start from that folder (init_from)"
            )
        raise InputError(f"checkpoint {folder}: {_INDEX} is missing; copy it again")
    try:
        document = read_document(folder / _INDEX)
        if document.get("format") != _FORMAT:
            raise InputError(
                f"checkpoint {folder}: {_INDEX} has format {document.get('format')!r}, this "
                f"version reads {_FORMAT!r}; use the version that wrote it"
            )
        index = {
            key: StoredTensor(
                tuple(entry["shape"]),
                _DTYPES[entry["dtype"]],
                [Stored(*piece) for piece in entry["pieces"]],
            )
            for key, entry in document["tensors"].items()
        }
        _check(folder, index)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"checkpoint {folder}: {_INDEX} or a file of it is damaged ({error}); copy it again"
        ) from error
    return index


def _check(folder: Path, index: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError, TypeError or OSError if the index is not one of files in this folder."""
    used: dict[str, list[tuple[int, int]]] = {}
    for key, tensor in index.items():
        if not tensor.shape or any(type(size) is not int or size < 1 for size in tensor.shape):
            raise ValueError(f"{key} has shape {tensor.shape}")
        for piece in tensor.pieces:
            name, *numbers = vars(piece).values()
            if not _FILE.fullmatch(name) or any(type(n) is not int or n < 0 for n in numbers):
                raise ValueError(f"{key} has a piece {name!r}, {numbers}")
            end = piece.begin + piece.rows * piece.columns * tensor.dtype.itemsize
            if end > piece.begin:
                used.setdefault(name, []).append((piece.begin, end))
        if gap := _gap(tensor):
            raise ValueError(f"{key}: {gap}")
    for name, stretches in used.items():
        found, end = (folder / name).lstat(), max(end for _, end in stretches)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{name} is a link or no file")
        if found.st_size < end:
            raise ValueError(f"{name} has {found.st_size} bytes, not {end}")
        # Else a small file could claim to be tensors that fill any memory.
        if any(one[1] > other[0] for one, other in itertools.pairwise(sorted(stretches))):
            raise ValueError(f"{name} has bytes that belong to several tensors")


@dataclass(frozen=True)
class Part:
    """Some rows of what a rectangle in a file and one that is wanted have in common.

    rows, columns: in the whole tensor. targets: all pieces here that want that rectangle.
    """

    stored: Stored
    dtype: torch.dtype
    rows: range
    columns: range
    targets: Sequence[Piece]

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return len(self.rows) * len(self.columns) * self.dtype.itemsize

    def read(self, file: Any, raw: Tensor) -> None:
        """Into raw (num_bytes,) uint8 on the host. Raises InputError where the file ends."""
        stored, size = self.stored, self.dtype.itemsize
        skipped = (self.rows.start - stored.row) * stored.columns
        begin = stored.begin + (skipped + self.columns.start - stored.column) * size
        # Whole rows lie one after the other; of cut ones each is read alone.
        cut = len(self.columns) < stored.columns
        for number, run in enumerate(raw.split(len(self.columns) * size) if cut else [raw]):
            _fill(file, begin + number * stored.columns * size, run)

    def hand_out(self, raw: Tensor) -> None:
        """Copy raw (num_bytes,) uint8, on any device, to the targets."""
        values = raw.view(self.dtype).view(len(self.rows), len(self.columns))
        for piece in self.targets:
            rows = piece.values[self.rows.start - piece.row :][: len(self.rows)]
            left = self.columns.start - piece.column
            rows[:, left : left + len(self.columns)].copy_(values)


def parts_of(
    folder: Path, index: Mapping[str, StoredTensor], wanted: Iterable[Piece], most_bytes: int
) -> list[Part]:
    """What has to be read for the wanted pieces, in the order in which it lies in the files.

    most_bytes: of a part, unless a row has more. What several pieces want is read once.
    Raises InputError for a tensor that is missing or has another shape.
    """
    places: dict[Hashable, list[Piece]] = {}
    for piece in wanted:
        places.setdefault(place_of(piece), []).append(piece)
    parts: list[Part] = []
    for targets in places.values():
        piece = targets[0]
        tensor = index.get(piece.key)
        if tensor is None:
            raise InputError(f"checkpoint {folder}: {piece.key} is missing")
        if tensor.matrix != _matrix(piece.shape):
            raise InputError(f"checkpoint {folder}: {_difference(piece, tensor)}")
        for stored in tensor.pieces:
            rows, columns = _overlap(stored, piece)
            if not rows or not columns:
                continue
            at_once = max(1, most_bytes // (len(columns) * tensor.dtype.itemsize))
            for first in range(rows.start, rows.stop, at_once):
                some = range(first, min(first + at_once, rows.stop))
                parts.append(Part(stored, tensor.dtype, some, columns, targets))
    parts.sort(key=lambda part: (part.stored.file, part.stored.begin, part.rows.start))
    return parts


def place_of(piece: Piece) -> tuple[str, int, int, int, int]:
    """Which rectangle of which tensor it is."""
    return piece.key, piece.row, piece.column, *piece.values.shape


def read_pieces(folder: Path, index: Mapping[str, StoredTensor], wanted: Iterable[Piece]) -> int:
    """Fill the values of every wanted piece, in whatever dtype they have; the bytes read.

    Beside the tensors, about `_CHUNK_BYTES` of memory are used.
    Raises InputError for a tensor that is missing or has another shape, and for a damaged file.
    """
    parts = parts_of(folder, index, wanted, _CHUNK_BYTES)
    buffer = torch.empty(max((part.num_bytes for part in parts), default=0), dtype=torch.uint8)
    for name, of_file in itertools.groupby(parts, key=lambda part: part.stored.file):
        with opened(folder, name) as file:
            for part in of_file:
                raw = buffer[: part.num_bytes]
                part.read(file, raw)
                part.hand_out(raw)
    return sum(part.num_bytes for part in parts)


def _difference(piece: Piece, tensor: StoredTensor) -> str:
    """In words, for tensors that are not of the same size."""
    (rows, columns), (own_rows, own_columns) = tensor.matrix, _matrix(piece.shape)
    if columns == own_columns:
        return (
            f"{piece.key} has {rows} rows, but the model has {own_rows}; give the sizes of its "
            f"training (for a vocabulary: the tokenizer, language.model.vocab_size and "
            f"language.model.vocab_multiple)"
        )
    return (
        f"{piece.key} is {list(tensor.shape)}, but the model's is {list(piece.shape)}; give the "
        f"sizes of its training"
    )


def opened(folder: Path, name: str) -> Any:
    """A file of the folder to read from; not one elsewhere, by a link. Raises InputError."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW)

    try:
        return open(folder / name, "rb", buffering=0, opener=opener)
    except OSError as error:
        raise InputError(f"checkpoint {folder}: {name} cannot be read: {error}") from error


def _overlap(stored: Stored, piece: Piece) -> tuple[range, range]:
    """The rows and columns of the whole tensor that both have, perhaps none."""
    rows, columns = piece.values.shape
    return (
        range(max(stored.row, piece.row), min(stored.row + stored.rows, piece.row + rows)),
        range(
            max(stored.column, piece.column),
            min(stored.column + stored.columns, piece.column + columns),
        ),
    )


def _fill(file: Any, begin: int, target: Tensor) -> None:
    """Fill target (n,) uint8 from byte ``begin`` on. Raises InputError where the file ends."""
    left = memoryview(target.numpy())
    while left:
        try:
            count = os.preadv(file.fileno(), [left], begin)
        except OSError as error:
            raise InputError(f"checkpoint {file.name}: cannot be read: {error}") from error
        if count <= 0:
            raise InputError(f"checkpoint {file.name}: the file is cut off; copy it again")
        left, begin = left[count:], begin + count


# --------------------------------------------------------------------------- whole tensors


def describe(checkpoint: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor of a checkpoint, by key. Raises InputError."""
    index = read_index(checkpoint)
    return {key: (torch.Size(tensor.shape), tensor.dtype) for key, tensor in index.items()}


def read(
    checkpoint: Path, wanted: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Whole tensors by key, as `describe` describes them; no others are read."""
    found = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in wanted.items()}
    read_pieces(checkpoint, read_index(checkpoint), [_whole(*one) for one in found.items()])
    return found


def write(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensor_of: Callable[[str], Tensor],
) -> None:
    """Write a checkpoint's tensors; each is asked for when its turn comes, in order."""
    described = {k: torch.empty(shape, dtype=dtype, device="meta") for k, shape in shapes.items()}
    pieces = [_whole(*one) for one in described.items()]
    write_pieces(folder, 0, pieces, lambda piece: tensor_of(piece.key))
    write_index(folder, 1)


def _whole(key: str, tensor: Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(key, shape, 0, 0, tensor.view(_matrix(shape)))
