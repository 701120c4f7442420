"""Makes the ranks of a test, which use gloo, wait for each other as ranks with NCCL do.

`behave_like_nccl` puts a rank's point-to-point messages under NCCL's rules, which gloo lacks:

- Order: a group's batches run one after the other, whoever their peers are. So do the single
  messages of a pair of ranks, which have their own communicator.
- Connections: the first message of a pair of ranks in a communicator blocks both hosts until both
  have made their call. In the middle of a step it is refused, unless a test asks for it.
- Devices: `torch.cuda.synchronize` waits for every message that was started, receives that were
  posted ahead of their use included.
- One queue, on request: with CUDA_DEVICE_MAX_CONNECTIONS=1 a message that waits for the one
  before it holds up all later work of the device.

Waiting for a message blocks the host, where NCCL only blocks the device; deadlocks are the same.
Whatever blocks a host or a device for `limit_seconds` fails as a deadlock and names its messages;
a wait for single messages, which may follow from it, fails later.
"""

from __future__ import annotations

import datetime
import itertools
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Gloo's messages of one pair are told apart by tags: batches, single messages, and connections.
_BATCH_TAG, _SINGLE_TAG, _FIRST_CONNECTION_TAG = 0, 1, 1 << 24


class Deadlock(RuntimeError):
    """Something that would wait for ever on a device."""


@dataclass(frozen=True)
class _Call:
    """One message as this rank sees it."""

    incoming: bool
    tensor: torch.Tensor
    peer: int
    group: dist.ProcessGroup

    @property
    def pair(self) -> tuple[int, int]:
        """Sender and receiver."""
        me = dist.get_rank()
        return (self.peer, me) if self.incoming else (me, self.peer)

    def __str__(self) -> str:
        source, destination = self.pair
        shape = "x".join(map(str, self.tensor.shape))
        return f"{shape} from rank {source} to rank {destination} in {self.group.group_desc}"

    def over_gloo(self, group: dist.ProcessGroup, tensor: torch.Tensor, tag: int) -> dist.Work:
        """Start a message to the same peer, below torch's calls, which are replaced."""
        start = group.recv if self.incoming else group.send
        return start([tensor], dist.get_group_rank(group, self.peer), tag)


@dataclass
class _Work:
    """The handle of a batch; one for all of it, as NCCL gives."""

    calls: Sequence[_Call]
    number: int
    limit_seconds: float
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        seconds = 2 * self.limit_seconds
        if timeout is not None and timeout.total_seconds() > 0:
            seconds = min(seconds, timeout.total_seconds())
        if not self.done.wait(seconds):
            raise Deadlock(f"timed out after {seconds:.3g} s: {self}")
        if self.error is not None:
            raise self.error
        return True

    def __str__(self) -> str:
        return f"batch {self.number} ({', '.join(map(str, self.calls))})"


class _Stream:
    """One communicator of this rank: batches run in the order in which they were started."""

    def __init__(self, name: str, tag: int, limit_seconds: float) -> None:
        self.name, self.tag, self.limit_seconds = name, tag, limit_seconds
        self.last: _Work | None = None
        self._connected: set[tuple[int, int]] = set()
        self._numbers = itertools.count()
        self._queue: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"stream {name}", daemon=True).start()

    def start(self, calls: Sequence[_Call], one_queue: bool, may_connect: bool) -> _Work:
        missing = [call for call in calls if call.pair not in self._connected]
        if missing and not may_connect:
            raise Deadlock(f"connects in the middle of a step: {', '.join(map(str, missing))}")
        self._connect(missing)
        work = _Work(calls, next(self._numbers), self.limit_seconds)
        limit = self.limit_seconds
        if one_queue and self.last is not None and not self.last.done.wait(limit):
            raise Deadlock(f"the device's one queue is held up: {work} comes after {self.last}")
        self.last = work
        self._queue.put(work)
        return work

    def _connect(self, missing: Sequence[_Call]) -> None:
        handshakes = []
        for call in missing:
            tag = zlib.crc32(repr((self.name, call.pair)).encode()) % _FIRST_CONNECTION_TAG
            tag += _FIRST_CONNECTION_TAG
            for incoming in (False, True):
                word = replace(call, incoming=incoming)
                handshakes.append((call, word.over_gloo(_world(), torch.zeros(1), tag)))
        deadline = time.monotonic() + self.limit_seconds
        for call, work in handshakes:
            left = datetime.timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                work.wait(left)
            except RuntimeError as error:
                raise Deadlock(
                    f"the first message of this pair never connects: {call}; rank {call.peer} does "
                    f"not make its call for it"
                ) from error
        self._connected |= {call.pair for call in missing}

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            try:
                started = [call.over_gloo(call.group, call.tensor, self.tag) for call in work.calls]
                for message in started:
                    message.wait()
            except Exception as error:
                work.error = error
            work.done.set()


