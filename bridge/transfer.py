"""Messages between the two ends of a bridge: what they carry, how they start and end.

Rows leave from where they stand and arrive where they belong, without a copy, wherever a message
is a run of consecutive rows; mostly it is.

Letters: n rows of this rank's messages, N rows of a buffer, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bridge.plan import Exchange
from bridge.runs import Ints, ints, offsets
from bridge.waiting import Message, wait_for
from bridge.watch import TransferWatch


@dataclass(frozen=True)
class BridgeEnd:
    """What both ends of a bridge agree on.

    name: the encoder's, with its levels if they are several.
    forward, backward: groups for rows and for gradients, over both ends.
    wire_dtype: dtype of both messages. trainable: whether gradients travel back at all.
    gather: this rank's tensor-parallel group if the rows of a lane are shared out over it and
        each rank needs all of them (forward on the receiver, backward on the sender).
    timeout_seconds: how long a transfer may take once it is waited for; None: as the backend says.
    watch: looks after that where waiting does not block the host; None where it does.
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

    def wait(self, messages: Sequence[Message], what: str, microbatch: int) -> None:
        """Return once all messages are done, or on the device once all later work waits for them.

        Raises BridgeError; ``what`` names the transfer in it.
        """
        if self.watch is None or self.timeout_seconds is None:
            wait_for(messages, what, microbatch, self.timeout_seconds)
            return
        self.watch.add(messages, what, microbatch, self.timeout_seconds)
        wait_for(messages, what, microbatch, None)

    def sharers(self) -> list[int]:
        """Ranks whose received rows make up this rank's rows, in order."""
        if self.gather is None:
            return [self.rank]
        return dist.get_process_group_ranks(self.gather)

    def edge(self, group: dist.ProcessGroup) -> str:
        """Which modules ``group`` connects, in the direction of its messages."""
        ends = (self.name, "language") if group is self.forward else ("language", self.name)
        return f"bridge {ends[0]} -> {ends[1]}"


Kind = Literal["rows", "gradients"]


@dataclass
class Transfer:
    """Messages under way with the peers of one exchange.

    parts: the memory of each message, held here so that nobody frees what is being sent.
    into: the buffer (N, H) that received rows belong in; None when sending. apart: messages that
    arrive outside of it, each with the places (n,) of its rows. what: names the transfer.
    """

    end: BridgeEnd
    works: list[dist.Work]
    parts: Sequence[Tensor]
    exchange: Exchange
    what: str
    microbatch: int
    into: Tensor | None = None
    apart: Sequence[tuple[Tensor, Tensor]] = ()

    def wait(self) -> None:
        """Return once every message has left, or is where it belongs; raises BridgeError."""
        incoming = self.into is not None
        peers = zip(self.works, self.exchange.peers, self.exchange.counts, strict=True)
        messages = [Message(work, peer, rows, incoming) for work, peer, rows in peers]
        self.end.wait(messages, self.what, self.microbatch)
        if self.into is not None:
            _put(self.into, self.apart)


def start_sending(
    end: BridgeEnd, microbatch: int, kind: Kind, exchange: Exchange, values: Tensor
) -> Transfer:
    """Start sending rows of ``values`` (N, H), those at ``exchange.index``; no waiting."""
    parts = messages_of(values, exchange)
    parts = [part.to(end.wire_dtype).contiguous() for part in parts]
    group, what = _route(end, microbatch, kind)
    works = _start([(dist.isend, part, peer) for part, peer in _pairs(parts, exchange)], group)
    return Transfer(end, works, parts, exchange, what, microbatch)


def start_receiving(
    end: BridgeEnd, microbatch: int, kind: Kind, exchange: Exchange, into: Tensor, places: Ints
) -> Transfer:
    """Start receiving into ``into`` (N, H) of the wire's dtype; no waiting.

    places: (n,) where each row belongs, in message order; other rows are left alone.
    """
    bounds = offsets(ints(exchange.counts))[1:-1]
    parts, apart = _landing(into, np.split(places, bounds) if exchange.peers else [])
    group, what = _route(end, microbatch, kind)
    works = _start([(dist.irecv, part, peer) for part, peer in _pairs(parts, exchange)], group)
    return Transfer(end, works, parts, exchange, what, microbatch, into, apart)


