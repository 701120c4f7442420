"""Moves rows forward and their gradients back, as two autograd operations.

On the encoder, `BridgeSender.send` turns rows into a scalar token whose backward waits for the
rows' gradients. On the language model's stage of the link, `BridgeReceiver.receive` returns rows
whose backward sends their gradients. Both ends know all counts from the plan: no shapes are
exchanged. A peer gets one message per direction, one for each sender if it gets the gradients of
others' rows too, or none if it has no rows.

Letters: n rows of this rank's messages, N rows of a whole lane, H hidden.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bridge.flat import ItemRows, check_rows
from bridge.plan import BridgePlan
from bridge.transfer import (
    BridgeEnd,
    SteppedEnd,
    Transfer,
    share_out,
    start_receiving,
    start_sending,
)
from bridge.waiting import BridgeError

_LEAST_BYTES = 1 << 20  # smaller buffers come from the heap, whose pages stay mapped
_MOST_FREE = 4  # unused blocks that are kept


def check_gradient_path(
    end: BridgeEnd, microbatch: int, tensor: Tensor, expects_gradients: bool
) -> None:
    """Raise BridgeError for a backward that schedules would skip silently, or could not run."""
    if tensor.requires_grad == expects_gradients:
        return
    plan, graph = ("gradients", "none") if expects_gradients else ("no gradients", "them")
    raise BridgeError(
        f"bridge {end.name}, microbatch {microbatch}: the plan expects {plan}, but the rows "
        f"require {graph}",
        microbatch,
    )


class BridgeSender(SteppedEnd):
    """The encoder's end, on every rank of the encoder's last pipeline stage.

    run_ahead: microbatches that are sent before the gradients of the first one are waited for.
    Receives of gradients are posted by the backward, never earlier: whatever waits for the whole
    device would also wait for gradients that the language model cannot have yet.
    """

    def __init__(self, end: BridgeEnd, lane: int, run_ahead: int) -> None:
        super().__init__(end)
        self.lane = lane
        self.run_ahead = run_ahead
        self._memory = RowMemory(end.device)

    def send(self, microbatch: int, rows: ItemRows) -> Tensor:
        """Send this lane's rows (N, H) and return a scalar token.

        Every tensor-parallel rank of the lane calls it with equal rows and sends its share. The
        token's backward returns the complete gradient (N, H) on every rank: it receives that of all
        rows, or of its share and gathers the rest. Under sequence parallelism each rank calls it
        with its part of the rows and gets the gradient of that part.

        Raises UnexpectedRows when the rows are not those of the plan, BridgeError when they require
        a gradient that will not come, or none although one will.
        """
        check_rows(self.end, microbatch, [self._plans[microbatch]], self.lane, rows)
        token = Crossing.apply(rows.values, self, microbatch)
        check_gradient_path(self.end, microbatch, token, self._expects_gradients)
        return token

    def _forward(self, microbatch: int, values: Tensor) -> Tensor:
        plan, end = self._plans[microbatch], self.end
        exchange = plan.sends(end.rank)
        # Without a backward that waits for the receiver, nothing else retires finished sends.
        while not self._expects_gradients and len(self._sent) >= max(1, self.run_ahead):
            self._sent.popleft().wait()
        self._sent.append(start_sending(end, microbatch, "rows", exchange, values))
        return values.new_zeros(())

    def _backward(self, microbatch: int, token: Tensor) -> Tensor:
        plan, end = self._plans[microbatch], self.end
        held = int(plan.held_rows[self.lane])
        gradient = self._memory.empty(held, end.hidden_size, end.wire_dtype)
        collects = end.collects(plan)
        start_receiving(end, microbatch, "gradients", collects, gradient).wait()
        # A gradient came back, so its rows have arrived: their buffer may be used again.
        self._sent.popleft().wait()
        if end.gather is not None:
            shares = [plan.collects(rank).merged_places for rank in end.sharers()]
            share_out(end, end.gather, microbatch, "gradients", gradient, shares)
        elif collects.num_rows < held:  # all other rows are padding
            gradient[collects.num_rows :].zero_()
        return gradient.to(end.dtype)

    def finish(self) -> None:
        assert not (self._expects_gradients and self._sent), "a microbatch's backward was skipped"
        super().finish()


class BridgeReceiver(SteppedEnd):
    """The language model's end, on every rank of the link's pipeline stage.

    run_ahead: the encoder's. posted_ahead: microbatches whose receives are posted before their rows
    are needed, so that transfer overlaps compute. The encoder sends these rows without waiting for
    this rank if its run-ahead exceeds the least that cannot deadlock by that many.
    """

    def __init__(self, end: BridgeEnd, run_ahead: int, posted_ahead: int) -> None:
        super().__init__(end)
        self.run_ahead = run_ahead
        self.posted_ahead = posted_ahead
        self._memory = RowMemory(end.device)
        self._num_posted = 0
        self._rows: dict[int, Transfer] = {}
        # Puts the rows into the graph: autograd needs an input that requires a gradient.
        self._anchor = torch.zeros((), device=end.device, requires_grad=True)

    def begin(self, plans: Sequence[BridgePlan], forward_only: bool = False) -> None:
        super().begin(plans, forward_only)
        self._num_posted = 0
        self._post(self.posted_ahead)

    def _post(self, stop: int) -> None:
        """Post receives of this rank's share of the rows of all microbatches before ``stop``."""
        end = self.end
        for microbatch in range(self._num_posted, min(stop, len(self._plans))):
            plan = self._plans[microbatch]
            rows = self._memory.empty(end.bounds(plan)[-1], end.hidden_size, end.wire_dtype)
            incoming = end.incoming(plan)
            self._rows[microbatch] = start_receiving(end, microbatch, "rows", incoming, rows)
            self._num_posted += 1

    def receive(self, microbatch: int) -> tuple[Tensor, Tensor]:
        """Return rows (n, H) in the model's dtype and their local positions (n,) int64.

        With ``gather`` set, every rank of that group calls it and gets all rows of the lane. The
        backward sends back the gradients of only those rows that this rank received over the
        bridge: copies of a row on other ranks have equal gradients, which must not be summed.
        """
        if self._expects_gradients:
            rows = Crossing.apply(self._anchor, self, microbatch)
        else:
            rows = self._forward(microbatch, self._anchor)
        check_gradient_path(self.end, microbatch, rows, self._expects_gradients)
        return rows, self.end.positions(self._plans[microbatch])

    def _forward(self, microbatch: int, anchor: Tensor) -> Tensor:
        end = self.end
        self._post(microbatch + 1)
        transfer = self._rows.pop(microbatch)
        transfer.wait()
        rows = transfer.into
        assert rows is not None
        self._post(microbatch + 1 + self.posted_ahead)
        # The encoder sent these rows after it had received all gradients before its run-ahead.
        while self._sent and self._sent[0].microbatch < microbatch - self.run_ahead:
            self._sent.popleft().wait()
        if end.gather is not None:
            shares = end.row_shares(self._plans[microbatch])
            share_out(end, end.gather, microbatch, "rows", rows, shares)
        return rows.to(end.dtype)

    def _backward(self, microbatch: int, gradient: Tensor) -> None:
        """Send back gradients (n, H) of received rows. Returns None: the anchor is the input."""
        plan, end = self._plans[microbatch], self.end
        received = gradient[end.own_rows(plan)]
        returns = plan.returns(end.rank)
        self._sent.append(start_sending(end, microbatch, "gradients", returns, received))

    def finish(self) -> None:
        super().finish()
        assert not self._rows, "a microbatch's rows were never received"


