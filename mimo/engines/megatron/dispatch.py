"""Send tokens to experts on other ranks and return the results, as autograd operations.

The ranks of a group of ep · etp ranks hold all experts together. Each rank sends its tokens, a row
for each chosen expert, to every rank with a part of that expert. No row is padded or dropped. With
etp > 1 receivers compute with parts of an expert, and the sender adds up their outputs.

Letters: n tokens that this rank sends, k experts of a token, E experts, G ranks of the group, m
rows sent and r rows received by this rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """The way of a rank's tokens to the experts of all ranks of a group.

    token: (m,) int64, the token that each row is a copy of, in the order of sending. places:
    (n, k · etp) int64, the rows of each token, for each of its experts in turn. sent, received:
    rows to and from each rank. by_expert: (r,) int64, the order of received rows by expert; None
    if they are in order. counts: (E / ep,) int64, received rows of each expert of this rank.
    """

    token: Tensor
    places: Tensor
    sent: list[int]
    received: list[int]
    by_expert: Tensor | None
    counts: Tensor

    @classmethod
    def of(cls, experts: Tensor, num_experts: int, group: dist.ProcessGroup, etp: int) -> Route:
        """Plan the way; all ranks of the group call it and exchange their counts.

        experts: (n, k) int64. On a device the host waits once, unless the rank has all experts.
        """
        top_k, chosen = experts.shape[1], experts.flatten()
        choices, ones = chosen.argsort(stable=True), torch.ones_like(chosen)
        # On a device `bincount` would let the host wait.
        loads = chosen.new_zeros(num_experts).scatter_add_(0, chosen, ones)
        if group.size() == 1:
            places = choices.argsort().view(-1, top_k)
            rows = [len(choices)]
            return cls(choices // top_k, places, rows, rows, None, loads)
        ranks, each = group.size(), num_experts * etp // group.size()
        table = loads.new_empty(ranks * num_experts)
        dist.all_gather_into_tensor(table, loads, group=group)
        # Of each sender and expert; ranks with parts of the same experts follow each other.
        table = table.view(ranks, num_experts)
        first = group.rank() // etp * each
        arriving = table[:, first : first + each]
        host = torch.cat((table[group.rank()].view(-1, each).sum(1), arriving.sum(1))).tolist()
        to_parts, received = host[: ranks // etp], host[ranks // etp :]
        if etp > 1:
            choices = torch.cat([part for p in choices.split(to_parts) for part in [p] * etp])
        expert = torch.arange(each, device=table.device).repeat(ranks)
        expert = expert.repeat_interleave(arriving.flatten(), output_size=sum(received))
        return cls(
            token=choices // top_k,
            places=choices.argsort(stable=True).view(-1, top_k * etp),
            sent=[count for count in to_parts for _ in range(etp)],
            received=received,
            by_expert=expert.argsort(stable=True),
            counts=arriving.sum(0),
        )


def exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """rows (m, H), those for the first rank first -> (r, H); the backward returns gradients.

    sent, received: rows to and from each rank. All ranks of the group call it, and take part in the
    backward, even without rows.
    """
    return cast("Tensor", _Exchange.apply(rows, list(sent), list(received), group))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way = received, sent, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradients[0], *ctx.way), None, None, None


def _exchanged(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
