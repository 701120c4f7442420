"""The optimizer of one fsdp module, on this rank's parts of the parameters.

AdamW and SGD treat every element alone, so they work on plain local tensors: no DTensor, and no
collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from mimo.device import has_gpu
from mimo.engines.piece import MOMENTS, STEP

if TYPE_CHECKING:
    from mimo.engines.megatron.parallel import OptimizerSettings


def build_optimizer(
    params: Sequence[nn.Parameter], settings: OptimizerSettings, learning_rate: float
) -> torch.optim.Optimizer:
    """Matrices decay, vectors (norms, biases) don't.

    params: local parts, of as many dimensions as the whole.
    """
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate)
    return torch.optim.AdamW(
        groups,
        lr=learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        # One kernel for all parameters. On a CPU it would round otherwise than the default.
        fused=has_gpu(),
    )


def moments(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> Mapping[str, Tensor]:
    """What the optimizer keeps of a parameter, by kind, in its shape; made where there is none yet.

    The tensors are the optimizer's, so writing to them changes it.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return {}
    state = optimizer.state[param]
    if not state:
        # A fused update counts steps on the device.
        state[STEP] = torch.zeros((), device=param.device if has_gpu() else None)
        state |= {kind: torch.zeros_like(param) for kind in MOMENTS}
    return {kind: cast("Tensor", state[kind]).detach() for kind in MOMENTS}


def step_of(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> Tensor:
    """How many updates Adam has done of a parameter that has `moments`, (); its own memory."""
    return cast("Tensor", optimizer.state[param][STEP])
