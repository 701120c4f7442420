"""Moves rows forward and their gradients back, as two autograd operations.

On the encoder, `BridgeSender.send` turns rows into a scalar token whose backward waits for the
rows' gradients. On the language model's first stage, `BridgeReceiver.receive` yields rows whose
backward sends their gradients. So each module runs an unmodified pipeline schedule.

Both ends know all counts from the plan: no shapes are exchanged, a peer without rows gets no
message, and there is one contiguous message per peer and direction. A message that does not come
ends the run with the peers that are waited for and the rows that each was to send or take.

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
from bridge.waiting import BridgeError, Message, UnexpectedRows, wait_for

# Microbatches whose receives are posted before they are needed, so transfer overlaps compute.
_POSTED_AHEAD = 2


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

    def edge(self, group: dist.ProcessGroup) -> str:
        """Which modules ``group`` connects, in the direction of its messages."""
        ends = (self.name, "language") if group is self.forward else ("language", self.name)
        return f"bridge {ends[0]} -> {ends[1]}"


@dataclass
class _Transfer:
    """Messages under way with the peers of one exchange, in one buffer (n, H)."""

    works: list[dist.Work]
    buffer: Tensor
    exchange: Exchange
    what: str
    incoming: bool
    microbatch: int | None = None
    timeout_seconds: float | None = None

    def wait(self) -> Tensor:
        """The buffer, once every message has arrived or left; raises BridgeError."""
        messages = [
            Message(work, peer, rows, self.incoming)
            for work, peer, rows in zip(
                self.works, self.exchange.peers, self.exchange.counts, strict=True
            )
        ]
        wait_for(messages, self.what, self.microbatch, self.timeout_seconds)
        return self.buffer


def _transfer(
    end: BridgeEnd,
    group: dist.ProcessGroup,
    exchange: Exchange,
    what: str,
    outgoing: Tensor | None,
    microbatch: int | None = None,
) -> _Transfer:
    """Start sending ``outgoing`` (n, H), or receiving when it is None; does not wait.

    what: names the transfer in errors, such as "rows of microbatch 3".
    """
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
    return _Transfer(
        works,
        buffer,
        exchange,
        f"{end.edge(group)}: {what}",
        incoming=outgoing is None,
        microbatch=microbatch,
        timeout_seconds=end.timeout_seconds,
    )


def _start(
    end: BridgeEnd, microbatch: int, exchange: Exchange, kind: str, outgoing: Tensor | None
) -> _Transfer:
    """`_transfer` of one microbatch's "rows" or "gradients"."""
    group = end.forward if kind == "rows" else end.backward
    what = f"{kind} of microbatch {microbatch}"
    return _transfer(end, group, exchange, what, outgoing, microbatch)


def _index(exchange: Exchange, device: torch.device) -> Tensor:
    return torch.from_numpy(exchange.index).to(device)


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
    return torch.cat(
        [gathered[t * longest : t * longest + count] for t, count in enumerate(counts)]
    )


def _check_gradient_path(
    end: BridgeEnd, microbatch: int, tensor: Tensor, expects_gradients: bool
) -> None:
    """Schedules skip a backward without a word when its output requires no gradient."""
    if tensor.requires_grad == expects_gradients:
        return
    plan, graph = (
        ("expects gradients", "require none")
        if expects_gradients
        else ("expects no gradients", "require them")
    )
    raise BridgeError(
        f"bridge {end.name}, microbatch {microbatch}: the plan {plan}, but the rows {graph}",
        microbatch,
    )


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

        Raises UnexpectedRows when the rows are not those that the plan expects, BridgeError when
        they require a gradient that will not come, or none although one will.
        """
        plan, end = self._plans[microbatch], self.end
        where = f"bridge {end.name}, microbatch {microbatch}"
        expected = plan.runs.split_sizes(self.lane)
        if rows.split_sizes != expected:
            raise UnexpectedRows(
                f"{where}: the encoder produced rows per sample {list(rows.split_sizes)}, the "
                f"plan needs {list(expected)}",
                microbatch,
            )
        if rows.values.shape[1] != end.hidden_size:
            raise UnexpectedRows(
                f"{where}: the encoder produced rows of size {rows.values.shape[1]}, the language "
                f"model needs {end.hidden_size}",
                microbatch,
            )
        token = _Send.apply(rows.values, self, microbatch)
        _check_gradient_path(end, microbatch, token, self._expects_gradients)
        return token

    def _forward(self, microbatch: int, values: Tensor) -> Tensor:
        plan, rank = self._plans[microbatch], self.end.rank
        exchange = plan.sends(rank)
        outgoing = values.detach()[_index(exchange, values.device)]
        # Without a backward that waits for the receiver, finished sends are retired here.
        while not self._expects_gradients and len(self._sent) >= max(1, self.run_ahead):
            self._wait(self._sent.popleft())
        self._sent.append(_start(self.end, microbatch, exchange, "rows", outgoing))
        if self._expects_gradients:
            returning = plan.collects(rank)
            self._gradients[microbatch] = _start(self.end, microbatch, returning, "gradients", None)
        return values.new_zeros(())

    def _backward(self, microbatch: int) -> Tensor:
        plan, device = self._plans[microbatch], self.end.device
        transfer = self._gradients.pop(microbatch)
        received = self._wait(transfer)
        # Who sends back the gradient of rows has taken them, so their buffer is free.
        self._wait(self._sent.popleft())
        index = _index(transfer.exchange, device)
        if self.end.gather is not None:
            ranks = dist.get_process_group_ranks(self.end.gather)
            exchanges = [plan.collects(rank) for rank in ranks]
            received = gather_shares(self.end.gather, [e.num_rows for e in exchanges], received)
            index = torch.cat([_index(exchange, device) for exchange in exchanges])
        gradient = received.new_zeros(plan.source_rows[self.lane], self.end.hidden_size)
        gradient[index] = received
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
        self._rows[microbatch] = _start(self.end, microbatch, exchange, "rows", None)

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
        _check_gradient_path(self.end, microbatch, rows, self._expects_gradients)
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
            plan = self._plans[microbatch]
            counts = [plan.receives(rank).num_rows for rank in self._sharers()]
            mine = gather_shares(self.end.gather, counts, mine)
        return mine.to(self.end.dtype)

    def _backward(self, microbatch: int, gradient: Tensor) -> None:
        plan = self._plans[microbatch]
        exchange = plan.returns(self.end.rank)
        if self.end.gather is not None:
            sharers = self._sharers()
            before = sharers[: sharers.index(self.end.rank)]
            start = sum(plan.receives(rank).num_rows for rank in before)
            gradient = gradient[start : start + plan.receives(self.end.rank).num_rows]
        gradient = gradient.detach()[_index(exchange, gradient.device)]
        # The encoder asks for gradients when it sends rows, so they leave without delay.
        while len(self._gradients) >= _POSTED_AHEAD:
            self._gradients.popleft().wait()
        self._gradients.append(_start(self.end, microbatch, exchange, "gradients", gradient))

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
