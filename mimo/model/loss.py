"""The loss that Megatron's schedules call on the last pipeline stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""What a forward step hands to Megatron: output -> (differentiated, tokens, logged)."""


def _masked_sum(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = (output * loss_mask).sum()
    # Megatron may scale what it differentiates in place, so the log is a copy.
    return total, loss_mask.sum().to(torch.int), total.detach().clone()


def masked_sum(loss_mask: Tensor) -> LossFunction:
    """Sum of per-token losses (B, S) under ``loss_mask`` (B, S): (sum, tokens, logged sum).

    In the dtype of the losses, fp32 or fp64. A sum, not a mean: the division by the global token
    count happens once, after the step.
    """
    return partial(_masked_sum, loss_mask)


def pass_token(token: Tensor) -> tuple[Tensor, Tensor, None]:
    """An encoder's loss function: its scalar token goes to the backward as it is."""
    return token, torch.zeros((), dtype=torch.int), None
