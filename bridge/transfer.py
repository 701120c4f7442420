"""Messages between the two ends of a bridge: what they carry, how they start and end.

Letters: n rows of this rank's messages, N rows of a whole lane, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bridge.plan import Exchange
from bridge.waiting import Message, wait_for


@dataclass(frozen=True)
class BridgeEnd:
    """What both ends of a bridge agree on.

    name: the encoder's. forward, backward: groups for rows and for gradients, over both ends.
    wire_dtype: dtype of both messages. trainable: whether gradients travel back at all.
    gather: this rank's tensor-parallel group if the rows of a lane are shared out over it and
        each rank needs all of them (forward on the receiver, backward on the sender).
    timeout_seconds: how long to wait for a transfer. None leaves it to the backend, where waiting
        does not block the host (NCCL).
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

    def sharers(self) -> list[int]:
        """Ranks whose received rows make up this rank's rows, in order."""
        if self.gather is None:
            return [self.rank]
        return dist.get_process_group_ranks(self.gather)

    def edge(self, group: dist.ProcessGroup) -> str:
        """Which modules ``group`` connects, in the direction of its messages."""
        ends = (self.name, "language") if group is self.forward else ("language", self.name)
        return f"bridge {ends[0]} -> {ends[1]}"


@dataclass
class Transfer:
    """Messages under way with the peers of one exchange.

    buffer: (n, H), all messages one after the other, when receiving. parts: each message, held
    here so that nobody frees what is being sent. what: names the transfer in errors.
    """

    works: list[dist.Work]
    buffer: Tensor | None
    parts: Sequence[Tensor]
    exchange: Exchange
    what: str
    microbatch: int
    timeout_seconds: float | None

    def wait(self) -> None:
        """Return once every message has arrived or left; raises BridgeError."""
        incoming = self.buffer is not None
        peers = zip(self.works, self.exchange.peers, self.exchange.counts, strict=True)
        messages = [Message(work, peer, rows, incoming) for work, peer, rows in peers]
        wait_for(messages, self.what, self.microbatch, self.timeout_seconds)

    def arrived(self) -> Tensor:
        """The received rows (n, H), after `wait`."""
        assert self.buffer is not None, "this transfer sends"
        return self.buffer


def start_transfer(
    end: BridgeEnd,
    microbatch: int,
    exchange: Exchange,
    kind: Literal["rows", "gradients"],
    outgoing: Sequence[Tensor] | None,
) -> Transfer:
    """Start sending ``outgoing``, a message per peer, or receiving when it is None; no waiting."""
    group = end.forward if kind == "rows" else end.backward
    buffer = None
    if outgoing is None:
        buffer = torch.empty(
            exchange.num_rows, end.hidden_size, dtype=end.wire_dtype, device=end.device
        )
        parts = buffer.split(list(exchange.counts))
    else:
        parts = [part.to(end.wire_dtype).contiguous() for part in outgoing]
    operation = dist.irecv if outgoing is None else dist.isend
    operations = [
        dist.P2POp(operation, part, peer, group)
        for part, peer in zip(parts, exchange.peers, strict=True)
    ]
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    # Backends may answer a batch with one handle for all of it.
    works = works * len(operations) if len(works) == 1 else works
    what = f"{end.edge(group)}: {kind} of microbatch {microbatch}"
    return Transfer(works, buffer, parts, exchange, what, microbatch, end.timeout_seconds)


def index_of(exchange: Exchange, device: torch.device) -> Tensor:
    """(n,) int64 local index of every row, in message order."""
    return torch.from_numpy(exchange.index).to(device)


def messages_of(values: Tensor, exchange: Exchange) -> list[Tensor]:
    """What each peer gets of ``values`` (N, H): a view where its rows stand together, else a copy.

    Fresh memory for a copy costs far more than the copy itself, and rows mostly stand in order.
    """
    parts, start = [], 0
    for count in exchange.counts:
        index = exchange.index[start : start + count]
        start += count
        first = int(index[0])
        if index[-1] - first == count - 1 and (np.diff(index) == 1).all():
            parts.append(values[first : first + count])
        else:
            parts.append(values[torch.from_numpy(index).to(values.device)])
    return parts


def gather_shares(group: dist.ProcessGroup, counts: Sequence[int], mine: Tensor) -> Tensor:
    """All ranks' shares (n_t, H), in the order of the group's ranks -> (N, H).

    Every rank of ``group`` calls it with the same ``counts`` of rows; shares are even, so little
    is padded. Not differentiable: whoever calls it knows whose gradient counts.
    """
    longest = max(counts)
    if longest == 0:
        return mine
    padded = mine
    if mine.shape[0] < longest:
        padded = mine.new_zeros(longest, mine.shape[1])
        padded[: mine.shape[0]] = mine
    gathered = mine.new_empty(len(counts) * longest, mine.shape[1])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    if min(counts) == longest:
        return gathered
    return torch.cat(
        [gathered[t * longest : t * longest + count] for t, count in enumerate(counts)]
    )
