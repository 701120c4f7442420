"""Moves rows forward and their gradients back, as two autograd operations.

On the encoder, `BridgeSender.send` turns rows into a scalar token whose backward waits for the
rows' gradients. On the language model's first stage, `BridgeReceiver.receive` yields rows whose
backward sends their gradients. So each module runs an unmodified pipeline schedule.

Both ends know all counts from the plan: no shapes are exchanged, a peer without rows gets no
message, and there is one contiguous message per peer and direction.

Letters: n rows of this rank's messages, N rows of a whole lane, H hidden.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bridge.flat import FlatEmbeddings
from bridge.plan import BridgePlan, Exchange

# Microbatches whose receives are posted before they are needed, so transfer overlaps compute.
_POSTED_AHEAD = 2


class BridgeError(RuntimeError):
    """A transfer failed: names the bridge, the microbatch, the peer and the rows expected."""


@dataclass(frozen=True)
class BridgeEnd:
    """What both ends of a bridge agree on.

    name: the encoder's. forward, backward: groups for rows and for gradients, over both ends.
    wire_dtype: dtype of both messages. trainable: whether gradients travel back at all.
    gather: this rank's tensor-parallel group if the rows of a lane are shared out over it and
        each rank needs all of them (forward on the receiver, backward on the sender).
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


@dataclass
class _Transfer:
    """Messages under way with the peers of one exchange, in one buffer (n, H)."""

    works: list[dist.Work]
    buffer: Tensor
    exchange: Exchange
    what: str

    def wait(self) -> Tensor:
        for work, peer, count in zip(
            self.works, self.exchange.peers, self.exchange.counts, strict=True
        ):
            try:
                work.wait()
            except RuntimeError as error:
                raise BridgeError(
                    f"{self.what}: {count} rows, peer rank {peer}: {error}"
                ) from error
        return self.buffer


def _transfer(
    end: BridgeEnd,
    group: dist.ProcessGroup,
    exchange: Exchange,
    what: str,
    outgoing: Tensor | None,
) -> _Transfer:
    """Start sending ``outgoing`` (n, H), or receiving when it is None; does not wait."""
    if outgoing is None:
        buffer = torch.empty(
            exchange.num_rows, end.hidden_size, dtype=end.wire_dtype, device=end.device
        )
    else:
        buffer = outgoing.to(end.wire_dtype).contiguous()
    operation = dist.irecv if outgoing is None else dist.isend
    operations = [
        dist.P2POp(operation, part, peer, group)
        for part, peer in zip(buffer.split(list(exchange.counts)), exchange.peers, strict=True)
    ]
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    # Backends may answer a batch with one handle for all of it.
    works = works * len(operations) if len(works) == 1 else works
    direction = "receiving" if outgoing is None else "sending"
    return _Transfer(works, buffer, exchange, f"bridge {end.name}, {direction} {what}")


def _index(exchange: Exchange, device: torch.device) -> Tensor:
    return torch.from_numpy(exchange.index).to(device)


