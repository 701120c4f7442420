"""FSDP2 around a wrapper module, and which part of a parameter a rank has.

One `fully_shard` for each unit and each end, and one for the root, whose hooks cover the last norm
and, where one matrix is both, embedding and head. Gradients are summed, never averaged; the one
division by the global token count happens in `FsdpModule.finish_gradients`.

Letters: R rows, C columns of a whole parameter, seen as a matrix of its first dimension by all
others; a vector has one column.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from mimo.engines.fsdp.context import DP_REPLICATE, DP_SHARD, TP, FsdpContext, Wrapper


def stored_dtype(ctx: FsdpContext) -> torch.dtype:
    """In which weights are built and kept: fp32 at least; the plain module's is that of compute."""
    return ctx.dtype if ctx.mesh is None else torch.promote_types(ctx.dtype, torch.float32)


def shard(module: nn.Module, ctx: FsdpContext) -> None:
    """Cut the parameters over the data-parallel ranks, in place; nothing without a mesh.

    module: a `Wrapper`, on meta or not, after tensor parallelism, in `stored_dtype`. With bf16,
    weights are gathered and computed in it, while gradients are accumulated and summed in fp32.
    Inputs are not cast: the wrapper hands on what its layers compute in. Every rank of the mesh
    calls it; no collective.
    """
    if ctx.mesh is None:
        return
    wrong = [n for n, p in module.named_parameters() if p.dtype != stored_dtype(ctx)]
    assert not wrong, f"{wrong[0]} is not {stored_dtype(ctx)}"
    axes = (DP_REPLICATE, DP_SHARD) if ctx.mesh[DP_REPLICATE].size() > 1 else (DP_SHARD,)
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if ctx.dtype != stored_dtype(ctx):
        policy = MixedPrecisionPolicy(ctx.dtype, stored_dtype(ctx), cast_forward_inputs=False)
    wrapper = cast("Wrapper", module)
    units = [*wrapper.ends[:1], *wrapper.units, *wrapper.ends[1:]]
    for unit in (*units, module):
        # The backward begins with the last two, and wants their weights at once.
        at_end = unit is module or unit in wrapper.ends[1:]
        fully_shard(
            unit,
            mesh=ctx.mesh[axes],
            mp_policy=policy,
            reshard_after_forward=ctx.reshard_after_forward and not at_end,
        )
    for embedding in wrapper.ends[:1]:
        cast("FSDPModule", embedding).set_unshard_in_backward(False)  # it needs no weights there
    for part in _parts(module):
        # Both are needed: a factor alone asks for an operation that gloo lacks.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    # Every rank reduces the same parameters, whatever its microbatches made use of.
    cast("FSDPModule", module).set_reduce_scatter_unused_params(True)
    order = [cast("FSDPModule", part) for part in (module, *units)]
    for one, after in itertools.pairwise(order):
        one.set_modules_to_forward_prefetch([after])
    for one, before in itertools.pairwise([order[0], *reversed(order[1:])]):
        one.set_modules_to_backward_prefetch([before])


def reduce_gradients(module: nn.Module, *, now: bool) -> None:
    """Whether the next backward reduces what has been accumulated, and gives up gathered weights.

    Else gradients stay whole on every rank, and the weights that the backward gathered stay for the
    next forward.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
        module.set_reshard_after_backward(now)


def sum_over_replicas(module: nn.Module, *, now: bool) -> None:
    """Whether the next backward that reduces gradients also sums them over dp_replicate.

    Else this rank keeps its part of the sum over dp_shard, to which the next reduction is added.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(now)


def reshard(module: nn.Module) -> None:
    """Give up all gathered weights. They would go stale when the weights change."""
    for part in _parts(module):
        part.reshard()


def _parts(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


@dataclass(frozen=True)
class Held:
    """A rank's rectangle of a parameter, or of a tensor that is cut like it.

    shape: of the whole parameter. row, column: of the first element. values: (rows, columns), the
    memory itself. copy: which of ``copies`` equal ones this is.
    """

    shape: tuple[int, ...]
    row: int
    column: int
    values: Tensor
    copy: int
    copies: int

    def like(self, local: Tensor) -> Tensor:
        """Another local tensor of the parameter, such as its gradient, as a matrix; its memory."""
        return _matrix(local, self.shape)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a parameter or gradient: the memory itself, no collective."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(param: Tensor, mesh: DeviceMesh | None) -> Held:
    """The rectangle of ``param`` here: its tensor-parallel part, of which FSDP2 cuts the rows.

    mesh: the module's; None for a plain parameter.
    """
    shape = tuple(param.shape)
    start, size = [0, 0], [shape[0], math.prod(shape[1:])]
    copy, copies = 0, 1
    if mesh is not None:
        rank = dict(zip((DP_REPLICATE, DP_SHARD, TP), mesh.get_coordinate() or (), strict=True))
        copy, copies = rank[DP_REPLICATE], mesh[DP_REPLICATE].size()
        dim, ranks = _tensor_parallel_dim(param), mesh[TP].size()
        if dim is None:
            copy, copies = copy * ranks + rank[TP], copies * ranks
        else:
            start[dim], size[dim] = _chunk(size[dim], rank[TP], ranks)
        first, size[0] = _chunk(size[0], rank[DP_SHARD], mesh[DP_SHARD].size())
        start[0] += first
    values = _matrix(local_part(param), shape)
    assert tuple(values.shape) == tuple(size), f"{tuple(values.shape)}, not {size} of {shape}"
    return Held(shape, start[0], start[1], values, copy, copies)


def _tensor_parallel_dim(param: Tensor) -> int | None:
    """Along which it is cut over tp; None if every rank has all of it."""
    if not isinstance(param, DTensor):
        return None
    places = dict(zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=True))
    place = places.get(TP)
    if not isinstance(place, Shard):
        return None
    assert place.dim == 0 or param.dim() == 2, "only a matrix is cut along its columns"
    return place.dim


def _chunk(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Start and size of a rank's part, as `torch.chunk` cuts."""
    each = -(-size // ranks)
    start = min(rank * each, size)
    return start, min(each, size - start)


def _matrix(local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A local part (R', ...) of a parameter of this whole shape as (R', C'), its memory."""
    return local.unsqueeze(1) if len(shape) == 1 else local.flatten(1)