class Crossing(torch.autograd.Function):
    """Autograd function that calls `_forward` and `_backward` of an object such as a bridge end.

    number: microbatch or chunk. `_forward(number, tensor)` returns a tensor. `_backward(number,
    gradient)` gets the gradient of it, and returns that of ``tensor``, or None.
    """

    @staticmethod
    def forward(ctx, tensor: Tensor, end: Any, number: int) -> Tensor:
        ctx.end, ctx.number = end, number
        return end._forward(number, tensor)

    @staticmethod
    def backward(ctx, *gradients: Tensor):  # type: ignore[override]
        return ctx.end._backward(ctx.number, gradients[0]), None, None


class RowMemory:
    """Hands out uninitialised buffers of rows and reuses them as soon as nobody holds them.

    On a CPU, a fresh buffer of tens of megabytes is mapped page by page while it fills, which takes
    as long as the transfer itself. A device's allocator reuses memory by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[np.ndarray] = []

    def empty(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Return (n, H) on the device; its memory is reused once no tensor or view shares it."""
        num_bytes = num_rows * hidden_size * dtype.itemsize
        if self.device.type != "cpu" or num_bytes < _LEAST_BYTES:
            return torch.empty(num_rows, hidden_size, dtype=dtype, device=self.device)
        block = self._take(num_bytes)
        lease = block[:num_bytes]  # a separate object, which the tensor's storage keeps alive
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.frombuffer(lease, dtype=dtype).view(num_rows, hidden_size)

    def _take(self, num_bytes: int) -> np.ndarray:
        # A lease may end at any moment, on any thread that collects garbage: blocks that come back
        # meanwhile go to a new list.
        free, self._free = self._free, []
        free.sort(key=len)
        fitting = next((n for n, block in enumerate(free) if len(block) >= num_bytes), None)
        # Microbatches differ in size: a little more fits most of the next ones too.
        size = math.ceil(num_bytes * 1.125)
        block = np.empty(size, np.uint8) if fitting is None else free.pop(fitting)
        self._free.extend(free[-_MOST_FREE:])
        return block

    def _give_back(self, block: np.ndarray) -> None:
        self._free.append(block)
