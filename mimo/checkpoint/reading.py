"""Reading pieces of tensors in any layout, in blocks that are checked before they are used.

Ranks with equal weights share the reading: they take turns in the order of the files, each reads
one turn of a round, and an all-gather gives the round to all of them. Pieces that only one rank
wants, such as its share of a distributed optimizer, it reads alone.
"""

import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.checkpoint.manifest import Listed, raise_damaged, reading
from mimo.checkpoint.tensors import Stored, StoredTensor, read_index, whole_piece
from mimo.device import local_device
from mimo.engines.contract import Piece
from mimo.errors import InputError, StartError

_CHUNK_BYTES = 1 << 22  # read at a time by a rank that reads alone
_TURN_BYTES = 1 << 20  # enough for a disk or a network, few beside the tensors
_ROUND_BYTES = 1 << 26  # read by all ranks in a round; each rank keeps a copy of them
_ALIGNMENT = 8


def shards_of[T](items: Iterable[tuple[T, int]], num_bytes: int) -> Iterator[list[T]]:
    """Group consecutive items, each with its size, to ``num_bytes`` at most; a larger is alone."""
    shard: list[T] = []
    shard_bytes = 0
    for item, size in items:
        if shard and shard_bytes + size > num_bytes:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(item)
        shard_bytes += size
    if shard:
        yield shard


