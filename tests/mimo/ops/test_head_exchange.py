"""Exchange of heads for tokens: equal to one rank's tokens and heads, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.conftest import RunRanks

LENGTHS, HEADS, NUMBERS = (8, 4, 12), 4, 3


def lane() -> Tensor:
    """(T, K, X), with other numbers everywhere."""
    return torch.arange(sum(LENGTHS) * HEADS * NUMBERS).view(-1, HEADS, NUMBERS).double()


def exchange(rank: int) -> dict[str, Tensor]:
    """What a rank of two gets of `lane`, back again, and the gradient of its share."""
    import torch.distributed as dist

    from mimo.ops.head_exchange import heads_to_share, share_to_heads
    from mimo.ops.segments import zigzag_indices, zigzag_order

    group, order = dist.group.WORLD, zigzag_order(LENGTHS, 2)
    assert group is not None
    share = lane()[zigzag_indices(LENGTHS, 2, rank)].requires_grad_()
    heads = share_to_heads(share, order, group)
    back = heads_to_share(heads, order, group)
    (back * lane()[zigzag_indices(LENGTHS, 2, rank)]).sum().backward()
    assert share.grad is not None
    return {
        "share": share.detach(),
        "heads": heads.detach(),
        "back": back.detach(),
        "grad": share.grad,
    }


def test_a_rank_gets_all_tokens_of_its_heads_and_its_share_back(run_ranks: RunRanks) -> None:
    for rank, results in enumerate(run_ranks(exchange, 2)):
        assert torch.equal(results["heads"], lane().chunk(2, dim=1)[rank])
        assert torch.equal(results["back"], results["share"])
        assert torch.equal(results["grad"], results["share"]), "the gradient goes the same way back"
