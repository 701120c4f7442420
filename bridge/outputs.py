"""A bridge to a generator: an encoder's bridge whose communication runs backwards.

Rows leave the language model where an encoder's gradients would leave it, and their gradients
arrive where an encoder's rows would arrive. So the plan is that of an encoder which makes a row for
each position, read from its other end:

| on a language rank | on a generator rank | index |
|---|---|---|
| `returns` rows | `collects` rows | positions on the rank; rows of the rank |
| `receives` gradients | `sends` gradients | positions on the rank; rows of the rank |

Without sequence parallelism every tensor-parallel rank has all hidden states and sends its share of
the rows. The shares of the gradient are gathered, never summed.

Letters: n rows of a tensor-parallel group's lane (of this rank under sequence parallelism), N rows
of a generator lane, H hidden, T positions on this rank.
"""

from collections.abc import Sequence

from torch import Tensor

from bridge.communicator import Crossing, check_gradient_path
from bridge.plan import BridgePlan
from bridge.transfer import (
    BridgeEnd,
    SteppedEnd,
    Transfer,
    share_out,
    start_exchanging,
    start_receiving,
    start_sending,
)


class OutputSender(SteppedEnd):
    """The language model's end, on every rank of its last pipeline stage.

    run_ahead: microbatches that the language model runs forward before a backward.
    """

    def __init__(self, end: BridgeEnd, run_ahead: int) -> None:
        super().__init__(end)
        self.run_ahead = run_ahead

    def send(self, microbatch: int, hidden: Tensor) -> Tensor:
        """Send this rank's rows of hidden states (T, H) and return a scalar token, zero.

        Every rank of the tensor-parallel group calls it, also without rows. The backward of the
        token waits for the rows' gradients, and gathers them over ``end.gather``.
        """
        places = self.end.positions(self._plans[microbatch])
        rows = hidden.index_select(0, places)  # the rows of every rank that shares
        token = Crossing.apply(rows, self, microbatch)
        check_gradient_path(self.end, microbatch, token, self._expects_gradients)
        return token

    def _forward(self, microbatch: int, rows: Tensor) -> Tensor:
        plan, end = self._plans[microbatch], self.end
        # Without a backward that waits for the receiver, nothing else retires finished sends.
        while not self._expects_gradients and len(self._sent) > self.run_ahead:
            self._sent.popleft().wait()
        share = rows.detach()[end.own_rows(plan)]
        self._sent.append(start_sending(end, microbatch, "rows", plan.returns(end.rank), share))
        return rows.new_zeros(())

    def _backward(self, microbatch: int, token: Tensor) -> Tensor:
        plan, end = self._plans[microbatch], self.end
        gradient = end.empty(end.bounds(plan)[-1])
        start_receiving(end, microbatch, "gradients", end.incoming(plan), gradient).wait()
        # A gradient came back, so its rows have arrived.
        self._sent.popleft().wait()
        if end.gather is not None:
            shares = end.row_shares(plan)
            share_out(end, end.gather, microbatch, "gradients", gradient, shares)
        return gradient.to(end.dtype)

    def finish(self) -> None:
        assert not (self._expects_gradients and self._sent), "a microbatch's backward was skipped"
        super().finish()


class OutputReceiver(SteppedEnd):
    """A generator's end, on every rank of a disjoint generator. lane: this rank's."""

    def __init__(self, end: BridgeEnd, lane: int) -> None:
        super().__init__(end)
        self.lane = lane
        self._rows: dict[int, Transfer] = {}

    def begin(self, plans: Sequence[BridgePlan], forward_only: bool = False) -> None:
        super().begin(plans, forward_only)
        self._post(0)

    def _post(self, microbatch: int) -> None:
        if microbatch < len(self._plans):
            end, plan = self.end, self._plans[microbatch]
            held = int(plan.held_rows[self.lane])
            rows, collects = end.empty(held), plan.collects(end.rank)
            self._rows[microbatch] = start_receiving(end, microbatch, "rows", collects, rows)

    def receive(self, microbatch: int) -> Tensor:
        """Return this lane's rows (N, H) in the model's dtype, in the order of its items.

        Microbatches are received in order, each once; the next one's receive is posted meanwhile.
        """
        transfer = self._rows.pop(microbatch)
        transfer.wait()
        self._post(microbatch + 1)
        assert transfer.into is not None
        return transfer.into.to(self.end.dtype)

    def answer(self, microbatch: int, gradient: Tensor) -> None:
        """Send the gradient (N, H) of the rows back, if the language model expects any."""
        if not self._expects_gradients:
            return
        end = self.end
        sends = self._plans[microbatch].sends(end.rank)
        if self._sent:  # the language model has waited for it
            self._sent.popleft().wait()
        self._sent.append(start_sending(end, microbatch, "gradients", sends, gradient.detach()))

    def finish(self) -> None:
        super().finish()
        assert not self._rows, "a microbatch's rows were never received"


class ColocatedOutput(SteppedEnd):
    """Both ends of a colocated generator, on every language rank. lane: the generator's."""

    def __init__(self, end: BridgeEnd, lane: int) -> None:
        super().__init__(end)
        self.lane = lane
        self._gradients: dict[int, Tensor] = {}  # received, until the backward of their token

    def exchange(self, microbatch: int, hidden: Tensor) -> Tensor:
        """Send rows of hidden states (T, H); return the rows (N, H) of this lane's items.

        Every rank of the language model calls it, also without rows. Autograd stops here: the
        gradient goes to `answer`.
        """
        plan, end = self._plans[microbatch], self.end
        share = hidden.detach().index_select(0, end.positions(plan))[end.own_rows(plan)]
        rows = end.empty(int(plan.held_rows[self.lane]))
        span = range(microbatch, microbatch + 1)
        sends, collects = plan.returns(end.rank), plan.collects(end.rank)
        start_exchanging(end, span, "rows", sends, share, collects, rows).wait()
        return rows.to(end.dtype)

    def answer(self, microbatch: int, gradient: Tensor, hidden: Tensor) -> Tensor:
        """Send the gradient (N, H) of this lane's rows back; returns a scalar token, zero.

        Every rank calls it. The backward of the token, which depends on ``hidden`` (T, H), gives
        the gradients of the rows that `exchange` took from it.
        """
        plan, end = self._plans[microbatch], self.end
        if not self._expects_gradients:
            return hidden.new_zeros(())
        arrived, sends = end.empty(end.bounds(plan)[-1]), plan.sends(end.rank)
        span = range(microbatch, microbatch + 1)
        start_exchanging(
            end, span, "gradients", sends, gradient.detach(), end.incoming(plan), arrived
        ).wait()
        if end.gather is not None:
            share_out(end, end.gather, microbatch, "gradients", arrived, end.row_shares(plan))
        rows = hidden.index_select(0, end.positions(plan))
        self._gradients[microbatch] = arrived.to(end.dtype)
        token = Crossing.apply(rows, self, microbatch)
        check_gradient_path(end, microbatch, token, True)
        return token

    def _forward(self, microbatch: int, rows: Tensor) -> Tensor:
        return rows.new_zeros(())

    def _backward(self, microbatch: int, token: Tensor) -> Tensor:
        return self._gradients.pop(microbatch)