class BridgeSender:
    """The encoder's end, on every rank of the encoder's last pipeline stage."""

    def __init__(self, end: BridgeEnd, lane: int, run_ahead: int) -> None:
        self.end = end
        self.lane = lane
        self.run_ahead = run_ahead
        self._plans: Sequence[BridgePlan] = ()
        self._sent: deque[_Transfer] = deque()
        self._gradients: dict[int, _Transfer] = {}
        self._expects_gradients = False
        self._waited_seconds = 0.0

    def take_waited_seconds(self) -> float:
        """Seconds this rank waited for transfers since the last call."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def _wait(self, transfer: _Transfer) -> Tensor:
        started = time.perf_counter()
        buffer = transfer.wait()
        self._waited_seconds += time.perf_counter() - started
        return buffer

    def begin(self, plans: Sequence[BridgePlan], forward_only: bool = False) -> None:
        """Start a step of ``len(plans)`` microbatches."""
        assert not self._sent and not self._gradients, "the previous step has not been finished"
        self._plans = plans
        self._expects_gradients = self.end.trainable and not forward_only

    def send(self, microbatch: int, rows: FlatEmbeddings) -> Tensor:
        """Send this lane's rows (N, H); returns a scalar token.

        Called by every tensor-parallel rank of the lane with equal rows; each sends its share.
        The token's backward waits for the gradients of that share and gathers the lane's other
        shares, so that every replica gets the complete gradient (N, H).

        Raises ValueError when the rows are not those that the plan expects.
        """
        plan = self._plans[microbatch]
        if rows.split_sizes != plan.split_sizes[self.lane]:
            raise ValueError(
                f"bridge {self.end.name}, microbatch {microbatch}: the encoder produced rows per "
                f"sample {list(rows.split_sizes)}, the plan needs "
                f"{list(plan.split_sizes[self.lane])}"
            )
        assert not self._expects_gradients or rows.values.requires_grad, (
            f"bridge {self.end.name}: the plan expects gradients, but the rows require none"
        )
        return _Send.apply(rows.values, self, microbatch)

    def _forward(self, microbatch: int, values: Tensor) -> Tensor:
        exchange = self._plans[microbatch].sends(self.end.rank)
        outgoing = values.detach()[_index(exchange, values.device)]
        what = f"rows of microbatch {microbatch}"
        # Without a backward that waits for the receiver, finished sends are retired here.
        if not self._expects_gradients and len(self._sent) > self.run_ahead:
            self._wait(self._sent.popleft())
        self._sent.append(_transfer(self.end, self.end.forward, exchange, what, outgoing))
        if self._expects_gradients:
            what = f"gradients of microbatch {microbatch}"
            self._gradients[microbatch] = _transfer(
                self.end, self.end.backward, exchange, what, None
            )
        return values.new_zeros(())

    def _backward(self, microbatch: int) -> Tensor:
        plan = self._plans[microbatch]
        transfer = self._gradients.pop(microbatch)
        received = self._wait(transfer)
        num_rows = plan.source_rows[self.lane]
        gradient = received.new_zeros(num_rows, self.end.hidden_size)
        gradient[_index(transfer.exchange, received.device)] = received
        if self.end.gather is not None and num_rows > 0:
            # Shares are disjoint and the rest is zero, so the sum puts them together exactly.
            dist.all_reduce(gradient, group=self.end.gather)
        return gradient.to(self.end.dtype)

    def finish(self) -> None:
        """Wait until everything sent has left; call after the module's schedule."""
        while self._sent:
            self._wait(self._sent.popleft())
        assert not self._gradients, "a backward pass was skipped: gradients are still under way"