class _Device:
    """The streams of this process."""

    def __init__(self, one_queue: bool, limit_seconds: float) -> None:
        self.one_queue = one_queue
        self.limit_seconds = limit_seconds
        self.may_connect = True
        self._streams: dict[tuple[Any, ...], _Stream] = {}
        self._started: list[_Work] = []

    def start(self, calls: Sequence[_Call], single: bool = False) -> _Work:
        group = calls[0].group
        assert all(call.group is group for call in calls), "a batch is of one group"
        pair = tuple(sorted(calls[0].pair)) if single else ()
        key = (group.group_name, *pair)
        if key not in self._streams:
            tag = _SINGLE_TAG if single else _BATCH_TAG
            self._streams[key] = _Stream(" ".join(map(str, key)), tag, self.limit_seconds)
        work = self._streams[key].start(calls, self.one_queue, self.may_connect)
        self._started = [w for w in self._started if not w.is_completed()] + [work]
        return work

    def synchronize(self, *unused: Any) -> None:
        deadline = time.monotonic() + self.limit_seconds
        late = [
            str(work)
            for work in self._started
            if not work.done.wait(max(0.001, deadline - time.monotonic()))
        ]
        if late:
            raise Deadlock(f"torch.cuda.synchronize waits for ever for {'; '.join(late)}")
        self._started.clear()


def behave_like_nccl(
    one_queue: bool = False, connects_late: bool = False, limit_seconds: float = 15.0
) -> None:
    """Put this rank's messages under NCCL's rules, until its process ends."""
    from bridge import transfer
    from mimo.engines.megatron.cpu import adapt_to_machine
    from mimo.model.modules import MimoModel

    device = _Device(one_queue, limit_seconds)
    run = MimoModel.run

    def step(*args: Any, **kwargs: Any) -> Any:
        device.may_connect = connects_late
        return run(*args, **kwargs)

    MimoModel.run = step  # type: ignore[method-assign]

    def single(incoming: bool) -> Callable[..., _Work]:
        def start(tensor: Any, peer: Any = None, group: Any = None, tag: int = 0, **kwargs: Any):
            assert not tag, "NCCL has no tags"
            peer = kwargs.pop("src" if incoming else "dst", peer)
            assert not kwargs, f"the device model does not know {kwargs}"
            return device.start([_Call(incoming, tensor, peer, group or _world())], single=True)

        return start

    isend, irecv = single(incoming=False), single(incoming=True)

    def batch(operations: Sequence[dist.P2POp]) -> list[_Work]:
        return [
            device.start(
                [_Call(o.op is irecv, o.tensor, o.peer, o.group or _world()) for o in operations]
            )
        ]

    replaced = {
        "isend": isend,
        "irecv": irecv,
        "send": lambda *args, **kwargs: isend(*args, **kwargs).wait() and None,
        "recv": lambda *args, **kwargs: irecv(*args, **kwargs).wait() and None,
        "batch_isend_irecv": batch,
    }
    for name, function in replaced.items():
        setattr(dist, name, function)
        setattr(distributed_c10d, name, function)
    transfer._start_each = transfer._start_batch
    adapt_to_machine()
    torch.cuda.synchronize = device.synchronize


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "a rank's world exists before its first message"
    return world
