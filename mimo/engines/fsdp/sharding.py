"""FSDP2 around a wrapper: which part of a parameter a rank has, its names and its weights.

`fully_shard` wraps each unit, each end and the root, whose hooks cover the last norm and, if one
matrix is both, embedding and head. Gradients are summed, never averaged.

A tensor of the checkpoint format consists of whole rows of transformers' tensors. So a rectangle of
one of theirs is a few rectangles of ours, as views. No rank reads or holds a whole sharded tensor.

Letters: R rows, C columns of a whole parameter or tensor, seen as a matrix of its first dimension
by all others; a vector has one column.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from mimo.engines.contract import Piece
from mimo.engines.fsdp.context import DP_REPLICATE, DP_SHARD, TP, FsdpContext, Wrapper


def shard(module: nn.Module, ctx: FsdpContext) -> None:
    """Shard the parameters of a `Wrapper` over the data-parallel ranks, in place.

    In bf16, weights are gathered in bf16 and gradients summed in fp32; inputs are not cast. Every
    rank of the mesh calls it, after tensor parallelism; no collective.
    """
    if ctx.mesh is None:
        return
    axes = (DP_REPLICATE, DP_SHARD) if ctx.mesh[DP_REPLICATE].size() > 1 else (DP_SHARD,)
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if ctx.dtype != ctx.stored_dtype:
        policy = MixedPrecisionPolicy(ctx.dtype, ctx.stored_dtype, cast_forward_inputs=False)
    wrapper = cast("Wrapper", module)
    units = [*wrapper.ends[:1], *wrapper.units, *wrapper.ends[1:]]
    for unit in (*units, module):
        # The backward begins with the last two and needs their weights at once.
        at_end = unit is module or unit in wrapper.ends[1:]
        fully_shard(
            unit,
            mesh=ctx.mesh[axes],
            mp_policy=policy,
            reshard_after_forward=ctx.reshard_after_forward and not at_end,
        )
    for embedding in wrapper.ends[:1]:
        cast("FSDPModule", embedding).set_unshard_in_backward(False)  # it needs no weights then
    for part in _parts(module):
        # Both are needed: a factor alone asks for an operation that gloo lacks.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    # Every rank reduces the same parameters, whichever its microbatches used.
    cast("FSDPModule", module).set_reduce_scatter_unused_params(True)
    forward = [cast("FSDPModule", part) for part in (module, *units)]
    backward = [forward[0], *reversed(forward[1:])]
    for part, following in itertools.pairwise(forward):
        part.set_modules_to_forward_prefetch([following])
    for part, following in itertools.pairwise(backward):
        part.set_modules_to_backward_prefetch([following])


def reduce_gradients(module: nn.Module, *, now: bool, over_replicas: bool = True) -> None:
    """Set whether the next backward reduces accumulated gradients and frees gathered weights.

    If not, gradients and gathered weights stay whole on every rank. over_replicas: whether a
    reduction also sums over dp_replicate; if not, the next reduction is added to this one's result.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
        module.set_reshard_after_backward(now)
        module.set_requires_all_reduce(over_replicas)


def reshard(module: nn.Module) -> None:
    """Free all gathered weights, which would be stale after an update."""
    for part in _parts(module):
        part.reshard()


def _parts(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


@dataclass(frozen=True)
class Rectangle:
    """A rank's rectangle of a parameter, or of a tensor that is sharded alike.

    shape: of the whole parameter. row, column: of the first element. values: (rows, columns), the
    memory itself. copy: which of ``copies`` equal rectangles this is.
    """

    shape: tuple[int, ...]
    row: int
    column: int
    values: Tensor
    copy: int
    copies: int

    def like(self, local: Tensor) -> Tensor:
        """View another local tensor of the parameter, such as its gradient, as a matrix."""
        return _matrix(local, self.shape)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter or gradient: the memory itself, no collective."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rectangle(param: Tensor, mesh: DeviceMesh | None) -> Rectangle:
    """Return this rank's rectangle: FSDP2 cuts rows of its tensor-parallel part.

    mesh: the module's; None for a plain parameter.
    """
    shape = tuple(param.shape)
    start, size = [0, 0], [shape[0], math.prod(shape[1:])]
    copy, copies = 0, 1
    if mesh is not None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "this rank is outside of the module's mesh"
        copy, shard_index, tp_index = coordinate  # axes: dp_replicate, dp_shard, tp
        copies, num_shards, tp = mesh.shape  # `mesh[TP]` would build a mesh in every call
        if (dim := _tensor_parallel_dim(param)) is None:
            copy, copies = copy * tp + tp_index, copies * tp
        else:
            start[dim], size[dim] = _chunk(size[dim], tp_index, tp)
        first, size[0] = _chunk(size[0], shard_index, num_shards)
        start[0] += first
    values = _matrix(local_part(param), shape)
    assert tuple(values.shape) == tuple(size), f"{tuple(values.shape)}, not {size} of {shape}"
    return Rectangle(shape, start[0], start[1], values, copy, copies)


def _tensor_parallel_dim(param: Tensor) -> int | None:
    """The dimension that is sharded over tp; None if every rank has all of it."""
    if not isinstance(param, DTensor):
        return None
    places = dict(zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=True))
    place = places.get(TP)
    if not isinstance(place, Shard):
        return None
    assert place.dim == 0 or param.dim() == 2, "only a matrix is sharded along its columns"
    return place.dim


