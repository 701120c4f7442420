"""What a rank writes of a module into a checkpoint, and what it wants to read from one.

Weights and the optimizer's tensors are cut like the parameters that they belong to. Every element
of the whole model is written by one rank, and every rank reads what it holds: see `Cut`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn

from mimo.engines.contract import Purpose
from mimo.engines.megatron.cut import Cut
from mimo.engines.megatron.groups import ProcessGroupCollection
from mimo.engines.megatron.initialize import global_name, stored_name
from mimo.engines.megatron.optimizer_state import share_of
from mimo.engines.piece import STEP, Piece, key_of

_SHARED_BYTES = 1 << 20
"""Replicas share the writing of larger parameters; smaller ones are written by one of them each."""


def module_pieces(
    module: str,
    chunks: Sequence[nn.Module],
    groups: ProcessGroupCollection,
    optimizer: MegatronOptimizer | None,
    purpose: Purpose,
) -> Iterator[Piece]:
    """The pieces of a module that this rank writes, or those that it wants. No collective.

    Keys are ``<module>.<parameter>`` and those of `key_of`. A distributed
    optimizer's have the same form as a plain one's, so either can load what the other saved.
    """
    if optimizer is not None:
        assert optimizer.optimizer is not None, "a module that trains has parameters"
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    replicas = groups.dp_cp
    for order, (key, cut, param, is_copy) in enumerate(_parameters(module, chunks, groups)):
        if purpose == "save" and (is_copy or (cut.dim is None and groups.tp.rank() > 0)):
            continue  # another rank writes it
        own = (0, param.numel())
        if purpose == "save":
            own = _written_by(param, order, replicas.rank(), replicas.size())
        shape = cut.whole_shape(tuple(param.shape))
        yield from _pieces(key, shape, cut, param.detach(), 0, own)
        if optimizer is None or not param.requires_grad:
            continue
        share = share_of(optimizer, param)
        part = own if share.is_replicated else (share.start, share.end)
        for kind, tensor in share.tensors.items():
            yield from _pieces(key_of(kind, key), shape, cut, tensor, share.start, part)
        is_first = part[0] == 0 < part[1] and groups.tp.rank() == 0
        if share.step is not None and (purpose == "load" or is_first):
            yield Piece(key_of(STEP, key), (1,), 0, 0, share.step.view(1, 1))


def gradient_pieces(
    module: str, chunks: Sequence[nn.Module], groups: ProcessGroupCollection
) -> Iterator[Piece]:
    """The gradients of all parameters here that learn, under the parameters' keys."""
    for key, cut, param, _ in _parameters(module, chunks, groups):
        if param.requires_grad:
            shape, every = cut.whole_shape(tuple(param.shape)), (0, param.numel())
            yield from _pieces(key, shape, cut, cast("Any", param).main_grad, 0, every)


def _parameters(
    module: str, chunks: Sequence[nn.Module], groups: ProcessGroupCollection
) -> Iterator[tuple[str, Cut, nn.Parameter, bool]]:
    """Each with its key, and whether it is the last stage's copy of a tied embedding."""
    for number, chunk in enumerate(chunks):
        virtual = number if len(chunks) > 1 else None
        config = cast("Any", chunk).config
        for local, param in chunk.named_parameters():
            whole = global_name(local, config, groups.pp.rank(), virtual)
            name = stored_name(whole, chunk)
            yield f"{module}.{name}", Cut.of(param, groups.tp), param, name != whole


def _written_by(param: Tensor, order: int, rank: int, size: int) -> tuple[int, int]:
    """The stretch of a parameter that replica ``rank`` of ``size`` writes: whole rows, or nothing.

    order: the parameter's number in the chunk.
    """
    if param.numel() * param.element_size() < _SHARED_BYTES:
        return (0, param.numel() if order % size == rank else 0)
    rows = param.shape[0]
    columns = param.numel() // rows
    return rows * rank // size * columns, rows * (rank + 1) // size * columns


def _pieces(
    key: str, shape: tuple[int, ...], cut: Cut, held: Tensor, start: int, part: tuple[int, int]
) -> Iterator[Piece]:
    """The elements part[0] .. part[1] - 1 of a flat parameter.

    held: its elements from ``start`` on, as many as are held here.
    """
    own = held.view(-1)[part[0] - start : part[1] - start]
    for row, column, values in cut.rectangles(own, part[0]):
        yield Piece(key, shape, row, column, values)
