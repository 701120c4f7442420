"""What a rank writes of a module into a checkpoint, and what it wants to read from one.

Weights and the optimizer's tensors are cut like the parameters that they belong to. Every element
of the whole model is written by one rank, and every rank reads what it holds: see `Cut`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal, cast

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from mimo.engines.megatron.cut import Cut
from mimo.engines.megatron.initialize import global_name, stored_name
from mimo.engines.megatron.module import Module
from mimo.engines.megatron.optimizer_state import MASTER, share_of
from mimo.engines.piece import Piece

Purpose = Literal["save", "load"]

_SHARED_BYTES = 1 << 20
"""Replicas share the writing of larger parameters; smaller ones are written by one of them each."""


def module_pieces(module: Module, purpose: Purpose, with_optimizer: bool) -> Iterator[Piece]:
    """The pieces of a module that this rank writes, or those that it wants. No collective.

    Keys are ``<module>.<parameter>`` and ``optimizer.<kind>.<module>.<parameter>``. A distributed
    optimizer's have the same form as a plain one's, so either can load what the other saved.
    """
    optimizer = module.optimizer if with_optimizer else None
    if optimizer is not None:
        assert optimizer.optimizer is not None, "a module that trains has parameters"
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    tp, replicas = module.groups.tp, module.groups.dp_cp
    for number, chunk in enumerate(module.raw):
        virtual = number if len(module.raw) > 1 else None
        config = cast("Any", chunk).config
        for order, (local, param) in enumerate(chunk.named_parameters()):
            whole = global_name(local, config, module.groups.pp.rank(), virtual)
            name = stored_name(whole, chunk)
            cut = Cut.of(param, tp)
            if purpose == "save" and (name != whole or (cut.dim is None and tp.rank() > 0)):
                continue  # another rank writes it
            own = (0, param.numel())
            if purpose == "save":
                own = _written_by(param, order, replicas.rank(), replicas.size())
            key, shape = f"{module.name}.{name}", cut.whole_shape(tuple(param.shape))
            yield from _pieces(key, shape, cut, param.detach(), 0, own)
            if optimizer is None or not param.requires_grad:
                continue
            share = share_of(optimizer, param)
            part = own if share.is_replicated else (share.start, share.end)
            for kind, tensor in share.tensors.items():
                key_of_kind = f"optimizer.{kind}.{key}"
                yield from _pieces(key_of_kind, shape, cut, tensor, share.start, part)


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
    """The rectangles of the elements part[0] .. part[1] - 1 of a flat parameter.

    held: its elements from ``start`` on, as many as are held here.
    """
    position = part[0] - start
    flat = held.view(-1)
    for own in cut.rectangles(*part):
        end = position + own.rows * own.columns
        values = flat[position:end].view(own.rows, own.columns)
        yield Piece(key, shape, own.row, own.column, values)
        position = end


def with_masters(pieces: Iterable[Piece], stored: Collection[str]) -> list[Piece]:
    """The wanted pieces, with master weights read from the weights if the checkpoint lacks them.

    That of an fp32 run does.
    """
    beginning = f"optimizer.{MASTER}."
    return [
        Piece(p.key.removeprefix(beginning), p.shape, p.row, p.column, p.values)
        if p.key.startswith(beginning) and p.key not in stored
        else p
        for p in pieces
    ]


def set_steps(optimizer: MegatronOptimizer, step: int) -> None:
    """Tell an optimizer whose tensors were loaded that it has done ``step`` updates."""
    base = optimizer.optimizer
    assert base is not None
    for state in base.state.values():
        # One tensor each: a shared one would be advanced once per parameter.
        if "step" in state:
            state["step"] = torch.full_like(state["step"], step)
