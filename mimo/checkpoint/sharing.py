"""Reading a checkpoint where several ranks want the same of it: each byte once, then exchanged.

What says where the tensors are, rank 0 reads and checks for all. Ranks with equal weights take
turns in the order of the files: of as many turns as there are ranks each reads one, and an
all-gather gives all of them to all. What a rank wants alone, such as its share of a distributed
optimizer, it reads alone.
"""

from __future__ import annotations

import itertools
import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.checkpoint.hf.folder import shards_of
from mimo.checkpoint.reading import CheckedFile, Part, opened, parts_of, place_of, read_pieces
from mimo.checkpoint.tensors import StoredTensor
from mimo.device import local_device
from mimo.engines.piece import Piece
from mimo.errors import InputError, StartError

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
