"""A rank's part of the whole model's tensors: names, rectangles, first values, pieces.

Every parameter is seen as a matrix of its first dimension by all others; a vector has one column.
Weights are drawn, read and written by rectangles of it, so no rank needs the whole matrix.

A distributed optimizer cuts a buffer of all parameters into equal parts, so a rank holds the state
of a stretch of the flat parameter, perhaps an empty one.

Letters: R rows, C columns of the whole matrix; R', C' of a rank's part.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from mimo.engines.contract import MASTER, STEP, Piece, Purpose, key_of
from mimo.engines.draw import adapter_numbers, draw, log_of_uniform, normal
from mimo.engines.optimizer import state_tensors, step_of

_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_OUTPUT, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"

_RESIDUAL = (
    *("linear_proj.weight", "mlp.linear_fc2.weight"),
    *("mlp.experts.linear_fc2.weight", "mlp.shared_expert.linear_fc2.weight"),
)
_SHARED_BYTES = 1 << 20
"""Replicas share the writing of larger parameters; each smaller one is written by one of them."""


def is_expert_param(param: Any) -> bool:
    """Return whether a parameter is of experts, whose replicas are those of `groups.expt_dp`."""
    return not getattr(param, "allreduce", True)


def global_name(name: str, config, pp_rank: int, chunk: int | None) -> str:
    """Return a parameter's name in the whole model: layers are counted from the first stage."""
    offset = get_transformer_layer_offset(config, chunk, pp_rank)
    return _LAYER.sub(lambda m: f"{m[1]}layers.{int(m[2]) + offset}.", name, count=1)


def stored_name(whole: str, model: nn.Module) -> str:
    """Return the name under which a parameter is drawn and stored: the embedding's for a tied head.

    The last stage's tied head is a copy of the first stage's embedding.
    """
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    return _EMBEDDING if whole == _OUTPUT and tied else whole


