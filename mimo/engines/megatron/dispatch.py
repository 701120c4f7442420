"""Send tokens to experts on other ranks and return the results, as autograd operations.

The ranks of a group of ep · etp ranks hold all experts together. A rank sends a token's row once to
every rank with a part of a chosen expert, and with each choice its weight and the row's number. The
receiver returns one row for each row received: the weighted sum of its experts' outputs. The sender
adds up the rows of a token. No row is padded or dropped. With etp > 1 receivers compute with parts
of an expert, and return parts of the sum.

Letters: n tokens that this rank sends, k experts of a token, E experts, G ranks of the group, m
rows sent and r rows received by this rank, q choices sent and c choices received, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Counts:
    """Rows, or choices, that this rank sends to and receives from each rank of a group."""

    sent: list[int]
    received: list[int]

    @property
    def back(self) -> Counts:
        """Those of the way back."""
        return Counts(self.received, self.sent)


@dataclass(frozen=True)
class Route:
    """The way of a rank's tokens to the experts of all ranks of a group.

    token: (m,) int64, the token that each row is a copy of, in the order of sending. rows: to and
    from each rank. choice: (q,) int64, token · k + place among the token's experts, in the order of
    sending. choices: to and from each rank. by_expert: (c,) int64, the order of received choices by
    expert. row: (c,) int64, the received row of each choice in that order. counts: (E / ep,) int64,
    received choices of each expert of this rank.
    """

    token: Tensor
    rows: Counts
    choice: Tensor
    choices: Counts
    by_expert: Tensor
    row: Tensor
    counts: Tensor

    @classmethod
    def of(cls, experts: Tensor, num_experts: int, group: dist.ProcessGroup, etp: int) -> Route:
        """Plan the way; all ranks of the group call it and tell each other what they will send.

        experts: (n, k) int64. On a device the host waits once.
        """
        ranks = group.size()
        each = num_experts * etp // ranks
        # Parts of an expert are experts of their own, on ranks that follow each other.
        parts = torch.arange(etp, device=experts.device)
        to = (experts // each * etp)[:, :, None] + parts
        chosen = (to * each + (experts % each)[:, :, None]).flatten(1)
        choice, loads = sort_choices(chosen, ranks * each)
        to = to.flatten(1)
        is_sent = to.new_zeros(len(to), ranks).scatter_(1, to, 1)
        # Of each rank: choices of its experts, then rows.
        leaving = torch.cat((loads.view(ranks, each), is_sent.sum(0)[:, None]), dim=1)
        singles = Counts([1] * ranks, [1] * ranks)
        arriving = _exchanged(leaving, singles, group)
        totals = torch.cat((leaving, arriving))
        host = torch.stack((totals[:, :-1].sum(1), totals[:, -1])).tolist()
        choices, rows = (Counts(count[:ranks], count[ranks:]) for count in host)
        token = torch.arange(len(to), device=to.device).repeat(ranks)
        token = token.repeat_interleave(is_sent.T.flatten(), output_size=sum(rows.sent))
        # The number of a choice's row in its message, then in all messages received.
        number = (is_sent.cumsum(0) - 1).gather(1, to).flatten().index_select(0, choice)
        number = _exchanged(number.to(torch.int32), choices, group)
        received, size = arriving[:, :-1], len(number)
        before = arriving[:, -1].cumsum(0) - arriving[:, -1]
        row = number + before.repeat_interleave(received.sum(1), output_size=size)
        expert = torch.arange(each, device=to.device).repeat(ranks)
        expert = expert.repeat_interleave(received.flatten(), output_size=size)
        by_expert = expert.argsort(stable=True)
        row, counts = row.index_select(0, by_expert), received.sum(0)
        return cls(token, rows, choice // etp, choices, by_expert, row, counts)


def sort_choices(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """experts (n, k) int64 -> choices by expert (n · k,), and those of each expert (E,), int64."""
    chosen = experts.flatten()
    # On a device `bincount` would let the host wait.
    loads = chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    return chosen.argsort(stable=True), loads


def exchange(rows: Tensor, counts: Counts, group: dist.ProcessGroup) -> Tensor:
    """rows (m, ...), those for the first rank first -> (r, ...); the backward returns gradients.

    All ranks of the group call it, and take part in the backward, even without rows.
    """
    return cast("Tensor", _Exchange.apply(rows, counts, group))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Counts, group: dist.ProcessGroup) -> Tensor:
        ctx.way = counts.back, group
        return _exchanged(rows, counts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradients[0], *ctx.way), None, None


def _exchanged(rows: Tensor, counts: Counts, group: dist.ProcessGroup) -> Tensor:
    result = rows.new_empty(sum(counts.received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), counts.received, counts.sent, group=group)
    return result
