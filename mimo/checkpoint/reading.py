"""Reading pieces of tensors: what of which file, into memory, in whatever dtype that has.

Whole blocks of files are read, and each is compared with its checksum before any of it is used.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mimo.checkpoint.files import reading
from mimo.checkpoint.manifest import Listed, refuse
from mimo.engines.piece import Piece
from mimo.errors import InputError

if TYPE_CHECKING:
    from mimo.checkpoint.tensors import Stored, StoredTensor

_CHUNK_BYTES = 1 << 22
"""Bytes that are read at a time."""


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

    def read(self, file: CheckedFile, raw: Tensor) -> None:
        """Into raw (num_bytes,) uint8 on the host. As `read_pieces`."""
        stored, size = self.stored, self.dtype.itemsize
        skipped = (self.rows.start - stored.row) * stored.columns
        begin = stored.begin + (skipped + self.columns.start - stored.column) * size
        # Whole rows lie one after the other; of cut ones each is read alone.
        cut = len(self.columns) < stored.columns
        for number, run in enumerate(raw.split(len(self.columns) * size) if cut else [raw]):
            file.read(begin + number * stored.columns * size, memoryview(run.numpy()))

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
            raise InputError(
                f"checkpoint {folder} has no tensor {piece.key}; resume with the recipe that "
                f"it was trained with"
            )
        if tensor.matrix != piece.matrix:
            raise InputError(f"checkpoint {folder}: {_difference(piece, tensor)}")
        for stored in tensor.pieces:
            rows, columns = _overlap(stored, piece)
            if not rows or not columns:
                continue
            at_once = max(1, most_bytes // (len(columns) * tensor.dtype.itemsize))
            for first in range(rows.start, rows.stop, at_once):
                some = range(first, min(first + at_once, rows.stop))
                parts.append(Part(stored, tensor.dtype, some, columns, targets))
    parts.sort(key=lambda part: (part.stored.file.name, part.stored.begin, part.rows.start))
    return parts


def place_of(piece: Piece) -> tuple[str | int, ...]:
    """Which rectangle of which tensor it is."""
    return piece.key, piece.row, piece.column, *piece.values.shape


def read_pieces(folder: Path, index: Mapping[str, StoredTensor], wanted: Iterable[Piece]) -> int:
    """Fill the values of every wanted piece, in whatever dtype they have; returns the bytes used.

    Beside the tensors, about `_CHUNK_BYTES` of memory are used.
    Raises InputError for a tensor that is missing or has another shape, and for a damaged file;
    Unreadable where the file system is to blame.
    """
    parts = parts_of(folder, index, wanted, _CHUNK_BYTES)
    buffer = torch.empty(max((part.num_bytes for part in parts), default=0), dtype=torch.uint8)
    for listed, of_file in itertools.groupby(parts, key=lambda part: part.stored.file):
        with opened(folder, listed) as file:
            for part in of_file:
                raw = buffer[: part.num_bytes]
                part.read(file, raw)
                part.hand_out(raw)
    return sum(part.num_bytes for part in parts)


def _difference(piece: Piece, tensor: StoredTensor) -> str:
    """In words, for tensors that are not of the same size."""
    (rows, columns), (own_rows, own_columns) = tensor.matrix, piece.matrix
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


@contextmanager
def opened(folder: Path, listed: Listed) -> Iterator[CheckedFile]:
    """A file of the folder to read from; not one elsewhere, by a link.

    Raises Unreadable where the file system is to blame, else InputError.
    """
    path = folder / listed.name
    try:
        with reading(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise InputError(f"checkpoint {folder}: {listed.name} cannot be read: {error}") from error
    try:
        yield CheckedFile(folder, listed, descriptor)
    finally:
        os.close(descriptor)


class CheckedFile:
    """An open file of a checkpoint. Whole blocks are read, and their checksums compared.

    The last block of which a part was wanted is kept: what lies side by side is read once.
    """

    def __init__(self, folder: Path, listed: Listed, descriptor: int) -> None:
        self._folder, self.listed, self._descriptor = folder, listed, descriptor
        self._memory, self._block = memoryview(bytearray(listed.block_bytes)), -1

    def read(self, begin: int, target: memoryview) -> None:
        """Fill target (n,) uint8 from byte ``begin`` on.

        Raises InputError where the file ends or is damaged, Unreadable where the file system is to
        blame.
        """
        size = self.listed.block_bytes
        while target:
            block, skipped = divmod(begin, size)
            length = min(size, self.listed.num_bytes - block * size)
            assert skipped < length, "the index was compared with the size"
            if skipped == 0 and len(target) >= length:
                count = length
                self._read_block(block, target[:count])
            else:
                if self._block != block:
                    self._block = -1  # until it is known to be intact
                    self._read_block(block, self._memory[:length])
                    self._block = block
                count = min(len(target), length - skipped)
                target[:count] = self._memory[skipped : skipped + count]
            target, begin = target[count:], begin + count

    def _read_block(self, block: int, target: memoryview) -> None:
        """Fill target with a whole block; the file's last block may be shorter."""
        path, begin, left = self._folder / self.listed.name, block * len(self._memory), target
        while left:
            with reading(path):
                count = os.preadv(self._descriptor, [left], begin)
            if count <= 0:
                raise InputError(f"checkpoint {path}: the file is cut off; copy it again")
            left, begin = left[count:], begin + count
        if not self.listed.is_intact(block, target):
            problem = f"{self.listed.name} has another checksum in the block that ends at {begin}"
            refuse(self._folder, [problem])


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