class _CheckedReader:
    """Reads files of a checkpoint, one at a time, in whole blocks whose checksums are compared.

    The last block of which only a part was wanted is kept, so that adjacent parts are read once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file, self._descriptor = folder, Listed("", 0, 0), -1
        self._cache, self._cached_block = memoryview(b""), -1

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, file: Listed, begin: int, target: memoryview) -> None:
        """Fill target (n,) uint8 from byte ``begin`` of a file. Raises InputError or Unreadable."""
        if file is not self._file:
            self._open(file)
        while target:
            block, skipped = divmod(begin, file.block_bytes)
            length = min(file.block_bytes, file.num_bytes - block * file.block_bytes)
            assert skipped < length, "the index asks for bytes beyond the end of the file"
            if skipped == 0 and len(target) >= length:
                count = length
                self._read_block(block, target[:count])
            else:
                if self._cached_block != block:
                    self._cached_block = -1  # until the block is known to be intact
                    self._read_block(block, self._cache[:length])
                    self._cached_block = block
                count = min(len(target), length - skipped)
                target[:count] = self._cache[skipped : skipped + count]
            target, begin = target[count:], begin + count

    def _open(self, file: Listed) -> None:
        self.close()
        path = self._folder / file.name
        try:
            with reading(path):
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            message = f"checkpoint {self._folder}: {file.name} cannot be read: {error}"
            raise InputError(message) from error
        self._file = file
        self._cache, self._cached_block = memoryview(bytearray(file.block_bytes)), -1

    def _read_block(self, block: int, target: memoryview) -> None:
        file, begin, rest = self._file, block * self._file.block_bytes, target
        path = self._folder / file.name
        while rest:
            with reading(path):
                count = os.preadv(self._descriptor, [rest], begin)
            if count <= 0:
                raise InputError(f"checkpoint {path}: the file is cut off; copy it again")
            rest, begin = rest[count:], begin + count
        if not file.is_intact(block, target):
            problem = f"{file.name} has another checksum in the block that ends at {begin}"
            raise_damaged(self._folder, [problem])


@dataclass(frozen=True)
class _Part:
    """Rows that a stored rectangle and a wanted one share; targets: all pieces that want it."""

    stored: Stored
    dtype: torch.dtype
    rows: range
    columns: range
    targets: Sequence[Piece]

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * len(self.columns) * self.dtype.itemsize

    @property
    def aligned_bytes(self) -> int:
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT

    def read(self, reader: _CheckedReader, raw: Tensor) -> None:
        """Fill raw (num_bytes,) uint8 on the host. Raises the errors of `_CheckedReader.read`."""
        stored, size = self.stored, self.dtype.itemsize
        skipped = (self.rows.start - stored.row) * stored.columns
        begin = stored.begin + (skipped + self.columns.start - stored.column) * size
        # Whole rows lie one after the other; cut rows are read one by one.
        is_cut = len(self.columns) < stored.columns
        for number, run in enumerate(raw.split(len(self.columns) * size) if is_cut else [raw]):
            place = begin + number * stored.columns * size
            reader.read(stored.file, place, memoryview(run.numpy()))

    def copy_to_targets(self, raw: Tensor) -> None:
        """Copy raw (num_bytes,) uint8, on any device, to the targets."""
        values = raw.view(self.dtype).view(len(self.rows), len(self.columns))
        for piece in self.targets:
            rows = piece.values[self.rows.start - piece.row :][: len(self.rows)]
            first = self.columns.start - piece.column
            rows[:, first : first + len(self.columns)].copy_(values)


def _rectangle(piece: Piece) -> tuple[str | int, ...]:
    return piece.key, piece.row, piece.column, *piece.values.shape


def _parts_of(
    folder: Path, index: Mapping[str, StoredTensor], wanted: Iterable[Piece], max_bytes: int
) -> list[_Part]:
    """Return the parts to read, in the order of the files; what several pieces want only once.

    max_bytes: of a part, unless a row is longer. Raises InputError for a tensor that does not fit.
    """
    targets_of: dict[tuple[str | int, ...], list[Piece]] = {}
    for piece in wanted:
        targets_of.setdefault(_rectangle(piece), []).append(piece)
    parts: list[_Part] = []
    for targets in targets_of.values():
        piece = targets[0]
        tensor = index.get(piece.key)
        if tensor is None:
            raise InputError(
                f"checkpoint {folder} has no tensor {piece.key}; resume with the recipe that "
                f"it was trained with"
            )
        if tensor.matrix != piece.matrix:
            raise InputError(
                f"checkpoint {folder}: {piece.key} is {list(tensor.shape)}, but the model's is "
                f"{list(piece.shape)}; give the sizes of its training (for a vocabulary: the "
                f"tokenizer, language.model.vocab_size and language.model.vocab_multiple)"
            )
        height, width = piece.values.shape
        for stored in tensor.pieces:
            rows = _overlap(stored.row, stored.rows, piece.row, height)
            columns = _overlap(stored.column, stored.columns, piece.column, width)
            if rows and columns:
                max_rows = max(1, max_bytes // (len(columns) * tensor.dtype.itemsize))
                for start in range(0, len(rows), max_rows):
                    some_rows = rows[start : start + max_rows]
                    parts.append(_Part(stored, tensor.dtype, some_rows, columns, targets))
    parts.sort(key=lambda part: (part.stored.file.name, part.stored.begin, part.rows.start))
    return parts


def _overlap(first: int, count: int, other_first: int, other_count: int) -> range:
    return range(max(first, other_first), min(first + count, other_first + other_count))


def read_pieces(folder: Path, index: Mapping[str, StoredTensor], wanted: Iterable[Piece]) -> int:
    """Fill the values of every wanted piece, in whatever dtype they have; return the bytes used.

    Needs about `_CHUNK_BYTES` of memory beside the tensors. Raises InputError or Unreadable.
    """
    parts = _parts_of(folder, index, wanted, _CHUNK_BYTES)
    buffer = torch.empty(max((part.num_bytes for part in parts), default=0), dtype=torch.uint8)
    with closing(_CheckedReader(folder)) as reader:
        for part in parts:
            raw = buffer[: part.num_bytes]
            part.read(reader, raw)
            part.copy_to_targets(raw)
    return sum(part.num_bytes for part in parts)


def read(checkpoint: Path, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return whole tensors by key. keys: None for all. Raises InputError."""
    index = read_index(checkpoint)
    wanted = index if keys is None else keys
    tensors = {key: torch.empty(index[key].shape, dtype=index[key].dtype) for key in wanted}
    read_pieces(checkpoint, index, [whole_piece(key, tensor) for key, tensor in tensors.items()])
    return tensors


# ------------------------------------------------------------------------- several ranks


