"""The optimizer of one module in either engine: torch's, on the tensors that this rank updates.

AdamW and SGD treat every element alone, so they work on plain tensors: whole parameters, a rank's
shares of them, or master copies of 16-bit ones. No function here is a collective.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from mimo.engines.contract import EMA, MOMENTS, STEP

_SLICE_BYTES = 1 << 26


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW ("adam") or plain SGD ("sgd"). Clipping happens elsewhere: its norm is global.

    distributed: with Adam in fp32 or bf16, every data-parallel rank keeps and updates only its
        share of the optimizer's state (ZeRO stage 1, Rajbhandari et al. 2020).
    ema_decay: share of the moving average of the weights that stays at each update; None for none.
    rate_factors: by ending of a parameter's name, the factor of its learning rate.
    """

    name: str
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    distributed: bool = False
    ema_decay: float | None = None
    rate_factors: Mapping[str, float] = field(default_factory=dict)

    def factor_of(self, name: str) -> float:
        factors = self.rate_factors.items()
        return next((factor for ending, factor in factors if name.endswith(ending)), 1.0)


def torch_optimizer(
    params: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings, learning_rate: float
) -> torch.optim.Optimizer:
    """Return torch's optimizer. Weight decay acts on matrices, not on vectors (norms, biases).

    params: with their names, and as many dimensions as the whole parameters.
    """
    by_group: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, param in params:
        by_group.setdefault((param.dim() <= 1, settings.factor_of(name)), []).append(param)
    groups = [
        {
            "params": by_group[is_vector, factor],
            "weight_decay": 0.0 if is_vector else settings.weight_decay,
            "rate_factor": factor,
        }
        for is_vector, factor in sorted(by_group)
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate)
    return torch.optim.AdamW(
        groups,
        lr=learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,  # one kernel; on a CPU gradients must lie in memory as the weights do
    )


def fill_state(optimizer: torch.optim.Optimizer, config: object = None) -> None:
    """Create the state that Adam's first update would create, where there is none yet.

    config: Megatron's, unused; its optimizers call this function themselves.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return
    for param in _params(optimizer):
        state = optimizer.state[param]
        if STEP not in state:
            state[STEP] = torch.zeros((), device=param.device)  # as a fused update needs it
            state |= {kind: torch.zeros_like(param) for kind in MOMENTS}


def state_tensors(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """Return by kind the optimizer's memory for a tensor that it updates, in the tensor's shape."""
    state = optimizer.state[param]
    return {kind: state[kind].detach() for kind in (*MOMENTS, EMA) if kind in state}


def step_of(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor | None:
    """Return the number () of Adam's updates of a tensor, in Adam's memory; None without Adam."""
    return optimizer.state[param].get(STEP)


def start_average(optimizer: torch.optim.Optimizer) -> None:
    """Start the moving average of the weights with their present values."""
    fill_state(optimizer)  # torch fills only empty states
    for param in _params(optimizer):
        weights = param.detach()
        wide = torch.promote_types(weights.dtype, torch.float32)
        optimizer.state[param][EMA] = weights.to(wide, copy=True)


def restart_average(optimizer: torch.optim.Optimizer) -> None:
    """Restart the moving average, if there is one, with weights that were just loaded."""
    if any(EMA in state for state in optimizer.state.values()):
        start_average(optimizer)


def update_weights(
    optimizer: torch.optim.Optimizer,
    update: Callable[[], object],
    learning_rate: float,
    ema_decay: float | None,
    measured: Collection[int] | None,
) -> Tensor | float:
    """Update the weights by ``update``, which calls the optimizer's `step`, and their average.

    The average becomes decay · average + (1 - decay) · weights.
    measured: ids of the tensors whose change this rank measures; None for a plain update.
    Returns the squared norm of that change, () fp64 on the device, without a wait. Copies are
    compared, so rounding counts; tensors are updated slice by slice, with the same result.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate_factor"]
    groups, plain_step, squares = optimizer.param_groups, optimizer.step, list[Tensor]()

    def measured_step() -> None:
        for group in groups:
            for part in _slices(group["params"]):
                optimizer.param_groups = [group | {"params": part}]
                after = [p.detach() for p in part if id(p) in (measured or ()) and p.numel()]
                change = [param.clone() for param in after]
                plain_step()
                if change:
                    cast("Any", torch)._foreach_sub_(change, after)
                    squares.append(squared_norm(change))
        optimizer.param_groups = groups

    if measured is not None:
        cast("Any", optimizer).step = measured_step
    update()
    vars(optimizer).pop("step", None)
    params = _params(optimizer)
    if ema_decay is not None and params:
        averages = [optimizer.state[param][EMA] for param in params]
        cast("Any", torch)._foreach_lerp_(averages, [p.detach() for p in params], 1.0 - ema_decay)
    return torch.stack(squares).sum() if squares else 0.0


def _slices(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut a list so that copies of a slice's tensors need little memory."""
    part, size = list[Tensor](), 0
    for param in params:
        part.append(param)
        size += param.numel() * param.element_size()
        if size >= _SLICE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared norm () fp64 of all tensors; each tensor's norm is in its own dtype."""
    norms: Sequence[Tensor] = cast("Any", torch)._foreach_norm(tensors)
    return torch.stack(list(norms)).double().square().sum()


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
