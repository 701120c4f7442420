"""What an optimizer keeps for one parameter, whichever rank holds which part of it.

A plain optimizer keeps all of it on every data-parallel rank. A distributed one cuts a buffer
with all parameters into equal parts, one per rank, without regard to where a parameter ends; so a
rank holds a stretch of the flat parameter, perhaps an empty one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "fp32_param"


@dataclass(frozen=True)
class Share:
    """This rank's part of a parameter's optimizer state.

    param: the parameter. start, end: the stretch of the flat parameter that is held here.
    tensors: by kind, each with end - start elements: Adam's moments, and the fp32 master weight
        of a 16-bit parameter. They are the optimizer's, so writing to them changes it.
    """

    param: Tensor
    start: int
    end: int
    tensors: dict[str, Tensor] = field(default_factory=dict)


def _with_moments(optimizer: MegatronOptimizer, main: Tensor) -> dict[str, Tensor]:
    base = optimizer.optimizer
    assert base is not None, "a module that trains has parameters"
    return {kind: base.state[main][kind] for kind in _MOMENTS if kind in base.state[main]}


def share_of(optimizer: MegatronOptimizer, param: Tensor) -> Share:
    """What this rank holds for ``param``; the optimizer's state must exist already."""
    if isinstance(optimizer, DistributedOptimizer):
        return _distributed_share(optimizer, param)
    main = getattr(param, "main_param", None)
    tensors = _with_moments(optimizer, param if main is None else main)
    if main is not None:
        tensors[_MASTER] = main
    return Share(param, 0, param.numel(), {k: t.detach() for k, t in tensors.items()})


def _distributed_share(optimizer: DistributedOptimizer, param: Tensor) -> Share:
    if param not in optimizer.model_param_group_index_map:
        return Share(param, 0, 0)
    group, order = optimizer.model_param_group_index_map[param]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    place = optimizer._get_model_param_range_map(cast("Any", param))["param"]
    tensors = _with_moments(optimizer, main)
    if param.dtype != torch.float32:
        tensors[_MASTER] = main
    return Share(param, place.start, place.end, {k: t.detach() for k, t in tensors.items()})


def tensors_to_save(optimizer: MegatronOptimizer, share: Share) -> dict[str, Tensor]:
    """The whole state of a parameter by kind, in its shape; nothing on ranks that need not write.

    Every rank of the optimizer's data-parallel group calls it, for the same parameters in the
    same order: the first rank collects what a distributed optimizer's ranks hold and moves it to
    the CPU. So while saving, it holds the whole state of its part of the model.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        return share.tensors
    kinds = _kinds(share)
    # One exchange for all kinds; a stretch of zeros where another rank holds the numbers.
    flat = torch.zeros(
        len(kinds), share.param.numel(), dtype=torch.float32, device=share.param.device
    )
    for row, kind in zip(flat, kinds, strict=True):
        if kind in share.tensors:
            row[share.start : share.end] = share.tensors[kind]
    group = optimizer.data_parallel_group
    dist.reduce(flat, group=group, group_dst=0)
    if group.rank() != 0:
        return {}
    return {k: row.view(share.param.shape).cpu() for k, row in zip(kinds, flat, strict=True)}


def tensors_to_load(optimizer: MegatronOptimizer, share: Share) -> dict[str, Tensor]:
    """Memory for the whole state of a parameter by kind, in its shape; no collective."""
    if not isinstance(optimizer, DistributedOptimizer):
        return share.tensors
    return {kind: torch.empty(share.param.shape) for kind in _kinds(share)}


def _kinds(share: Share) -> list[str]:
    return [*_MOMENTS, *([_MASTER] if share.param.dtype != torch.float32 else [])]
