"""Messages between the two ends of a bridge: what they carry, how they start and end.

A run of consecutive rows, as most messages are, is sent and received in place, without a copy.

Letters: n rows of this rank's messages, N rows of a buffer, H hidden.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bridge.plan import BridgePlan, Exchange
from bridge.runs import Ints, ints, offsets
from bridge.waiting import Message, wait_for
from bridge.watch import TransferWatch, Watched

Kind = Literal["rows", "gradients"]


def _unseen(kind: Kind, microbatch: int) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class WaitClock:
    """Adds up the seconds that this process waited for transfers, and the bytes that it sent.

    sent_bytes: of rows and of gradients since the step began, to other ranks of either end.
    around: entered for each wait, of what and of which microbatch, by whoever wants to see it.
    """

    seconds: float = 0.0
    sent_bytes: Counter[Kind] = field(default_factory=Counter)
    around: Callable[[Kind, int], AbstractContextManager[None]] = _unseen

    def take_seconds(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@dataclass(frozen=True)
class BridgeEnd:
    """What both ends of a bridge agree on.

    name: the encoder's, with its levels if they are several.
    forward, backward: groups for rows and for gradients, over both ends.
    wire_dtype: dtype of both messages. trainable: whether gradients travel back at all.
    gather: this rank's tensor-parallel group if the rows of a lane are shared out over it and
        each rank needs all of them (forward on the receiver, backward on the sender).
    timeout_seconds: how long a transfer may take once it is waited for; None asks the backend.
    watch: enforces the timeout where waiting does not block the host, from the start of a
        transfer on; None where it does. clock: of waiting for transfers.
    """

    name: str
    rank: int
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    hidden_size: int
    dtype: torch.dtype
    wire_dtype: torch.dtype
    device: torch.device
    trainable: bool
    gather: dist.ProcessGroup | None = None
    timeout_seconds: float | None = None
    watch: TransferWatch | None = None
    clock: WaitClock = field(default_factory=WaitClock)

    def begin_step(self) -> None:
        """Count the bytes of another step."""
        self.clock.sent_bytes.clear()

    def least_bytes(self, plans: Sequence[BridgePlan]) -> int:
        """Of the rows on this rank: each is sent once, by one of the ranks that have it."""
        num_rows = sum(plan.collects(self.rank).num_rows for plan in plans)
        return num_rows * self.hidden_size * self.wire_dtype.itemsize

    def sharers(self) -> list[int]:
        """Ranks whose received rows make up this rank's rows, in order."""
        if self.gather is None:
            return [self.rank]
        return dist.get_process_group_ranks(self.gather)

    def bounds(self, plan: BridgePlan) -> Ints:
        """Where each sharer's rows begin among those of all sharers; the last is their number."""
        return offsets(ints([plan.receives(rank).num_rows for rank in self.sharers()]))

    def own_rows(self, plan: BridgePlan) -> range:
        """Which of the rows of all sharers this rank itself receives."""
        share = self.sharers().index(self.rank)
        return range(*self.bounds(plan)[share : share + 2].tolist())

    def stage(
        self,
        plan: BridgePlan,
        copy: Callable[[Tensor], Tensor],
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        """Work out what this rank's transfers of ``plan`` need, ahead of them; in the background.

        copy: starts to copy a tensor to the device. replicas: encoder ranks that share out their
        gradients with this one, if they are not the `sharers`.
        """
        also = [] if replicas is None else dist.get_process_group_ranks(replicas)
        for rank in {self.rank, *self.sharers(), *also}:
            for exchange in (plan.receives, plan.collects):
                exchange(rank)
        for exchange in (plan.sends, plan.returns):
            exchange(self.rank)
        plan.staged_positions[self.rank] = copy(torch.from_numpy(self._positions(plan)))

    def positions(self, plan: BridgePlan) -> Tensor:
        """(n,) int64 local positions of the rows of all sharers."""
        if self.rank in plan.staged_positions:
            return plan.staged_positions[self.rank]
        return on_device(self._positions(plan), self.device)

    def _positions(self, plan: BridgePlan) -> Ints:
        return np.concatenate([plan.receives(rank).index for rank in self.sharers()])


@dataclass
class Transfer:
    """Messages under way.

    parts: the memory of the messages, held here so that nobody frees what is being sent.
    into: the buffer (N, H) that received rows belong in; None when sending. apart: messages that
    arrive outside of it, each with the places (n,) of its rows. what: names the transfer, its edge
    first.
    """

    end: BridgeEnd
    kind: Kind
    messages: Sequence[Message]
    parts: Sequence[Tensor]
    what: str
    microbatch: int
    into: Tensor | None = None
    apart: Sequence[tuple[Tensor, Tensor]] = ()

    def __post_init__(self) -> None:
        watch, seconds = self.end.watch, self.end.timeout_seconds
        self._watched: Watched | None = None
        if watch is not None and seconds is not None:
            self._watched = watch.add(self.messages, self.what, self.microbatch, seconds)

    def wait(self) -> None:
        """Return once every message has left, or is where it belongs; raises BridgeError.

        With a watch that is so on the device: all later work there waits for it.
        """
        started, seconds = time.perf_counter(), self.end.timeout_seconds
        if self._watched is not None:
            self._watched.is_wanted()
            seconds = None
        with self.end.clock.around(self.kind, self.microbatch):
            wait_for(self.messages, self.what, self.microbatch, seconds)
        self.end.clock.seconds += time.perf_counter() - started
        if self.into is not None:
            for index, part in self.apart:
                self.into[index] = part


def start_sending(
    end: BridgeEnd, microbatch: int, kind: Kind, exchange: Exchange, values: Tensor
) -> Transfer:
    """Start sending rows of ``values`` (N, H), those at ``exchange.index``; no waiting."""
    parts = _leaving(end, exchange, values)
    group, what = _route(end, microbatch, kind)
    messages = _start(end, kind, group, sent=[*zip(exchange.peers, parts, strict=True)])
    return Transfer(end, kind, messages, parts, what, microbatch)


def start_receiving(
    end: BridgeEnd, microbatch: int, kind: Kind, exchange: Exchange, into: Tensor
) -> Transfer:
    """Start receiving into ``into`` (N, H) of the wire's dtype; no waiting.

    Rows belong at ``exchange.index``; other rows are left alone.
    """
    parts, apart = _landing(into, _by_peer(exchange))
    group, what = _route(end, microbatch, kind)
    messages = _start(end, kind, group, received=[*zip(exchange.peers, parts, strict=True)])
    return Transfer(end, kind, messages, parts, what, microbatch, into, apart)


def start_exchanging(
    end: BridgeEnd,
    microbatches: range,
    kind: Kind,
    sends: Exchange,
    values: Tensor,
    receives: Exchange,
    into: Tensor,
) -> Transfer:
    """`start_sending` and `start_receiving` as one batch, between ranks that are both ends.

    What a rank sends to itself is copied. As separate batches, ordered transports could wait for
    each other.
    """
    parts, apart = _landing(into, _by_peer(receives))
    received = dict(zip(receives.peers, parts, strict=True))
    sent = dict(zip(sends.peers, _leaving(end, sends, values), strict=True))
    if end.rank in sent:
        received.pop(end.rank).copy_(sent.pop(end.rank))
    group = end.forward if kind == "rows" else end.backward
    messages = _start(end, kind, group, list(sent.items()), list(received.items()))
    span = f"microbatches {microbatches.start} to {microbatches.stop - 1}"
    what = f"bridge {end.name} (colocated): {kind} of {span}"
    own = list(sent.values())
    return Transfer(end, kind, messages, own, what, microbatches.start, into, apart)


def share_rows(end: BridgeEnd, microbatch: int, plan: BridgePlan, rows: Tensor) -> None:
    """Complete the rows (N, H) of all sharers, of which `own_rows` are there; they all call it."""
    if end.gather is not None:
        bounds = end.bounds(plan)
        shares = np.split(np.arange(bounds[-1]), bounds[1:-1])
        _share_out(end, end.gather, microbatch, "rows", rows, shares)


def share_gradient(
    end: BridgeEnd,
    group: dist.ProcessGroup | None,
    microbatch: int,
    gradient: Tensor,
    collected: Callable[[int], Ints],
) -> None:
    """Complete the gradient (N, H) of an encoder rank's rows; each rank of ``group`` calls it.

    group: the ranks that hold the same rows; None where no other rank does, and the rest is
    padding. collected: the rows (n,) whose gradient a rank has received.
    """
    if group is None:
        gradient[collected(end.rank).size :].zero_()
        return
    # Sorted by row, a replica's share is contiguous, whichever peers it came from.
    shares = [np.sort(collected(rank)) for rank in dist.get_process_group_ranks(group)]
    _share_out(end, group, microbatch, "gradients", gradient, shares)


def _share_out(
    end: BridgeEnd,
    group: dist.ProcessGroup,
    microbatch: int,
    kind: Kind,
    buffer: Tensor,
    shares: Sequence[Ints],
) -> None:
    """Complete ``buffer`` (N, H) on every rank of ``group``; each of them calls it.

    shares: per rank of the group the places (n,) of the rows that it has already, the same on all
    ranks, no row twice. Not differentiable: the caller knows which gradient counts. Each share goes
    straight to its place; an all-gather of padded shares would cost twice as much.
    """
    held = dict(zip(dist.get_process_group_ranks(group), shares, strict=True))
    mine = held.pop(end.rank)
    theirs = {rank: share for rank, share in held.items() if share.size}
    parts, apart = _landing(buffer, list(theirs.values()))
    own = _rows_at(buffer, mine) if mine.size else buffer[:0]
    sent = [(rank, own) for rank in held] if mine.size else []
    messages = _start(end, kind, group, sent, list(zip(theirs, parts, strict=True)))
    what = f"bridge {end.name}: {kind} of microbatch {microbatch}, shared out over a lane's ranks"
    Transfer(end, kind, messages, [own], what, microbatch, buffer, apart).wait()


def _by_peer(exchange: Exchange) -> list[Ints]:
    bounds = offsets(ints(exchange.counts))[1:-1]
    return np.split(exchange.index, bounds) if exchange.peers else []


def _leaving(end: BridgeEnd, exchange: Exchange, values: Tensor) -> list[Tensor]:
    """What each peer gets of ``values`` (N, H): a view where its rows are contiguous, else a copy.

    Fresh memory for a copy costs far more than the copy itself, and rows are mostly in order.
    """
    parts = [_rows_at(values, index) for index in _by_peer(exchange)]
    return [part.to(end.wire_dtype).contiguous() for part in parts]


def on_device(index: Ints, device: torch.device) -> Tensor:
    """Places (n,) as a tensor on ``device``; the host does not wait for the copy."""
    tensor = torch.from_numpy(index)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _together(index: Ints) -> bool:
    return bool(index[-1] - index[0] == index.size - 1 and (np.diff(index) == 1).all())


def _rows_at(values: Tensor, index: Ints) -> Tensor:
    """Rows of ``values`` (N, H): a view of (n, H) where they are contiguous, else a copy."""
    if _together(index):
        return values[int(index[0]) : int(index[0]) + index.size]
    return values[on_device(index, values.device)]


def _landing(
    into: Tensor, places: Sequence[Ints]
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Memory for a message per entry of ``places``, and which of them must be put in place."""
    parts, apart = [], []
    for index in places:
        if _together(index):
            parts.append(into[int(index[0]) : int(index[0]) + index.size])
        else:
            parts.append(into.new_empty(index.size, into.shape[1]))
            apart.append((on_device(index, into.device), parts[-1]))
    return parts, apart


def _route(end: BridgeEnd, microbatch: int, kind: Kind) -> tuple[dist.ProcessGroup, str]:
    """The group of a transfer, and its name: the edge between two modules first."""
    group, ends = end.forward, f"{end.name} -> language"
    if kind == "gradients":
        group, ends = end.backward, f"language -> {end.name}"
    return group, f"bridge {ends}: {kind} of microbatch {microbatch}"


def _start(
    end: BridgeEnd,
    kind: Kind,
    group: dist.ProcessGroup,
    sent: Sequence[tuple[int, Tensor]] = (),
    received: Sequence[tuple[int, Tensor]] = (),
) -> list[Message]:
    calls = [(dist.irecv, part, peer) for peer, part in received]
    calls += [(dist.isend, part, peer) for peer, part in sent]
    operations = [dist.P2POp(operation, part, peer, group) for operation, part, peer in calls]
    end.clock.sent_bytes[kind] += sum(part.nbytes for _, part in sent)
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    # Backends may answer a batch with one handle for all of it.
    works = works * len(operations) if len(works) == 1 else works
    return [
        Message(work, peer, part.shape[0], operation is dist.irecv)
        for work, (operation, part, peer) in zip(works, calls, strict=True)
    ]
