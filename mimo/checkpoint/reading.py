"""Reading pieces."""

from __future__ import annotations

import itertools
import os
import pickle
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.checkpoint.manifest import Listed, reading, refuse
from mimo.checkpoint.tensors import Stored, StoredTensor, read_index, whole_piece
from mimo.device import local_device
from mimo.engines.piece import Piece
from mimo.errors import InputError, StartError

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


_TURN_BYTES = 1 << 20
"""That a rank reads at a time: enough for a disk or a network, few beside the tensors."""
_ROUND_BYTES = 1 << 26
"""That all ranks together read at a time, of which each has a copy; fewer in a turn if many."""
_ALIGNMENT = 8


def from_rank_0[T](do: Callable[[], T]) -> T:
    """What ``do`` returns on rank 0, which alone calls it; every rank of the world calls this.

    What it raises is raised on all ranks; where that cannot be sent, a RuntimeError that says it.
    """
    if dist.get_world_size() == 1:
        return do()  # a world of one, as for generation, need not start NCCL
    found: list[bytes] = [b""]
    if dist.get_rank() == 0:
        try:
            found[0] = pickle.dumps((do(), None))
        except Exception as error:  # also of what cannot be pickled: the others wait for a word
            found[0] = _packed(error)
    dist.broadcast_object_list(found, device=local_device())
    value, error = pickle.loads(found[0])
    if error is not None:
        raise error
    return value


def _packed(error: Exception) -> bytes:
    """An error as `from_rank_0` sends it. Some can be pickled, but not read again."""
    try:
        packed = pickle.dumps((None, error))
        pickle.loads(packed)
    except Exception:
        words = "".join(traceback.format_exception(error))
        return pickle.dumps((None, RuntimeError(f"rank 0 failed:\n{words}")))
    return packed


def read_shared(
    folder: Path,
    index: Mapping[str, StoredTensor],
    wanted: Iterable[Piece],
    replicas: dist.ProcessGroup | None,
    gets_on: Callable[[], None] = lambda: None,
) -> int:
    """As `read_pieces`, but ranks of ``replicas`` share the reading; the bytes that this rank used.

    Every rank of that group calls it, each with its own wanted pieces. Beside the tensors,
    `_ROUND_BYTES` and a turn are used at most, unless rows are longer. gets_on: called after each
    exchange.
    Raises InputError, on all of them, for what one of them cannot read.
    """
    if replicas is None or replicas.size() == 1:
        return read_pieces(folder, index, wanted)
    named = [(_name(piece), piece) for piece in wanted]
    all_names: list[Any] = [None] * replicas.size()
    dist.all_gather_object(all_names, {name for name, _ in named}, group=replicas)
    common = set.intersection(*all_names)
    alone = [piece for name, piece in named if name not in common]
    together = [piece for name, piece in named if name in common]
    turn_bytes = min(_TURN_BYTES, _ROUND_BYTES // replicas.size())
    parts = parts_of(folder, index, together, turn_bytes)
    num_bytes = _in_turns(folder, parts, turn_bytes, replicas, gets_on)
    return num_bytes + read_pieces(folder, index, alone)


def _name(piece: Piece) -> bytes:
    """A short name of the rectangle that is wanted, the same on every rank."""
    return blake2b(repr(place_of(piece)).encode(), digest_size=8).digest()


def _room(part: Part) -> int:
    return -(-part.num_bytes // _ALIGNMENT) * _ALIGNMENT


def _in_turns(
    folder: Path,
    parts: Sequence[Part],
    turn_bytes: int,
    group: dist.ProcessGroup,
    gets_on: Callable[[], None],
) -> int:
    """Read and exchange parts that all ranks of the group list alike; the bytes read here."""
    turns = list(shards_of(((part, _room(part)) for part in parts), turn_bytes))
    most = max((sum(map(_room, turn)) for turn in turns), default=0)
    host = torch.empty(most, dtype=torch.uint8)
    arrived = torch.empty(most * group.size(), dtype=torch.uint8, device=local_device())
    num_bytes, problem = 0, None
    with ExitStack() as files:
        file: CheckedFile | None = None
        for round_ in itertools.batched(turns, group.size()):
            room = max(sum(map(_room, turn)) for turn in round_)
            own = round_[group.rank()] if group.rank() < len(round_) else ()
            try:
                for part, raw in _places(own, host) if problem is None else ():
                    if file is None or file.listed != part.stored.file:
                        files.close()
                        file = files.enter_context(opened(folder, part.stored.file))
                    part.read(file, raw)
                    num_bytes += part.num_bytes
            except InputError as error:
                problem = error  # the others wait in all rounds that follow
            every = arrived[: room * group.size()]
            dist.all_gather_into_tensor(every, host[:room].to(every.device), group=group)
            gets_on()
            for turn, of_rank in zip(round_, every.split(room), strict=False):
                for part, raw in _places(turn, of_rank):
                    part.hand_out(raw)
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, problem, group=group)
    if problems := [one for one in found if one is not None]:
        may_go_away = all(isinstance(one, StartError) for one in problems)
        raise (StartError if may_go_away else InputError)("\n".join(sorted({*map(str, problems)})))
    return num_bytes


def _places(turn: Sequence[Part], memory: Tensor) -> Iterable[tuple[Part, Tensor]]:
    """Where each part of a turn lies in memory (n,) uint8."""
    begin = 0
    for part in turn:
        yield part, memory[begin : begin + part.num_bytes]
        begin += _room(part)


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


def describe(checkpoint: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor of a checkpoint, by key. Raises InputError."""
    index = read_index(checkpoint)
    return {key: (torch.Size(tensor.shape), tensor.dtype) for key, tensor in index.items()}


def read(
    checkpoint: Path, wanted: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Whole tensors by key, as `describe` describes them; no others are read."""
    found = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in wanted.items()}
    read_pieces(checkpoint, read_index(checkpoint), [whole_piece(*one) for one in found.items()])
    return found
