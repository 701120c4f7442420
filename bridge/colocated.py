"""The bridge where encoder and language model share their ranks.

The rows of a group of microbatches are exchanged together before the language model's schedule runs
on them, and their gradients together after it.

Letters: n rows of this rank's messages, N rows of this rank's encoder lane over a whole group, H
hidden.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bridge.flat import ItemRows, check_rows
from bridge.plan import BridgePlan, Exchange
from bridge.runs import Ints, ints, offsets
from bridge.transfer import BridgeEnd, SteppedEnd, share_out, start_exchanging
from bridge.waiting import BridgeError


def _merged(exchanges: Sequence[Exchange], starts: Ints) -> Exchange:
    """Merge the messages of several microbatches into one per peer, microbatch after microbatch.

    starts: where the rows of each microbatch begin among those of all.
    """
    peer = np.concatenate([np.repeat(ints(e.peers), ints(e.counts)) for e in exchanges])
    index = np.concatenate([e.index + start for e, start in zip(exchanges, starts, strict=True)])
    order = np.argsort(peer, kind="stable")
    peers, counts = np.unique(peer, return_counts=True)
    return Exchange(tuple(peers.tolist()), tuple(counts.tolist()), index[order])


class ColocatedBridge(SteppedEnd):
    """Both ends of a bridge on one rank; every rank of the two modules has one.

    end.gather: the language model's tensor-parallel group if all of its ranks need a lane's rows.
    encoder_gather: the encoder's, if several ranks hold the same rows. receives: whether this rank
    is on the link's stage of the language model.
    """

    def __init__(
        self, end: BridgeEnd, lane: int, receives: bool, encoder_gather: dist.ProcessGroup | None
    ) -> None:
        super().__init__(end)
        self.lane = lane
        self.receives = receives
        self.encoder_gather = encoder_gather
        self._leaves: dict[int, Tensor] = {}

    def deliver(self, microbatches: range, rows: ItemRows) -> None:
        """Exchange the rows (N, H) of this lane's items of ``microbatches``; all ranks call it.

        Under sequence parallelism each rank of the encoder gives its part. The received rows are
        leaves: `collect` takes their gradients, not autograd. Raises UnexpectedRows when the rows
        are not those of the plans.
        """
        if not self._expects_gradients:
            self._leaves.clear()  # no `collect` takes the previous group's
        plans = [self._plans[m] for m in microbatches]
        starts, _ = self._held(plans)
        check_rows(self.end, microbatches.start, plans, self.lane, rows)
        end = self.end
        sends = _merged([plan.sends(end.rank) for plan in plans], starts)
        # The rows of all sharers, microbatch by microbatch; this rank receives its share of them.
        sizes = ints([end.bounds(plan)[-1] for plan in plans])
        incoming = _merged([end.incoming(plan) for plan in plans], offsets(sizes)[:-1])
        values, arrived = rows.values.detach(), end.empty(int(sizes.sum()))
        start_exchanging(end, microbatches, "rows", sends, values, incoming, arrived).wait()
        if not self.receives:
            return
        for m, plan, part in zip(microbatches, plans, arrived.split(sizes.tolist()), strict=True):
            if end.gather is not None:
                share_out(end, end.gather, m, "rows", part, end.row_shares(plan))
            leaf = part.to(end.dtype)
            self._leaves[m] = leaf.requires_grad_(True) if self._expects_gradients else leaf

    def receive(self, microbatch: int) -> tuple[Tensor, Tensor]:
        """Return rows (n, H) in the model's dtype and their local positions (n,) int64.

        Only on the link's stage of the language model, after `deliver`.
        """
        return self._leaves[microbatch], self.end.positions(self._plans[microbatch])

    def collect(self, microbatches: range) -> Tensor:
        """Exchange gradients back and return those of this lane's rows (N, H).

        All ranks call it, after the language model's backward. Every tensor-parallel replica of
        the encoder gets the complete gradient.
        """
        plans, end = [self._plans[m] for m in microbatches], self.end
        starts, num_rows = self._held(plans)
        firsts = offsets(ints([plan.receives(end.rank).num_rows for plan in plans]))[:-1]
        returns = _merged([plan.returns(end.rank) for plan in plans], firsts)
        collects = _merged([plan.collects(end.rank) for plan in plans], starts)
        received = torch.zeros(0, end.hidden_size, device=end.device)
        if self.receives:
            received = torch.cat([self._received_gradient(m) for m in microbatches])
        gradient = end.empty(num_rows)
        kind = "gradients"
        start_exchanging(end, microbatches, kind, returns, received, collects, gradient).wait()
        replicas = self.encoder_gather
        if replicas is None:  # all other rows are padding
            gradient[collects.num_rows :].zero_()
        else:
            by_rank = [
                [plan.collects(rank) for plan in plans]
                for rank in dist.get_process_group_ranks(replicas)
            ]
            shares = [_merged(held, starts).merged_places for held in by_rank]
            share_out(end, replicas, microbatches.start, kind, gradient, shares)
        return gradient.to(end.dtype)

    def finish(self) -> None:
        self._leaves.clear()

    def _held(self, plans: Sequence[BridgePlan]) -> tuple[Ints, int]:
        """Where each microbatch's rows begin among this rank's encoded rows, and their number."""
        held = ints([plan.held_rows[self.lane] for plan in plans])
        if plans[0].source_parts > 1:  # cut together: each plan counts from the group's start
            return np.zeros_like(held), int(held[0])
        return offsets(held)[:-1], int(held.sum())

    def _received_gradient(self, microbatch: int) -> Tensor:
        """The gradient of the rows that this rank received itself, not of gathered copies."""
        gradient = self._leaves.pop(microbatch).grad
        if gradient is None:
            raise BridgeError(
                f"bridge {self.end.name}, microbatch {microbatch}: the plan expects gradients, but "
                f"no backward reached the rows",
                microbatch,
            )
        return gradient[self.end.own_rows(self._plans[microbatch])]