def from_rank_0[T](call: Callable[[], T]) -> T:
    """Return what ``call`` returns on rank 0, which alone calls it; every rank calls this.

    Its exception is raised on all ranks, as a RuntimeError with the traceback if it cannot be sent.
    """
    if dist.get_world_size() == 1:
        return call()  # a world of one, as for generation, need not start NCCL
    message: list[bytes] = [b""]
    if dist.get_rank() == 0:
        try:
            message[0] = pickle.dumps((call(), None))
        except Exception as error:  # of pickling, too: the other ranks wait for a message
            try:
                message[0] = pickle.dumps((None, error))
                pickle.loads(message[0])  # some errors can be pickled, but not unpickled
            except Exception:
                text = "".join(traceback.format_exception(error))
                message[0] = pickle.dumps((None, RuntimeError(f"rank 0 failed:\n{text}")))
    dist.broadcast_object_list(message, device=local_device())
    value, error = pickle.loads(message[0])
    if error is not None:
        raise error
    return value


def read_shared(
    folder: Path,
    index: Mapping[str, StoredTensor],
    wanted: Iterable[Piece],
    replicas: dist.ProcessGroup | None,
    on_progress: Callable[[], None] = lambda: None,
) -> int:
    """Like `read_pieces`, with the reading shared by the ranks of ``replicas``, which all call it.

    Returns the bytes that this rank used. Needs `_ROUND_BYTES` and a turn of memory, more if rows
    are longer. on_progress: called after each exchange. Raises InputError on all of them.
    """
    if replicas is None or replicas.size() == 1:
        return read_pieces(folder, index, wanted)
    # Short names of the wanted rectangles, the same on every rank.
    named = [(blake2b(repr(_rectangle(p)).encode(), digest_size=8).digest(), p) for p in wanted]
    names_of_ranks: list[Any] = [None] * replicas.size()
    dist.all_gather_object(names_of_ranks, {name for name, _ in named}, group=replicas)
    common = set.intersection(*names_of_ranks)
    turn_bytes = min(_TURN_BYTES, _ROUND_BYTES // replicas.size())
    shared = [piece for name, piece in named if name in common]
    parts = _parts_of(folder, index, shared, turn_bytes)
    num_bytes = _read_in_turns(folder, parts, turn_bytes, replicas, on_progress)
    alone = [piece for name, piece in named if name not in common]
    return num_bytes + read_pieces(folder, index, alone)


def _read_in_turns(
    folder: Path,
    parts: Sequence[_Part],
    turn_bytes: int,
    group: dist.ProcessGroup,
    on_progress: Callable[[], None],
) -> int:
    """Read and exchange parts that all ranks of the group list alike; return the bytes read."""
    turns = list(shards_of(((part, part.aligned_bytes) for part in parts), turn_bytes))
    sizes = [sum(part.aligned_bytes for part in turn) for turn in turns]
    host = torch.empty(max(sizes, default=0), dtype=torch.uint8)
    received = torch.empty(len(host) * group.size(), dtype=torch.uint8, device=local_device())
    num_bytes, problem = 0, None
    with closing(_CheckedReader(folder)) as reader:
        for first in range(0, len(turns), group.size()):
            round_ = turns[first : first + group.size()]
            size = max(sizes[first : first + group.size()])
            turn = round_[group.rank()] if group.rank() < len(round_) else ()
            try:
                for part, raw in _places(turn, host) if problem is None else ():
                    part.read(reader, raw)
                    num_bytes += part.num_bytes
            except InputError as error:
                problem = error  # the others wait in all rounds that follow
            gathered = received[: size * group.size()]
            dist.all_gather_into_tensor(gathered, host[:size].to(gathered.device), group=group)
            on_progress()
            for turn, memory in zip(round_, gathered.split(size), strict=False):
                for part, raw in _places(turn, memory):
                    part.copy_to_targets(raw)
    problems: list[Any] = [None] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    if problems := [error for error in problems if error is not None]:
        can_retry = all(isinstance(error, StartError) for error in problems)
        raise (StartError if can_retry else InputError)("\n".join(sorted({*map(str, problems)})))
    return num_bytes


def _places(turn: Sequence[_Part], memory: Tensor) -> Iterable[tuple[_Part, Tensor]]:
    """Yield each part of a turn with its place in memory (n,) uint8."""
    begin = 0
    for part in turn:
        yield part, memory[begin : begin + part.num_bytes]
        begin += part.aligned_bytes
