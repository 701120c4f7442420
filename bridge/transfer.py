"""Transfers between the two ends of a bridge: their messages, how they start and end.

Most messages are runs of consecutive rows, which are sent and received in place, without a copy.

Letters: n rows of this rank's messages, N rows of a buffer, H hidden.
"""

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bridge.plan import BridgePlan, Exchange
from bridge.runs import Ints, Places, ints, offsets
from bridge.waiting import Message, TransferWatch, Watched, wait_for

Kind = Literal["rows", "gradients"]
Call = tuple[Callable[..., Any], Tensor, int]  # `dist.isend` or `dist.irecv`, and the peer


@dataclass
class WaitClock:
    """Sums up the seconds that this process waited for transfers, and the bytes that it sent.

    sent_bytes: of rows and of gradients since the step began, to other ranks of either end.
    around: makes a context that is entered for each wait, of a kind and a microbatch.
    """

    seconds: float = 0.0
    sent_bytes: Counter[Kind] = field(default_factory=Counter)
    around: Callable[[Kind, int], AbstractContextManager[None]] = lambda *_: nullcontext()

    def take_seconds(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@dataclass(frozen=True)
class BridgeEnd:
    """One rank's settings of a bridge.

    name: the module's, with its levels if they are several. to_language: whether rows go to the
        language model, as from encoders, or come from it, as for generators.
    forward, backward: groups for rows and for gradients, over both ends.
    wire_dtype: dtype of all messages. trainable: whether gradients travel back at all.
    gather: this rank's tensor-parallel group, if each rank gets a share of the lane's rows but
        needs all of them (forward on the receiver, backward on the sender).
    replicas: ranks of each encoder lane, if the language model sends every gradient to all of them.
        Empty if each gets a share and exchanges it over `gather`.
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
    to_language: bool = True
    replicas: Sequence[Sequence[int]] = ()

    def begin_step(self) -> None:
        self.clock.sent_bytes.clear()

    def empty(self, num_rows: int) -> Tensor:
        """Return a fresh buffer (n, H) of the wire's dtype."""
        size = num_rows, self.hidden_size
        return torch.empty(size, dtype=self.wire_dtype, device=self.device)

    def least_bytes(self, plans: Sequence[BridgePlan]) -> int:
        """Return the bytes to send if each row on this rank is sent once, by one of its ranks."""
        num_rows = sum(plan.collects(self.rank).num_rows for plan in plans)
        return num_rows * self.hidden_size * self.wire_dtype.itemsize

    def sharers(self) -> list[int]:
        """Return the ranks whose received rows make up this rank's rows, in order."""
        if self.gather is None:
            return [self.rank]
        return dist.get_process_group_ranks(self.gather)

    def bounds(self, plan: BridgePlan) -> list[int]:
        """Return where each sharer's rows begin among those of all; the last is their number."""
        sizes = (plan.receives(rank).num_rows for rank in self.sharers())
        return plan.cached("bounds", self.rank, lambda: offsets(ints([*sizes])).tolist())

    def own_rows(self, plan: BridgePlan) -> slice:
        """Return which of the rows of all sharers this rank receives itself."""
        share = self.sharers().index(self.rank)
        return slice(*self.bounds(plan)[share : share + 2])

    def row_shares(self, plan: BridgePlan) -> list[tuple[slice, ...]]:
        """Return for each sharer where its rows are among those of all sharers."""
        bounds = itertools.pairwise(self.bounds(plan))
        return [(slice(first, last),) if first < last else () for first, last in bounds]

    def incoming(self, plan: BridgePlan) -> Exchange:
        """Return `BridgePlan.receives` with each row's index among the rows of all sharers."""

        def incoming() -> Exchange:
            rows = self.own_rows(plan)
            return replace(plan.receives(self.rank), index=np.arange(rows.start, rows.stop))

        return plan.cached("incoming", self.rank, incoming)

    def replicas_of(self, rank: int) -> Sequence[int]:
        """Return the ranks that get what is sent to ``rank``, in order."""
        return next((lane for lane in self.replicas if rank in lane), (rank,))

    def collects(self, plan: BridgePlan) -> Exchange:
        """Return the gradients to receive: this rank's share, or those of all its `replicas`."""

        def collects() -> Exchange:
            shares = [plan.collects(rank) for rank in self.replicas_of(self.rank)]
            return Exchange(
                peers=tuple(peer for share in shares for peer in share.peers),
                counts=tuple(count for share in shares for count in share.counts),
                index=np.concatenate([share.index for share in shares]),
            )

        return plan.cached("all collects", self.rank, collects)

    def stage(
        self,
        plan: BridgePlan,
        copy: Callable[[Tensor], Tensor],
        sharing: dist.ProcessGroup | None = None,
    ) -> None:
        """Compute what this rank's transfers of ``plan`` need, ahead of them, in any thread.

        copy: starts to copy a tensor to the device. sharing: encoder ranks, other than
        the `sharers`, that exchange their shares of the gradients with this one.
        """
        others = [] if sharing is None else dist.get_process_group_ranks(sharing)
        for rank in {self.rank, *self.sharers(), *others}:
            _ = plan.receives(rank), plan.collects(rank).merged_places
        mine = plan.sends(self.rank), self.collects(plan), plan.returns(self.rank)
        for exchange in (*mine, self.incoming(plan)):
            _ = exchange.places
        self.positions(plan, copy)

    def positions(self, plan: BridgePlan, copy: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the local positions (n,) int64 of the rows of all sharers; copy: see `stage`."""

        def positions() -> Tensor:
            index = np.concatenate([plan.receives(rank).index for rank in self.sharers()])
            return on_device(index, self.device) if copy is None else copy(torch.from_numpy(index))

        return plan.cached("positions", self.rank, positions)


@dataclass
class Transfer:
    """Messages under way.

    parts: the memory of the messages, kept so that nobody frees what is being sent.
    into: the buffer (N, H) for received rows; None when sending. copied_later: messages that arrive
    outside of it, each with the places (n,) of its rows. what: the transfer's name, edge first.
    """

    end: BridgeEnd
    kind: Kind
    messages: Sequence[Message]
    parts: Sequence[Tensor]
    what: str
    microbatch: int
    into: Tensor | None = None
    copied_later: Sequence[tuple[Tensor, Tensor]] = ()

    def __post_init__(self) -> None:
        watch, seconds = self.end.watch, self.end.timeout_seconds
        self._watched: Watched | None = None
        if watch is not None and seconds is not None:
            self._watched = watch.add(self.messages, self.what, self.microbatch, seconds)

    def wait(self) -> None:
        """Wait until every message has left or is in place; raises BridgeError.

        With a watch the host goes on, and all later work on the device waits.
        """
        started, seconds = time.perf_counter(), self.end.timeout_seconds
        if self._watched is not None:
            self._watched.is_wanted()
            seconds = None
        with self.end.clock.around(self.kind, self.microbatch):
            wait_for(self.messages, self.what, self.microbatch, seconds)
        self.end.clock.seconds += time.perf_counter() - started
        if self.into is not None:
            for index, part in self.copied_later:
                self.into[index] = part


class SteppedEnd:
    """An end of a bridge in a step: `begin`, its module's run, and `finish`."""

    def __init__(self, end: BridgeEnd) -> None:
        self.end = end
        self._plans: Sequence[BridgePlan] = ()
        self._expects_gradients = False
        self._sent: deque[Transfer] = deque()

    def begin(self, plans: Sequence[BridgePlan], forward_only: bool = False) -> None:
        """Start a step of ``len(plans)`` microbatches; may post the first receives."""
        assert not self._sent, "the last step has not been finished"
        self._plans = plans
        self._expects_gradients = self.end.trainable and not forward_only

    def finish(self) -> None:
        """Wait until all sends are finished; call after the module's schedule."""
        while self._sent:
            self._sent.popleft().wait()


def start_sending(
    end: BridgeEnd, microbatch: int, kind: Kind, exchange: Exchange, values: Tensor
) -> Transfer:
    """Start sending the rows of ``values`` (N, H) at ``exchange.index``, also to `replicas`."""
    parts = _send_buffers(end, exchange, values)
    group, what = _route(end, microbatch, kind)
    to_peers = zip(exchange.peers, parts, strict=True)
    sent = [(rank, part) for peer, part in to_peers for rank in end.replicas_of(peer)]
    messages = _start(end, kind, group, sent)
    return Transfer(end, kind, messages, parts, what, microbatch)


def start_receiving(
    end: BridgeEnd, microbatch: int, kind: Kind, exchange: Exchange, into: Tensor
) -> Transfer:
    """Start receiving into ``into`` (N, H), of the wire's dtype, at ``exchange.index`` alone."""
    parts, copied_later = _recv_buffers(into, exchange.places)
    group, what = _route(end, microbatch, kind)
    messages = _start(end, kind, group, received=[*zip(exchange.peers, parts, strict=True)])
    return Transfer(end, kind, messages, parts, what, microbatch, into, copied_later)


def start_exchanging(
    end: BridgeEnd,
    microbatches: range,
    kind: Kind,
    sends: Exchange,
    values: Tensor,
    receives: Exchange,
    into: Tensor,
) -> Transfer:
    """Start sending and receiving in one batch, between ranks that are both ends.

    Rows for the rank itself are copied. In two batches, ordered transports could wait for each
    other.
    """
    parts, copied_later = _recv_buffers(into, receives.places)
    received = dict(zip(receives.peers, parts, strict=True))
    sent = dict(zip(sends.peers, _send_buffers(end, sends, values), strict=True))
    if end.rank in sent:
        received.pop(end.rank).copy_(sent.pop(end.rank))
    group = end.forward if kind == "rows" else end.backward
    messages = _start(end, kind, group, list(sent.items()), list(received.items()))
    span = f"microbatches {microbatches.start} to {microbatches.stop - 1}"
    what = f"bridge {end.name} (colocated): {kind} of {span}"
    parts = list(sent.values())
    return Transfer(end, kind, messages, parts, what, microbatches.start, into, copied_later)


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
    of_others = dict(zip(dist.get_process_group_ranks(group), shares, strict=True))
    mine = [buffer[_index(places, buffer.device)] for places in of_others.pop(end.rank)]
    sent = [(rank, part) for rank in of_others for part in mine]
    wanted = [(rank, places) for rank, share in of_others.items() for places in share]
    parts, copied_later = _recv_buffers(buffer, [places for _, places in wanted])
    received = [(rank, part) for (rank, _), part in zip(wanted, parts, strict=True)]
    messages = _start(end, kind, group, sent, received)
    what = f"bridge {end.name}: {kind} of microbatch {microbatch}, shared out over a lane's ranks"
    Transfer(end, kind, messages, mine, what, microbatch, buffer, copied_later).wait()


def _send_buffers(end: BridgeEnd, exchange: Exchange, values: Tensor) -> list[Tensor]:
    """The rows of ``values`` (N, H) for each peer: a view if they are contiguous, else a copy."""
    parts = [values[_index(places, values.device)] for places in exchange.places]
    return [part.to(end.wire_dtype).contiguous() for part in parts]


def on_device(index: Ints, device: torch.device) -> Tensor:
    """Return places (n,) as a tensor on ``device``; the host does not wait for the copy."""
    tensor = torch.from_numpy(index)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _index(places: Places, device: torch.device) -> slice | Tensor:
    return places if isinstance(places, slice) else on_device(places, device)


def _recv_buffers(
    into: Tensor, messages: Sequence[Places]
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Memory for each of ``messages``, and what must be copied into place after arrival."""
    parts, copied_later = [], []
    for places in messages:
        index = _index(places, into.device)
        if isinstance(index, slice):
            parts.append(into[index])
        else:
            parts.append(into.new_empty(index.shape[0], into.shape[1]))
            copied_later.append((index, parts[-1]))
    return parts, copied_later


def _route(end: BridgeEnd, microbatch: int, kind: Kind) -> tuple[dist.ProcessGroup, str]:
    group = end.forward if kind == "rows" else end.backward
    ends = [end.name, "language"]
    if end.to_language != (kind == "rows"):
        ends.reverse()
    return group, f"bridge {' -> '.join(ends)}: {kind} of microbatch {microbatch}"


def _start_each(group: dist.ProcessGroup, calls: Sequence[Call]) -> list[dist.Work]:
    # Gloo combines no messages: `P2POp` and `isend` would only add checks.
    starts = {dist.irecv: group.recv, dist.isend: group.send}
    return [starts[op]([part], dist.get_group_rank(group, to), 0) for op, part, to in calls]


def _start_batch(group: dist.ProcessGroup, calls: Sequence[Call]) -> list[dist.Work]:
    works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(*call, group) for call in calls])
    # Backends may answer a batch with one handle for all of it.
    return works * len(calls) if len(works) == 1 else works


def _start(
    end: BridgeEnd,
    kind: Kind,
    group: dist.ProcessGroup,
    sent: Sequence[tuple[int, Tensor]] = (),
    received: Sequence[tuple[int, Tensor]] = (),
) -> list[Message]:
    calls = [(dist.irecv, part, peer) for peer, part in received]
    calls += [(dist.isend, part, peer) for peer, part in sent]
    end.clock.sent_bytes[kind] += sum(part.nbytes for _, part in sent)
    if not calls:
        return []
    works = (_start_each if end.device.type == "cpu" else _start_batch)(group, calls)
    return [
        Message(work, peer, part.shape[0], operation is dist.irecv)
        for work, (operation, part, peer) in zip(works, calls, strict=True)
    ]