def share_out(
    end: BridgeEnd,
    group: dist.ProcessGroup,
    microbatch: int,
    kind: Kind,
    buffer: Tensor,
    shares: Sequence[Ints],
) -> None:
    """Complete ``buffer`` (N, H) on every rank of ``group``; each of them calls it.

    shares: per rank of the group the places (n,) of the rows that it has already, the same on all
        ranks; no two ranks have the same row. Not differentiable: whoever calls it knows whose
        gradient counts.

    Each share goes straight to where it belongs, which costs half of what an all-gather of padded
    shares and putting them together again does.
    """
    ranks = dist.get_process_group_ranks(group)
    me = ranks.index(end.rank)
    others = [(rank, share) for rank, share in zip(ranks, shares, strict=True) if rank != end.rank]
    received = [(rank, share) for rank, share in others if share.size]
    parts, apart = _landing(buffer, [share for _, share in received])
    calls = [(dist.irecv, part, rank) for part, (rank, _) in zip(parts, received, strict=True)]
    if shares[me].size:
        mine = _rows_at(buffer, shares[me])
        calls += [(dist.isend, mine, rank) for rank, _ in others]
    works = _start(calls, group)
    messages = [
        Message(work, peer, part.shape[0], operation is dist.irecv)
        for work, (operation, part, peer) in zip(works, calls, strict=True)
    ]
    what = f"bridge {end.name}: {kind} of microbatch {microbatch}, shared out over a lane's ranks"
    end.wait(messages, what, microbatch)
    _put(buffer, apart)


def index_of(exchange: Exchange, device: torch.device) -> Tensor:
    """(n,) int64 local index of every row, in message order."""
    return torch.from_numpy(exchange.index).to(device)


def messages_of(values: Tensor, exchange: Exchange) -> list[Tensor]:
    """What each peer gets of ``values`` (N, H): a view where its rows stand together, else a copy.

    Fresh memory for a copy costs far more than the copy itself, and rows mostly stand in order.
    """
    bounds = offsets(ints(exchange.counts))[1:-1]
    runs = np.split(exchange.index, bounds) if exchange.peers else []
    return [_rows_at(values, run) for run in runs]


def _together(index: Ints) -> bool:
    """Whether (n,) places, n > 0, follow on each other."""
    return bool(index[-1] - index[0] == index.size - 1 and (np.diff(index) == 1).all())


def _rows_at(values: Tensor, index: Ints) -> Tensor:
    """Rows of ``values`` (N, H): a view of (n, H) where they stand together, else a copy."""
    if _together(index):
        return values[int(index[0]) : int(index[0]) + index.size]
    return values[torch.from_numpy(index).to(values.device)]


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
            apart.append((torch.from_numpy(index).to(into.device), parts[-1]))
    return parts, apart


def _put(into: Tensor, apart: Sequence[tuple[Tensor, Tensor]]) -> None:
    for index, part in apart:
        into[index] = part


def _route(end: BridgeEnd, microbatch: int, kind: Kind) -> tuple[dist.ProcessGroup, str]:
    group = end.forward if kind == "rows" else end.backward
    return group, f"{end.edge(group)}: {kind} of microbatch {microbatch}"


def _pairs(parts: Sequence[Tensor], exchange: Exchange) -> list[tuple[Tensor, int]]:
    return list(zip(parts, exchange.peers, strict=True))


def _start(
    calls: Sequence[tuple[Callable[..., Any], Tensor, int]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start (isend or irecv, message, peer) as one batch; a handle for each."""
    operations = [dist.P2POp(operation, part, peer, group) for operation, part, peer in calls]
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    # Backends may answer a batch with one handle for all of it.
    return works * len(operations) if len(works) == 1 else works
