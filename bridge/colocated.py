"""The bridge where encoder and language model share their ranks.

The rows of a whole group of microbatches are exchanged at once, before the language model's
schedule runs on them, and their gradients at once after it. Both directions are one batch of
sends and receives: as separate calls, ordered transports could wait for each other.

Letters: n rows of this rank's messages, N rows of this rank's encoder lane over a whole group,
H hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bridge.plan import BridgePlan, Exchange
from bridge.runs import ints, offsets
from bridge.transfer import BridgeEnd, share_out
from bridge.waiting import BridgeError, Message, UnexpectedRows


@dataclass(frozen=True)
class _Merged:
    """One rank's messages of several microbatches: peer after peer, then microbatch.

    order: (n,) where each message row stands in the microbatches' exchanges laid end to end.
    index: (n,) the exchanges' own indices, end to end, each shifted by its microbatch's start.
    """

    peers: tuple[int, ...]
    counts: tuple[int, ...]
    order: Tensor
    index: Tensor

    @classmethod
    def of(
        cls, exchanges: Sequence[Exchange], starts: Sequence[int], device: torch.device
    ) -> _Merged:
        peer = np.concatenate([np.repeat(e.peers, e.counts) for e in exchanges]).astype(np.int64)
        index = np.concatenate(
            [e.index + start for e, start in zip(exchanges, starts, strict=True)]
        )
        peers, counts = np.unique(peer, return_counts=True)
        return cls(
            tuple(peers.tolist()),
            tuple(counts.tolist()),
            torch.from_numpy(np.argsort(peer, kind="stable")).to(device),
            torch.from_numpy(index).to(device),
        )


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]


class ColocatedBridge:
    """Both ends of a bridge on one rank; every rank of the two modules has one.

    end.gather: the language model's tensor-parallel group if all of its ranks need a lane's
    rows. encoder_gather: the encoder's tensor-parallel group if it has several ranks
    that hold the same rows.
    receives: whether this rank is on the language model's first stage.
    """

    def __init__(
        self, end: BridgeEnd, lane: int, receives: bool, encoder_gather: dist.ProcessGroup | None
    ) -> None:
        self.end = end
        self.lane = lane
        self.receives = receives
        self.encoder_gather = encoder_gather
        self._plans: Sequence[BridgePlan] = ()
        self._expects_gradients = False
        self._leaves: dict[int, Tensor] = {}

    def begin(self, plans: Sequence[BridgePlan], forward_only: bool = False) -> None:
        """Start a step of ``len(plans)`` microbatches."""
        assert not self._leaves, "the previous step has not been finished"
        self._plans = plans
        self._expects_gradients = self.end.trainable and not forward_only

    def deliver(self, microbatches: range, rows: Tensor) -> None:
        """Exchange the rows (N, H) of this lane's items of ``microbatches``; all ranks call it.

        Under sequence parallelism each rank of the encoder gives its part of them. The rows
        become leaves: their way back is `collect`, not autograd.
        Raises UnexpectedRows when the rows are not as many, or not as wide, as expected.
        """
        if not self._expects_gradients:
            self._leaves.clear()  # no `collect` takes those of the group before
        plans = [self._plans[m] for m in microbatches]
        starts, num_rows = self._held(plans)
        expected = (num_rows, self.end.hidden_size)
        if rows.shape != expected:
            raise UnexpectedRows(
                f"bridge {self.end.name}, microbatches {microbatches.start} to "
                f"{microbatches.stop - 1}: the encoder produced rows of shape {tuple(rows.shape)}, "
                f"the plan and the language model need {expected}",
                microbatches.start,
            )
        rank, device = self.end.rank, self.end.device
        sends = _Merged.of([plan.sends(rank) for plan in plans], starts, device)
        counts = [plan.receives(rank).num_rows for plan in plans]
        receives = _Merged.of([plan.receives(rank) for plan in plans], [0] * len(plans), device)
        outgoing = rows.detach()[sends.index][sends.order]
        arrived = self._exchange(self.end.forward, sends, receives, outgoing, "rows", microbatches)
        if not self.receives:
            return
        mine = torch.empty_like(arrived)
        mine[receives.order] = arrived
        for m, part in zip(microbatches, mine.split(counts), strict=True):
            leaf = self._whole_lane(m, part).to(self.end.dtype)
            self._leaves[m] = leaf.requires_grad_(True) if self._expects_gradients else leaf

    def receive(self, microbatch: int) -> tuple[Tensor, Tensor]:
        """Rows (n, H) in the model's dtype and their local positions (n,) int64.

        On the language model's first stage, after `deliver`.
        """
        plan = self._plans[microbatch]
        positions = [
            torch.from_numpy(plan.receives(rank).index).to(self.end.device)
            for rank in self.end.sharers()
        ]
        return self._leaves[microbatch], torch.cat(positions)

    def collect(self, microbatches: range) -> Tensor:
        """Exchange the gradients of ``microbatches`` back: (N, H) of this lane's rows.

        All ranks call it, after the language model's backward. Every tensor-parallel replica of
        the encoder gets the complete gradient.
        """
        plans = [self._plans[m] for m in microbatches]
        rank, device = self.end.rank, self.end.device
        starts = _starts([plan.receives(rank).num_rows for plan in plans])
        returns = _Merged.of([plan.returns(rank) for plan in plans], starts, device)
        firsts, held = self._held(plans)
        collects = _Merged.of([plan.collects(rank) for plan in plans], firsts, device)
        outgoing = torch.zeros(0, self.end.hidden_size, device=device)
        if self.receives:
            outgoing = torch.cat([self._own_gradient(m) for m in microbatches])
            outgoing = outgoing[returns.index][returns.order]
        arrived = self._exchange(
            self.end.backward, returns, collects, outgoing, "gradients", microbatches
        )
        gradient = arrived.new_empty(held, self.end.hidden_size)
        gradient[collects.index[collects.order]] = arrived
        if self.encoder_gather is not None:
            shares = [
                np.concatenate(
                    [plan.collects(r).index + s for plan, s in zip(plans, firsts, strict=True)]
                )
                for r in dist.get_process_group_ranks(self.encoder_gather)
            ]
            share_out(
                self.end, self.encoder_gather, microbatches.start, "gradients", gradient, shares
            )
        else:
            gradient[collects.index.numel() :].zero_()  # padding stands behind all rows
        return gradient.to(self.end.dtype)

    def finish(self) -> None:
        """Forget the rows of the step."""
        self._leaves.clear()

    def _held(self, plans: Sequence[BridgePlan]) -> tuple[list[int], int]:
        """Where each microbatch's rows begin among this rank's encoded rows, and their number."""
        held = [plan.held_rows[self.lane] for plan in plans]
        if plans[0].source_parts > 1:  # cut as one sequence: the plans count from its start
            return [0] * len(plans), held[0]
        return _starts(held), sum(held)

    def _whole_lane(self, microbatch: int, mine: Tensor) -> Tensor:
        """This rank's rows, or with `end.gather` those of all sharers: (n, H)."""
        if self.end.gather is None:
            return mine
        bounds = offsets(ints(self._shares(microbatch)))
        start = int(bounds[self.end.sharers().index(self.end.rank)])
        rows = mine.new_empty(int(bounds[-1]), self.end.hidden_size)
        rows[start : start + mine.shape[0]] = mine
        shares = np.split(np.arange(bounds[-1]), bounds[1:-1])
        share_out(self.end, self.end.gather, microbatch, "rows", rows, shares)
        return rows

    def _shares(self, microbatch: int) -> list[int]:
        plan = self._plans[microbatch]
        return [plan.receives(rank).num_rows for rank in self.end.sharers()]

    def _own_gradient(self, microbatch: int) -> Tensor:
        """The gradient of the rows that this rank itself received, never of a gathered copy."""
        gradient = self._leaves.pop(microbatch).grad
        if gradient is None:
            raise BridgeError(
                f"bridge {self.end.name}, microbatch {microbatch}: the plan expects gradients, but "
                f"no backward reached the rows",
                microbatch,
            )
        shares, mine = self._shares(microbatch), self.end.sharers().index(self.end.rank)
        return gradient[sum(shares[:mine]) : sum(shares[: mine + 1])]

    def _exchange(
        self,
        group: dist.ProcessGroup,
        sends: _Merged,
        receives: _Merged,
        outgoing: Tensor,
        what: str,
        microbatches: range,
    ) -> Tensor:
        """Send ``outgoing`` (n, H) as ``sends`` says and return what ``receives`` expects."""
        outgoing = outgoing.to(self.end.wire_dtype).contiguous()
        incoming = outgoing.new_empty(sum(receives.counts), self.end.hidden_size)
        out = dict(zip(sends.peers, outgoing.split(list(sends.counts)), strict=True))
        into = dict(zip(receives.peers, incoming.split(list(receives.counts)), strict=True))
        if self.end.rank in out:
            into.pop(self.end.rank).copy_(out.pop(self.end.rank))
        operations = [dist.P2POp(dist.irecv, part, peer, group) for peer, part in into.items()]
        operations += [dist.P2POp(dist.isend, part, peer, group) for peer, part in out.items()]
        works = dist.batch_isend_irecv(operations) if operations else []
        works = works * len(operations) if len(works) == 1 else works
        messages = [
            Message(work, operation.peer, operation.tensor.shape[0], operation.op is dist.irecv)
            for work, operation in zip(works, operations, strict=True)
        ]
        span = f"microbatches {microbatches.start} to {microbatches.stop - 1}"
        text = f"bridge {self.end.name} (colocated): {what} of {span}"
        self.end.wait(messages, text, microbatches.start)
        return incoming
