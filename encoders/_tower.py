"""The base of all towers: the stack, construction, and the forward.

Letters: I items, P inputs of all items with C numbers each, T tokens of the stack, D tower hidden,
N rows, H language hidden, L levels. A prime marks this rank's part: T' tokens, N' rows.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bridge import ItemRows
from mimo.device import send
from mimo.engines import megatron as engine
from mimo.families.contracts import EncoderSettings
from mimo.families.flops import Product
from mimo.families.keymap import Weight, plain
from mimo.families.wire import WirePatches


def gated_stack(settings: EncoderSettings) -> dict[str, Any]:
    """Return the `stack_shape` of layers with RMSNorm, SwiGLU and biases."""
    head_size = settings.hidden_size // settings.num_attention_heads
    biases = {"add_bias_linear": True, "add_qkv_bias": True}
    return settings.stack_shape() | {"kv_channels": head_size} | biases


def gelu_stack(settings: EncoderSettings, approximate: str = "tanh") -> dict[str, Any]:
    """Return the `stack_shape` of layers with LayerNorm, a plain GELU MLP and biases."""
    gelu = partial(nn.functional.gelu, approximate=approximate)
    changes = {"normalization": "LayerNorm", "activation_func": gelu, "gated_linear_unit": False}
    return gated_stack(settings) | changes


def both(ours: str, theirs: str, rows: int, *columns: int) -> list[Weight]:
    """Map a linear's weight (rows, columns) and bias (rows,); without columns, a norm's."""
    return [
        plain(f"{ours}.weight", f"{theirs}.weight", rows, *columns),
        plain(f"{ours}.bias", f"{theirs}.bias", rows),
    ]


def row_mlp(
    config: engine.TransformerConfig, ctx: engine.ModuleContext, width: int, output_size: int
) -> nn.Module:
    """Build the MLP that projects the tokens of a row, side by side: (N, width) -> (N, H)."""
    return engine.ParallelMLP(config, ctx.groups, width, width, output_size, nn.functional.gelu)


def mlp_products(name: str, width: int, output_size: int) -> list[Product]:
    """Return the products of a `row_mlp` with this name."""
    return [
        Product(f"{name}.linear_fc1.weight", "row", (width, width)),
        Product(f"{name}.linear_fc2.weight", "row", (output_size, width)),
    ]


@dataclass(frozen=True)
class SequencePart:
    """The tokens that a rank of a tower has: part ``number`` of ``count`` equal parts of all rows.

    Without sequence parallelism there is one. Blank rows at the end make the parts equal.
    """

    count: int
    number: int

    def num_blank(self, num_rows: int) -> int:
        """Return the blank rows to add; without items one per part, as the engine needs some."""
        return -num_rows % self.count if num_rows else self.count

    def take(self, values: Tensor, length: int) -> Tensor:
        """Return this rank's part (length / count, ...) of values (n, ...), padded with zeros."""
        size = length // self.count
        part = values[self.number * size : (self.number + 1) * size]
        if part.shape[0] == size:
            return part
        return torch.cat((part, part.new_zeros(size - part.shape[0], *part.shape[1:])))

    def rows_per_item(self, sizes: list[int], num_held: int) -> tuple[int, ...]:
        """Return the rows of each item when every rank holds ``num_held``.

        sizes: rows that each item's tokens should make. Rows go to items in order; missing ones
        lack at the end, and surplus ones, beyond the blanks, go to the last item.
        """
        ends = list(itertools.accumulate(sizes))
        produced = num_held * self.count
        surplus = max(0, produced - ends[-1] - self.num_blank(ends[-1]))
        ends = [min(end, produced) for end in ends]
        ends[-1] += surplus
        return tuple(end - start for start, end in itertools.pairwise([0, *ends]))

    def sum_gradients(self, module: nn.Module) -> None:
        """Mark a module that sees only this rank's part, so that its gradients are summed."""
        for param in module.parameters():
            param.sequence_parallel = self.count > 1  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class PackedItems:
    """The items of a forward, blank ones at the end; families add fields.

    segments: of the tokens in the blocks; tokens attend inside their segment.
    lookups: further inputs of `Tower.embed`; empty on later stages.
    """

    segments: engine.PackedSegments
    lookups: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class PreparedItems[P: PackedItems]:
    """The arguments of a forward beside inputs, made by `Tower.prepare`.

    num_inputs: of all items, without blank ones. num_tokens: T, blank ones included. sizes: planned
    rows of each item. packed: with its tensors on the device.
    """

    num_inputs: int
    num_tokens: int
    sizes: list[int]
    packed: P


