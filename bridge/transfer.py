"""Messages between the two ends of a bridge: what they carry, how they start and end.

A run of consecutive rows, as most messages are, is sent and received in place, without a copy.

Letters: n rows of this rank's messages, N rows of a buffer, H hidden.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bridge.plan import BridgePlan, Exchange
from bridge.runs import Ints, Places, ints, offsets
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

    def bounds(self, plan: BridgePlan) -> list[int]:
        """Where each sharer's rows begin among those of all sharers; the last is their number."""

        def bounds() -> list[int]:
            return offsets(ints([plan.receives(rank).num_rows for rank in self.sharers()])).tolist()

        return plan.cached("bounds", self.rank, bounds)

    def own_rows(self, plan: BridgePlan) -> slice:
        """Which of the rows of all sharers this rank itself receives."""
        share = self.sharers().index(self.rank)
        return slice(*self.bounds(plan)[share : share + 2])

    def row_shares(self, plan: BridgePlan) -> list[tuple[slice, ...]]:
        """Return for each sharer where its rows are among those of all sharers."""
        bounds = itertools.pairwise(self.bounds(plan))
        return [(slice(first, last),) if first < last else () for first, last in bounds]

    def incoming(self, plan: BridgePlan) -> Exchange:
        """Return `BridgePlan.receives` with each row's index among the rows of all sharers."""

        def incoming() -> Exchange:
            own = self.own_rows(plan)
            return replace(plan.receives(self.rank), index=np.arange(own.start, own.stop))

        return plan.cached("incoming", self.rank, incoming)

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
            _ = plan.receives(rank), plan.collects(rank).merged_places
        mine = plan.sends(self.rank), plan.collects(self.rank), plan.returns(self.rank)
        for exchange in (*mine, self.incoming(plan)):
            _ = exchange.places
        self.positions(plan, copy)

    def positions(self, plan: BridgePlan, copy: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """(n,) int64 local positions of the rows of all sharers; copy: see `stage`."""

        def positions() -> Tensor:
            index = np.concatenate([plan.receives(rank).index for rank in self.sharers()])
            return on_device(index, self.device) if copy is None else copy(torch.from_numpy(index))

        return plan.cached("positions", self.rank, positions)


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
    parts = _send_buffers(end, exchange, values)
    group, what = _route(end, microbatch, kind)
    messages = _start(end, kind, group, sent=[*zip(exchange.peers, parts, strict=True)])
    return Transfer(end, kind, messages, parts, what, microbatch)


def start_receiving(
    end: BridgeEnd, microbatch: int, kind: Kind, exchange: Exchange, into: Tensor
) -> Transfer:
    """Start receiving into ``into`` (N, H) of the wire's dtype; no waiting.

    Rows belong at ``exchange.index``; other rows are left alone.
    """
    parts, apart = _recv_buffers(into, exchange.places)
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
    parts, apart = _recv_buffers(into, receives.places)
    received = dict(zip(receives.peers, parts, strict=True))
    sent = dict(zip(sends.peers, _send_buffers(end, sends, values), strict=True))
    if end.rank in sent:
        received.pop(end.rank).copy_(sent.pop(end.rank))
    group = end.forward if kind == "rows" else end.backward
    messages = _start(end, kind, group, list(sent.items()), list(received.items()))
    span = f"microbatches {microbatches.start} to {microbatches.stop - 1}"
    what = f"bridge {end.name} (colocated): {kind} of {span}"
    own = list(sent.values())
    return Transfer(end, kind, messages, own, what, microbatches.start, into, apart)


def share_out(
    end: BridgeEnd,
    group: dist.ProcessGroup,
    microbatch: int,
    kind: Kind,
    buffer: Tensor,
    shares: Sequence[Sequence[Places]],
) -> None:
    """Complete ``buffer`` (N, H) on every rank of ``group``; each of them calls it.

    shares: per rank of the group the places of the rows that it has already, the same on all
    ranks, no row twice. Not differentiable: the caller knows which gradient counts. Each share goes
    straight to its place; an all-gather of padded shares would cost twice as much.
    """
    held = dict(zip(dist.get_process_group_ranks(group), shares, strict=True))
    own = [buffer[_index(places, buffer.device)] for places in held.pop(end.rank)]
    sent = [(rank, part) for rank in held for part in own]
    theirs = [(rank, places) for rank, share in held.items() for places in share]
    parts, apart = _recv_buffers(buffer, [places for _, places in theirs])
    received = [(rank, part) for (rank, _), part in zip(theirs, parts, strict=True)]
    messages = _start(end, kind, group, sent, received)
    what = f"bridge {end.name}: {kind} of microbatch {microbatch}, shared out over a lane's ranks"
    Transfer(end, kind, messages, own, what, microbatch, buffer, apart).wait()


def _send_buffers(end: BridgeEnd, exchange: Exchange, values: Tensor) -> list[Tensor]:
    """What each peer gets of ``values`` (N, H): a view where its rows are contiguous, else a copy.

    Fresh memory for a copy costs far more than the copy itself, and rows are mostly in order.
    """
    parts = [values[_index(places, values.device)] for places in exchange.places]
    return [part.to(end.wire_dtype).contiguous() for part in parts]


def on_device(index: Ints, device: torch.device) -> Tensor:
    """Places (n,) as a tensor on ``device``; the host does not wait for the copy."""
    tensor = torch.from_numpy(index)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _index(places: Places, device: torch.device) -> slice | Tensor:
    return places if isinstance(places, slice) else on_device(places, device)


def _recv_buffers(
    into: Tensor, messages: Sequence[Places]
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Memory for each of ``messages``, and which of it must be put in place afterwards."""
    parts, apart = [], []
    for places in messages:
        index = _index(places, into.device)
        if isinstance(index, slice):
            parts.append(into[index])
        else:
            parts.append(into.new_empty(index.shape[0], into.shape[1]))
            apart.append((index, parts[-1]))
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
