"""What an optimizer keeps for one parameter, whichever rank holds which part of it.

A plain optimizer keeps all of it on every data-parallel rank. A distributed one cuts a buffer
with all parameters into equal parts, one per rank, without regard to where a parameter ends; so a
rank holds a stretch of the flat parameter, perhaps an empty one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from mimo.engines.optimizer import kept, step_of
from mimo.engines.piece import MASTER


@dataclass(frozen=True)
class Share:
    """This rank's part of a parameter's optimizer state.

    start, end: the stretch of the flat parameter that is held here.
    tensors: by kind, each with end - start elements: Adam's moments, the fp32 master weight of a
        16-bit parameter, and its moving average if there is one. They are the optimizer's, so
        writing to them changes it.
    is_replicated: whether every data-parallel rank holds the same.
    step: (), how many updates Adam has done; None without moments.
    """

    start: int
    end: int
    tensors: dict[str, Tensor]
    is_replicated: bool
    step: Tensor | None = None


def _kept(optimizer: MegatronOptimizer, main: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    assert optimizer.optimizer is not None, "a module that trains has parameters"
    return kept(optimizer.optimizer, main), step_of(optimizer.optimizer, main)


def share_of(optimizer: MegatronOptimizer, param: Tensor) -> Share:
    """What this rank holds for ``param``; the optimizer's state must exist already."""
    if isinstance(optimizer, DistributedOptimizer):
        return _distributed_share(optimizer, param)
    main = getattr(param, "main_param", None)
    tensors, step = _kept(optimizer, param if main is None else main)
    if main is not None:
        tensors[MASTER] = main.detach()
    return Share(0, param.numel(), tensors, is_replicated=True, step=step)


def _distributed_share(optimizer: DistributedOptimizer, param: Tensor) -> Share:
    if param not in optimizer.model_param_group_index_map:
        return Share(0, 0, {}, is_replicated=False)
    group, order = optimizer.model_param_group_index_map[param]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    place = optimizer._get_model_param_range_map(cast("Any", param))["param"]
    tensors, step = _kept(optimizer, main)
    if param.dtype != torch.float32:
        tensors[MASTER] = main.detach()
    return Share(place.start, place.end, tensors, is_replicated=False, step=step)