def _chunk(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Start and size of a rank's part, as `torch.chunk` cuts."""
    each = -(-size // ranks)
    start = min(rank * each, size)
    return start, min(each, size - start)


def _matrix(local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View a local part (R', ...) of a parameter of this whole shape as (R', C')."""
    return local.unsqueeze(1) if len(shape) == 1 else local.flatten(1)


@dataclass(frozen=True)
class Rows:
    """``count`` rows of transformers' tensor ``key`` from ``start`` on. transposed: as (C, R).

    each: rows of an element of the first dimension, more than 1 for stacked matrices of experts.
    """

    key: str
    start: int
    count: int
    transposed: bool = False
    each: int = 1


@dataclass(frozen=True)
class Part:
    """Rows of transformers' that tensor ``name`` of the format has from ``row`` on."""

    name: str
    row: int
    rows: Rows


@dataclass(frozen=True)
class Names:
    """The tensors of the checkpoint format and the rows that they consist of.

    shapes: of the format's tensors by name, rows of padding included. parts: by transformers' name,
    the parts of the format's tensors with rows of it. filled: by name, the rows before padding.
    """

    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, tuple[Part, ...]] = field(repr=False)
    filled: Mapping[str, int] = field(repr=False)

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, tuple[int, ...], Sequence[Rows]]]) -> Self:
        """Build it from name, shape with padding, and rows in order, of the format's tensors."""
        shapes: dict[str, tuple[int, ...]] = {}
        parts: dict[str, tuple[Part, ...]] = {}
        filled: dict[str, int] = {}
        for name, shape, runs in tensors:
            shapes[name], row = shape, 0
            for rows in runs:
                parts[rows.key] = (*parts.get(rows.key, ()), Part(name, row, rows))
                row += rows.count
            assert row <= shape[0], f"{name}: {row} rows, but {shape}"
            filled[name] = row
        return cls(shapes, parts, filled)

    def users(self, key: str) -> frozenset[str]:
        """Return the names of the tensors that have rows of transformers' tensor ``key``."""
        assert key in self.parts, f"the key map does not say what is made of {key}"
        return frozenset(part.name for part in self.parts[key])

    def pieces(self, key: str, rectangle: Rectangle) -> Iterator[Piece]:
        """Yield a rectangle of transformers' tensor ``key`` as pieces of the format's tensors.

        Pieces are views of its values. Padding follows the last row before it, as zeros.
        """
        for part in self.parts[key]:
            values, row, column = rectangle.values, rectangle.row, rectangle.column
            if part.rows.transposed:
                values, row, column = values.T, column, row
            elif part.rows.each > 1:
                values = values.view(-1, values.shape[1] // part.rows.each)
                row *= part.rows.each
            first = max(row, part.rows.start)
            last = min(row + values.shape[0], part.rows.start + part.rows.count)
            if first >= last or not values.shape[1]:
                continue
            shape, moved = self.shapes[part.name], part.row - part.rows.start
            yield Piece(part.name, shape, first + moved, column, values[first - row : last - row])
            end = self.filled[part.name]
            if last + moved == end < shape[0]:
                zeros = values.new_zeros(shape[0] - end, values.shape[1])
                yield Piece(part.name, shape, end, column, zeros)


Reader = Callable[[str, slice, slice], Tensor | None]
"""``(key, rows, columns)`` -> this part of a matrix, in any dtype; key: its name in transformers'
memory. For other tensors the columns are ``slice(None)`` and the result has any shape. None leaves
the rows blank. Called once per parameter, adapters included."""


@torch.no_grad()
def load(module: nn.Module, ctx: FsdpContext, device: torch.device, reader: Reader) -> None:
    """Materialise a `Wrapper` that was built and sharded on meta, with weights from ``reader``.

    No collective; every rank reads for itself. Raises ValueError for a tensor of a wrong shape.
    """
    materialise(module, device)
    names = cast("Wrapper", module).hf_names
    for name, param in module.named_parameters():
        part = local_rectangle(param, ctx.mesh)
        rows, columns = part.values.shape
        if not rows:
            continue  # fewer rows than ranks
        is_matrix = len(part.shape) == 2
        span = slice(part.column, part.column + columns) if is_matrix else slice(None)
        values = reader(names[name], slice(part.row, part.row + rows), span)
        if values is None:
            continue
        if values.numel() != part.values.numel():
            raise ValueError(
                f"{names[name]}: {list(values.shape)}, not {rows} rows of {part.shape}"
            )
        part.values.copy_(values.reshape(rows, columns))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give weights on meta memory on the device, and move the rest there. Ties are kept."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # a tied parameter has several
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((part, name))
    lost = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    assert not lost, f"{lost[0]} has no values; see `build_on_meta`"
    module._apply(
        lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device, copy=False)
    )
    for (first, first_name), *others in places.values():
        for part, name in others:  # `_apply` has made several of one
            setattr(part, name, getattr(first, first_name))