@dataclass(frozen=True)
class Cut:
    """The cut of a parameter over ``size`` tensor-parallel ranks, of which this is ``rank``.

    rows, columns: R' and C'. dim: along which it is cut; None if every rank has all of it.
    blocks: stacked matrices, such as gate and up, which are cut separately. part, parts:
    the expert-parallel rank and their number. Experts are divided over them first, then each is
    cut as above.
    """

    rows: int
    columns: int
    dim: int | None
    blocks: int
    rank: int
    size: int
    part: int = 0
    parts: int = 1

    @classmethod
    def of(cls, param: Tensor, groups: ProcessGroupCollection) -> Cut:
        """Read the cut from the attributes that Megatron sets on its parameters."""
        rows, tp, part, parts = param.shape[0], groups.tp, 0, 1
        if is_expert_param(param):
            tp, part, parts = groups.expt_tp, groups.ep.rank(), groups.ep.size()
        columns = param.numel() // rows
        dim, blocks = None, 1
        if tp.size() > 1 and getattr(param, "tensor_model_parallel", False):
            dim, blocks = (int(getattr(param, f"partition_{name}")) for name in ("dim", "stride"))
            assert dim == 0 or (dim, blocks) == (1, 1), "only rows are stacked"
            assert rows % blocks == 0, f"{blocks} matrices in {rows} rows"
        return cls(rows, columns, dim, blocks, tp.rank(), tp.size(), part, parts)

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first element."""
        return self.part == self.rank == 0

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole parameter, given that of the rank's part."""
        rows, *rest = (n * self.size if dim == self.dim else n for dim, n in enumerate(shape))
        return (rows * self.parts, *rest)

    def rectangles(self, stretch: Tensor, start: int = 0) -> Iterator[tuple[int, int, Tensor]]:
        """Cut a stretch of the flat part, its elements from ``start`` on, into rectangles.

        stretch: (n,), contiguous: the end of a row, whole rows, perhaps of several stacked
        matrices, and the beginning of a row. Yields row and column of the first element in the
        whole matrix, and the elements (rows, columns), views of ``stretch`` in its order.
        """
        height, position, end = self.rows // self.blocks, 0, stretch.numel()
        first = self.part * self.rows * (self.size if self.dim == 0 else 1)
        while position < end:
            row, column = divmod(start + position, self.columns)
            left = end - position
            if column or left < self.columns:
                rows, columns = 1, min(self.columns - column, left)
            else:
                rows, columns = min(left // self.columns, height - row % height), self.columns
            count = rows * columns
            if self.dim == 0:
                row += (row // height * (self.size - 1) + self.rank) * height
            elif self.dim == 1:
                column += self.rank * self.columns
            yield first + row, column, stretch[position : position + count].view(rows, columns)
            position += count


@torch.no_grad()
def initialize_parameters(
    model: nn.Module,
    config,
    groups: ProcessGroupCollection,
    seed: int,
    std: float,
    chunk: int | None = None,
    provided: Collection[str] = (),
) -> None:
    """Draw weights N(0, std²), set biases to 0 and norms to a factor of 1, in place.

    Weights are a pure function of seed, parameter name and position in the whole matrix, so all
    layouts start alike. The output projections of residual branches use std/sqrt(2·layers), as
    GPT-2 does. Adapters start without effect, and decay rates of linear attention in 0.01..16.

    provided: parameters that a checkpoint is about to fill. They are set to NaN, so that a missing
        one is noticed.
    """
    zero_centered = {  # norms, ours and Transformer Engine's
        id(m.weight) for m in model.modules() if getattr(m, "zero_centered_gamma", False)
    }
    for name, param in model.named_parameters():
        whole = stored_name(global_name(name, config, groups.pp.rank(), chunk), model)
        if whole in provided:
            param.fill_(torch.nan)
        elif name.endswith((".bias", ".lora_b")):
            param.zero_()
        elif param.dim() == 1 and not name.endswith(".a_log"):
            param.fill_(0.0 if id(param) in zero_centered else 1.0)
        else:
            cut = Cut.of(param, groups)
            rows, columns = cut.whole_shape((cut.rows, cut.columns))
            if name.endswith(".lora_a"):
                numbers = adapter_numbers(columns)
            elif name.endswith(".a_log"):
                numbers = log_of_uniform(0.01, 16.0)
            else:
                residual = name.endswith(_RESIDUAL)
                numbers = normal(std / (2 * config.num_layers) ** 0.5 if residual else std)
            for row, column, values in cut.rectangles(param.data.view(-1)):
                draw(values, row, column, (rows, columns), f"{seed}:{whole}", numbers)


def module_pieces(
    module: str,
    chunks: Sequence[nn.Module],
    groups: ProcessGroupCollection,
    optimizers: Sequence[MegatronOptimizer],
    purpose: Purpose,
) -> Iterator[Piece]:
    """Implement `mimo.engines.contract.Module.pieces`."""
    for optimizer in optimizers:
        assert optimizer.optimizer is not None, "a trainable module has parameters"
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    for order, (key, cut, param, is_copy) in enumerate(_parameters(module, chunks, groups)):
        if purpose == "save" and (is_copy or (cut.dim is None and cut.rank > 0)):
            continue  # another rank writes it
        bounds, of_experts = (0, param.numel()), is_expert_param(param)
        replicas = groups.expt_dp if of_experts else groups.dp_cp
        if purpose == "save":
            bounds = _written_bounds(param, order, replicas.rank(), replicas.size())
        shape = cut.whole_shape(tuple(param.shape))
        yield from _pieces(key, shape, cut, param.detach(), 0, bounds)
        if not optimizers or not param.requires_grad:
            continue
        optimizer = optimizers[-1 if of_experts else 0]
        share = _share_of(optimizer, param)
        if isinstance(optimizer, DistributedOptimizer):
            bounds = (share.start, share.end)
        for kind, tensor in share.tensors.items():
            yield from _pieces(key_of(kind, key), shape, cut, tensor, share.start, bounds)
        is_first = bounds[0] == 0 < bounds[1] and cut.is_first
        if share.step is not None and (purpose == "load" or is_first):
            yield Piece(key_of(STEP, key), (1,), 0, 0, share.step.view(1, 1))


def gradient_pieces(
    module: str, chunks: Sequence[nn.Module], groups: ProcessGroupCollection
) -> Iterator[Piece]:
    """Yield the gradients of all trainable parameters on this rank, under the parameters' keys."""
    for key, cut, param, _ in _parameters(module, chunks, groups):
        if param.requires_grad:
            shape, bounds = cut.whole_shape(tuple(param.shape)), (0, param.numel())
            yield from _pieces(key, shape, cut, cast("Any", param).main_grad, 0, bounds)


def _parameters(
    module: str, chunks: Sequence[nn.Module], groups: ProcessGroupCollection
) -> Iterator[tuple[str, Cut, nn.Parameter, bool]]:
    """Yield key, cut, parameter, and whether it is the last stage's copy of a tied embedding."""
    for number, chunk in enumerate(chunks):
        virtual = number if len(chunks) > 1 else None
        config = cast("Any", chunk).config
        for local, param in chunk.named_parameters():
            whole = global_name(local, config, groups.pp.rank(), virtual)
            name = stored_name(whole, chunk)
            yield f"{module}.{name}", Cut.of(param, groups), param, name != whole


def _written_bounds(param: Tensor, order: int, rank: int, size: int) -> tuple[int, int]:
    """Bounds of the flat elements that replica ``rank`` of ``size`` writes, in whole rows.

    order: the parameter's number in the chunk.
    """
    if param.numel() * param.element_size() < _SHARED_BYTES:
        return (0, param.numel() if order % size == rank else 0)
    rows = param.shape[0]
    columns = param.numel() // rows
    return rows * rank // size * columns, rows * (rank + 1) // size * columns


def _pieces(
    key: str, shape: tuple[int, ...], cut: Cut, stored: Tensor, start: int, bounds: tuple[int, int]
) -> Iterator[Piece]:
    """Yield elements bounds[0] .. bounds[1] - 1; stored: the flat parameter from ``start`` on."""
    stretch = stored.view(-1)[bounds[0] - start : bounds[1] - start]
    for row, column, values in cut.rectangles(stretch, bounds[0]):
        yield Piece(key, shape, row, column, values)


@dataclass(frozen=True)
class _Share:
    """This rank's part of a parameter's optimizer state.

    start, end: bounds of the stretch of the flat parameter that is stored on this rank; all of it
    without a distributed optimizer. tensors: the optimizer's memory by kind, end - start elements
    each. step: (), the number of Adam's updates, if it counts any.
    """

    start: int
    end: int
    tensors: dict[str, Tensor]
    step: Tensor | None = None


def _share_of(optimizer: MegatronOptimizer, param: Tensor) -> _Share:
    """Return this rank's state of ``param``; the optimizer's state must exist already."""
    base: Any = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        if param not in optimizer.model_param_group_index_map:
            return _Share(0, 0, {})
        group, order = optimizer.model_param_group_index_map[param]
        updated = base.param_groups[group]["params"][order]
        stretch = optimizer._get_model_param_range_map(cast("Any", param))["param"]
        start, end, has_master = stretch.start, stretch.end, param.dtype != torch.float32
    else:
        main = getattr(param, "main_param", None)
        updated, has_master = (param, False) if main is None else (main, True)
        start, end = 0, param.numel()
    tensors = state_tensors(base, updated)
    if has_master:
        tensors[MASTER] = updated.detach()
    return _Share(start, end, tensors, step_of(base, updated))
