"""The bridge where encoder and language model share their ranks.

The rows of a whole group of microbatches are exchanged at once, before the language model's
schedule runs on them, and their gradients at once after it. Both directions are one batch of
sends and receives: as separate calls, ordered transports could wait for each other.

Letters: n rows of this rank's messages, N rows of this rank's encoder lane over a whole group,
H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bridge.communicator import BridgeEnd, BridgeError
from bridge.plan import BridgePlan, Exchange


@dataclass(frozen=True)
class _Merged:
    """One rank's messages of several microbatches: peer after peer, then microbatch.

    order: (n,) where each message row stands in the microbatches' exchanges laid end to end.
    """

    peers: tuple[int, ...]
    counts: tuple[int, ...]
    order: Tensor

    @classmethod
    def of(cls, exchanges: Sequence[Exchange], device: torch.device) -> _Merged:
        peer = np.concatenate([np.repeat(e.peers, e.counts) for e in exchanges]).astype(np.int64)
        order = np.argsort(peer, kind="stable")
        peers, counts = np.unique(peer, return_counts=True)
        return cls(
            tuple(peers.tolist()), tuple(counts.tolist()), torch.from_numpy(order).to(device)
        )


class ColocatedBridge:
    """Both ends of a bridge on one rank; every rank of the two modules has one.

    end.gather: the language model's tensor-parallel group if all of its ranks need a lane's
    rows. encoder_gather: the encoder's tensor-parallel group if it has several ranks.
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

        The rows become leaves: their way back is `collect`, not autograd.
        Raises ValueError when the rows are not as many as the plan expects.
        """
        plans = [self._plans[m] for m in microbatches]
        expected = sum(plan.source_rows[self.lane] for plan in plans)
        if rows.shape[0] != expected:
            raise ValueError(
                f"bridge {self.end.name}, microbatches {microbatches.start} to "
                f"{microbatches.stop - 1}: the encoder produced {rows.shape[0]} rows, the plan "
                f"needs {expected}"
            )
        sends, receives = self._merged(plans)
        outgoing = rows.detach()[self._source_index(plans)][sends.order]
        received = self._exchange(self.end.forward, sends, receives, outgoing, "rows")
        if not self.receives:
            return
        mine = torch.empty_like(received)
        mine[receives.order] = received
        counts = [plan.receives(self.end.rank).num_rows for plan in plans]
        for m, part in zip(microbatches, mine.split(counts), strict=True):
            part = part if self.end.gather is None else self._gather(self._plans[m], part)
            leaf = part.to(self.end.dtype)
            self._leaves[m] = leaf.requires_grad_(True) if self._expects_gradients else leaf

    def receive(self, microbatch: int) -> tuple[Tensor, Tensor]:
        """Rows (n, H) in the model's dtype and their local positions (n,) int64.

        On the language model's first stage, after `deliver`.
        """
        plan = self._plans[microbatch]
        positions = [
            torch.from_numpy(plan.receives(rank).index).to(self.end.device)
            for rank in self._sharers()
        ]
        return self._leaves[microbatch], torch.cat(positions)

    def collect(self, microbatches: range) -> Tensor:
        """Exchange the gradients of ``microbatches`` back: (N, H) of this lane's rows.

        All ranks call it, after the language model's backward. Every tensor-parallel replica of
        the encoder gets the complete gradient.
        """
        plans = [self._plans[m] for m in microbatches]
        sends, receives = self._merged(plans)
        outgoing = torch.zeros(0, self.end.hidden_size, device=self.end.device)
        if self.receives:
            parts = [self._own_share(m) for m in microbatches]
            outgoing = torch.cat(parts)[receives.order]
        received = self._exchange(self.end.backward, receives, sends, outgoing, "gradients")
        index = self._source_index(plans)[sends.order]
        rows = sum(plan.source_rows[self.lane] for plan in plans)
        gradient = received.new_zeros(rows, self.end.hidden_size)
        gradient[index] = received
        if self.encoder_gather is not None and rows > 0:
            # Shares are disjoint and the rest is zero, so the sum puts them together exactly.
            dist.all_reduce(gradient, group=self.encoder_gather)
        return gradient.to(self.end.dtype)

    def finish(self) -> None:
        """Forget the rows of the step."""
        self._leaves.clear()

    def _merged(self, plans: Sequence[BridgePlan]) -> tuple[_Merged, _Merged]:
        rank, device = self.end.rank, self.end.device
        return (
            _Merged.of([plan.sends(rank) for plan in plans], device),
            _Merged.of([plan.receives(rank) for plan in plans], device),
        )

    def _source_index(self, plans: Sequence[BridgePlan]) -> Tensor:
        """Rows that this rank sends, in the lane's rows of all microbatches laid end to end."""
        start, parts = 0, []
        for plan in plans:
            parts.append(plan.sends(self.end.rank).index + start)
            start += plan.source_rows[self.lane]
        return torch.from_numpy(np.concatenate(parts)).to(self.end.device)

    def _sharers(self) -> list[int]:
        """Ranks whose received rows make up this rank's rows, in order."""
        if self.end.gather is None:
            return [self.end.rank]
        return dist.get_process_group_ranks(self.end.gather)

    def _gather(self, plan: BridgePlan, mine: Tensor) -> Tensor:
        """All ranks' shares (n_t, H) -> the lane's rows; shares differ by at most one row."""
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

    def _own_share(self, microbatch: int) -> Tensor:
        """The gradient of the rows that this rank itself received, never of a gathered copy."""
        leaf = self._leaves.pop(microbatch)
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        plan, sharers = self._plans[microbatch], self._sharers()
        before = sharers[: sharers.index(self.end.rank)]
        start = sum(plan.receives(rank).num_rows for rank in before)
        return gradient[start : start + plan.receives(self.end.rank).num_rows]

    def _exchange(
        self,
        group: dist.ProcessGroup,
        sends: _Merged,
        receives: _Merged,
        outgoing: Tensor,
        what: str,
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
        try:
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()
        except RuntimeError as error:
            waiting = {peer: part.shape[0] for peer, part in into.items()}
            raise BridgeError(
                f"bridge {self.end.name}, {what}: waited for rows of peer ranks {waiting}: {error}"
            ) from error
        return incoming