class BridgeReceiver:
    """The language model's end, on every rank of its first pipeline stage."""

    def __init__(self, end: BridgeEnd) -> None:
        self.end = end
        self._plans: Sequence[BridgePlan] = ()
        self._expects_gradients = False
        self._rows: dict[int, _Transfer] = {}
        self._gradients: deque[_Transfer] = deque()
        # Gives the rows a place in the graph although nothing before them is on this rank.
        self._anchor = torch.zeros((), device=end.device, requires_grad=True)

    def begin(self, plans: Sequence[BridgePlan], forward_only: bool = False) -> None:
        """Start a step of ``len(plans)`` microbatches; posts the first receives."""
        assert not self._rows and not self._gradients, "the previous step has not been finished"
        self._plans = plans
        self._expects_gradients = self.end.trainable and not forward_only
        for microbatch in range(min(_POSTED_AHEAD, len(plans))):
            self._post(microbatch)

    def _post(self, microbatch: int) -> None:
        exchange = self._plans[microbatch].receives(self.end.rank)
        what = f"rows of microbatch {microbatch}"
        self._rows[microbatch] = _transfer(self.end, self.end.forward, exchange, what, None)

    def receive(self, microbatch: int) -> tuple[Tensor, Tensor]:
        """Rows (n, H) in the model's dtype and their local positions (n,) int64.

        With ``gather`` set, every rank of that group calls it and gets all rows of the lane.
        The backward sends back the gradient of just those rows that this rank received over the
        bridge: copies of a row on other ranks hold equal gradients and must not add up.
        """
        if self._expects_gradients:
            rows = _Receive.apply(self._anchor, self, microbatch)
        else:
            rows = self._forward(microbatch)
        return rows, self._positions(microbatch)

    def _positions(self, microbatch: int) -> Tensor:
        plan = self._plans[microbatch]
        exchanges = [plan.receives(rank) for rank in self._sharers()]
        return torch.cat([_index(exchange, self.end.device) for exchange in exchanges])

    def _sharers(self) -> list[int]:
        """Ranks whose received rows make up this rank's rows, in order."""
        if self.end.gather is None:
            return [self.end.rank]
        return dist.get_process_group_ranks(self.end.gather)

    def _forward(self, microbatch: int) -> Tensor:
        mine = self._rows.pop(microbatch).wait()
        if microbatch + _POSTED_AHEAD < len(self._plans):
            self._post(microbatch + _POSTED_AHEAD)
        if self.end.gather is not None:
            mine = self._gather(microbatch, mine)
        return mine.to(self.end.dtype)

    def _gather(self, microbatch: int, mine: Tensor) -> Tensor:
        """All ranks' shares (n_t, H) -> the lane's rows (N, H); shares differ by at most one."""
        assert self.end.gather is not None
        plan = self._plans[microbatch]
        counts = [plan.receives(rank).num_rows for rank in self._sharers()]
        longest = max(counts)
        if longest == 0:
            return mine
        padded = mine.new_zeros(longest, self.end.hidden_size)
        padded[: mine.shape[0]] = mine
        gathered = mine.new_empty(len(counts) * longest, self.end.hidden_size)
        dist.all_gather_into_tensor(gathered, padded, group=self.end.gather)
        return torch.cat(
            [gathered[t * longest : t * longest + count] for t, count in enumerate(counts)]
        )

    def _backward(self, microbatch: int, gradient: Tensor) -> None:
        exchange = self._plans[microbatch].receives(self.end.rank)
        if self.end.gather is not None:
            sharers = self._sharers()
            before = sharers[: sharers.index(self.end.rank)]
            plan = self._plans[microbatch]
            start = sum(plan.receives(rank).num_rows for rank in before)
            gradient = gradient[start : start + exchange.num_rows]
        what = f"gradients of microbatch {microbatch}"
        self._gradients.append(
            _transfer(self.end, self.end.backward, exchange, what, gradient.detach())
        )

    def finish(self) -> None:
        """Wait until all gradients have left; call after the module's schedule."""
        while self._gradients:
            self._gradients.popleft().wait()
        assert not self._rows, "rows were announced but never received"


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, sender: BridgeSender, microbatch: int) -> Tensor:
        ctx.sender, ctx.microbatch = sender, microbatch
        return sender._forward(microbatch, values)

    @staticmethod
    def backward(ctx, *unused: Tensor):  # type: ignore[override]
        return ctx.sender._backward(ctx.microbatch), None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor: Tensor, receiver: BridgeReceiver, microbatch: int) -> Tensor:
        ctx.receiver, ctx.microbatch = receiver, microbatch
        return receiver._forward(microbatch)

    @staticmethod
    def backward(ctx, *gradients: Tensor):  # type: ignore[override]
        ctx.receiver._backward(ctx.microbatch, gradients[0])
        return None, None, None


def check_plans(end: BridgeEnd, plans: Sequence[BridgePlan]) -> None:
    """Compare plan digests over both ends; every rank of the bridge calls it.

    Raises BridgeError naming the ranks and the first microbatch that differ: the ranks then read
    different data indexes, and rows would be mispaired silently.
    """
    mine = torch.tensor([plan.digest for plan in plans], dtype=torch.int64, device=end.device)
    size = dist.get_world_size(end.forward)
    everyone = mine.new_empty(size * mine.numel())
    dist.all_gather_into_tensor(everyone, mine, group=end.forward)
    table = everyone.view(size, -1).cpu()
    ranks = dist.get_process_group_ranks(end.forward)
    for microbatch in range(table.shape[1]):
        column = table[:, microbatch]
        odd = [r for r, value in zip(ranks, column.tolist(), strict=True) if value != column[0]]
        if odd:
            raise BridgeError(
                f"bridge {end.name}, microbatch {microbatch}: ranks {odd} planned other transfers "
                f"than rank {ranks[0]}; they read different data indexes or recipes"
            )
