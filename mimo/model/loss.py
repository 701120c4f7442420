"""The loss that Megatron's schedules call on the last pipeline stage."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_losses(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (n,) of all tokens that have one -> (sum, n, logged sum); n may be 0.

    In the dtype of the losses, fp32 or fp64. A sum, not a mean: the division by the global token
    count happens once, after the step.
    """
    total = losses.sum()
    count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)
    # Megatron may scale what it differentiates in place, so the log is a copy.
    return total, count, total.detach().clone()


def pass_token(token: Tensor) -> tuple[Tensor, Tensor, None]:
    """An encoder's loss function: its scalar token goes to the backward as it is."""
    return token, torch.zeros((), dtype=torch.int), None
