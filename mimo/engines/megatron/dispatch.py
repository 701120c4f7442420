"""Send tokens to experts on other ranks and return the results, as autograd operations.

The ep · etp ranks of a group hold all experts together. A rank sends a token's row once to every
rank with a part of a chosen expert, and for each choice its weight and the number of the row. The
receiver returns one row for each row received: the weighted sum of its experts' outputs. The sender
adds up the returned rows of a token. No row is padded or dropped. With etp > 1 receivers hold parts
of experts, and return partial sums.

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
        """The counts of the way back."""
        return Counts(self.received, self.sent)


@dataclass(frozen=True)
class Route:
    """The way of a rank's tokens to the experts of all ranks of a group.

    token: (m,) int64, the token of each row, in the order of sending. rows: counts of rows. choice:
    (q,) int64, token · k + place among the token's experts, in the order of sending. choices:
    counts of choices. by_expert: (c,) int64, the order of received choices by expert. row: (c,)
    int64, the received row of each choice in that order. counts: (E / ep,) int64, received choices
    of each expert of this rank.
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
        """Plan the way; all ranks of the group call it and exchange their counts.

        experts: (n, k) int64. On a device the host waits once.
        """
        ranks = group.size()
        each = num_experts * etp // ranks
        # Each part of an expert counts as an expert; the parts lie on consecutive ranks.
        parts = torch.arange(etp, device=experts.device)
        target = (experts // each * etp)[:, :, None] + parts
        chosen = (target * each + (experts % each)[:, :, None]).flatten(1)
        choice, loads = sort_choices(chosen, ranks * each)
        target = target.flatten(1)
        is_sent = target.new_zeros(len(target), ranks).scatter_(1, target, 1)
        # For each rank: choices of each of its experts, then rows.
        leaving = torch.cat((loads.view(ranks, each), is_sent.sum(0)[:, None]), dim=1)
        singles = Counts([1] * ranks, [1] * ranks)
        arriving = _exchanged(leaving, singles, group)
        totals = torch.cat((leaving, arriving))
        host = torch.stack((totals[:, :-1].sum(1), totals[:, -1])).tolist()
        choices, rows = (Counts(count[:ranks], count[ranks:]) for count in host)
        token = torch.arange(len(target), device=target.device).repeat(ranks)
        token = token.repeat_interleave(is_sent.T.flatten(), output_size=sum(rows.sent))
        # The number of a choice's row in its message; below, among all received rows.
        number = (is_sent.cumsum(0) - 1).gather(1, target).flatten().index_select(0, choice)
        number = _exchanged(number.to(torch.int32), choices, group)
        received, size = arriving[:, :-1], len(number)
        before = arriving[:, -1].cumsum(0) - arriving[:, -1]
        row = number + before.repeat_interleave(received.sum(1), output_size=size)
        expert = torch.arange(each, device=target.device).repeat(ranks)
        expert = expert.repeat_interleave(received.flatten(), output_size=size)
        by_expert = expert.argsort(stable=True)
        row, counts = row.index_select(0, by_expert), received.sum(0)
        return cls(token, rows, choice // etp, choices, by_expert, row, counts)


def sort_choices(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """experts (n, k) int64 -> order of choices by expert (n · k,), choices per expert (E,)."""
    chosen = experts.flatten()
    # On a device `bincount` would make the host wait.
    loads = chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    return chosen.argsort(stable=True), loads


def exchange(rows: Tensor, counts: Counts, group: dist.ProcessGroup) -> Tensor:
    """rows (m, ...) in the order of target ranks -> (r, ...); the backward returns gradients.

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