class Tower[P: PackedItems](nn.Module, ABC):
    """Items, packed into one sequence of tokens -> rows of the language model's size.

    This class holds all parallelism of a tower. A family builds `blocks`, the layers of this stage,
    in its constructor, and implements the abstract methods. An item is a grid (t, h, w) of inputs:
    patches of an image or, as (t, 1, 1), frames of a sound.

    stack: the shape of its layers. tokens_per_row: consecutive tokens of an item that `project`
    turns into one row. level_blocks: blocks, counted from 0 over all stages, whose outputs
    `project` needs besides the last one's.
    """

    blocks: Any
    stack: ClassVar[Callable[[Any], dict[str, Any]]] = staticmethod(gated_stack)

    def __init__(
        self,
        settings: EncoderSettings,
        ctx: engine.ModuleContext,
        tokens_per_row: int,
        level_blocks: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.config = config = engine.transformer_config(type(self).stack(settings), ctx)
        self.part = SequencePart(1, 0)
        if config.sequence_parallel:
            self.part = SequencePart(ctx.groups.tp.size(), ctx.groups.tp.rank())
        self.tokens_per_row = tokens_per_row
        self.level_blocks = level_blocks
        self.is_first_stage, self.is_last_stage = ctx.is_first_stage, ctx.is_last_stage
        self.layers = engine.layers_here(config, ctx.groups, ctx.chunk)
        self._received: Tensor | None = None

    @abstractmethod
    def blank_grid(self, num_rows: int) -> tuple[int, int, int]:
        """Return (t, h, w) of an item of ``num_rows`` rows; its inputs will be zeros."""

    def num_tokens(self, grids: Tensor) -> list[int]:
        """Return each item's tokens, multiples of ``tokens_per_row``. grids: (I, 3) int64."""
        return grids.prod(1).tolist()

    @abstractmethod
    def pack(self, grids: Tensor) -> P:
        """Pack items with these ``grids`` (I, 3) int64, blank items included, in any thread.

        `prepare` copies all tensors in dataclasses and tuples to the device.
        """

    @abstractmethod
    def embed(self, patches: Tensor, packed: P) -> Tensor:
        """Embed patches (P, C) of all items, without blank ones, to this rank's tokens (T', D).

        It takes this rank's part, of inputs or of tokens, with ``self.part.take``. So the module
        that embeds sees only part of the gradient: mark it with ``self.part.sum_gradients``.
        """

    def stack_inputs(self, packed: P) -> dict[str, Any]:
        """Return arguments of the blocks besides hidden states, for the tokens of all ranks."""
        return {"packed_seq_params": packed.segments}

    @abstractmethod
    def project(self, hidden: list[Tensor], packed: P) -> Tensor:
        """Project hidden states (T', 1, D) to this rank's rows (N', (1 + L)·H), in item order.

        hidden: after the last block, then after each of ``level_blocks``.
        """

    def prepare(self, grids: Tensor, copy: Callable[[Tensor], Tensor]) -> PreparedItems[P]:
        """Do all host work for items ``grids`` (I, 3) int64. copy: to the device; called once."""
        tokens = self.num_tokens(grids)
        num_blank = self.part.num_blank(sum(tokens) // self.tokens_per_row)
        with_blank = grids
        if num_blank:
            with_blank = torch.cat((grids, torch.tensor([self.blank_grid(num_blank)])))
        packed = self.pack(with_blank)
        packed.segments.prepare(self._forms)
        return PreparedItems(
            num_inputs=int(grids.prod(1).sum()),
            num_tokens=sum(tokens) + num_blank * self.tokens_per_row,
            sizes=[number // self.tokens_per_row for number in tokens],
            packed=engine.to_device(packed, copy),
        )

    @functools.cached_property
    def _forms(self) -> frozenset[Any]:
        return engine.forms_in([self])

    def stage_shapes(self, items: PreparedItems[P]) -> engine.StageShapes:
        tokens = items.num_tokens // self.part.count
        received, sent = (
            1 + sum(level < stop for level in self.level_blocks)
            for stop in (self.layers.start, self.layers.stop)
        )
        width = self.config.hidden_size
        return engine.StageShapes((tokens, 1, received * width), (tokens, 1, sent * width))

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        self._received = input_tensor[0]

    def values(self, patches: Tensor | WirePatches) -> Tensor:
        if isinstance(patches, Tensor):
            return patches
        return patches.values(self.config.params_dtype)

    def forward(
        self, patches: Tensor | WirePatches | None, items: Tensor | PreparedItems[P]
    ) -> Tensor | ItemRows:
        """Run this stage: see `mimo.families.contracts.EncoderFamily`.

        Hidden states (T', 1, (1 + l)·D) for the next stage are the last block's, then those of the
        l ``level_blocks`` so far.
        """
        if isinstance(items, Tensor):
            items = self.prepare(items, partial(send, device=next(self.parameters()).device))
        packed, num_tokens = items.packed, items.num_tokens
        if self.is_first_stage:
            assert patches is not None, "the first stage needs patches"
            values, needed = self.values(patches), items.num_inputs
            assert len(values) == needed, f"{len(values)} patches in grids of {needed}"
            hidden = [self.embed(values, packed)[:, None, :]]
        else:
            assert self._received is not None, "a later stage needs the previous one's output"
            hidden = list(self._received.split(self.config.hidden_size, dim=-1))
            self.blocks.set_input_tensor(hidden[0])
        held = len(hidden[0]) * self.part.count
        assert held == num_tokens, f"{held} tokens on {self.part.count} ranks, not {num_tokens}"
        output = self.blocks(
            hidden_states=hidden[0],
            attention_mask=None,
            extract_layer_indices=set(self.level_blocks),
            **self.stack_inputs(packed),
        )
        # Megatron returns a pair if outputs of layers are requested.
        last, levels = output if self.level_blocks else (output, [])
        hidden = [last, *hidden[1:], *levels]
        if not self.is_last_stage:
            return torch.cat(hidden, dim=-1) if len(hidden) > 1 else hidden[0]
        rows = self.project(hidden, packed)
        if not items.sizes:
            return ItemRows(rows[:0], (), self.part.count)
        return ItemRows(rows, self.part.rows_per_item(items.sizes, len(rows)), self.part.count)


def build_tower[T: Tower[Any]](
    make: Callable[[Any, engine.ModuleContext, int], T],
    settings: EncoderSettings,
    ctx: engine.ModuleContext,
    output_size: int,
    seed: int,
) -> T:
    """Implement `EncoderFamily.build`. make: the tower's class."""
    tower, std = make(settings, ctx, output_size), settings.init_std
    engine.initialize_parameters(tower, tower.config, ctx.groups, seed, std, provided=ctx.provided)
    return tower
