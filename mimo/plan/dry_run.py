"""Run a microbatch of one rank without its numbers, and count the memory of its tensors.

The process pretends to be one rank of the whole job. It builds this rank's modules by the code that
trains them, on fake tensors (shapes without memory) and groups that send nothing. A full microbatch
whose tokens all stand for items then runs forward and backward.

Peak = state + inputs + (microbatches in flight - 1) · kept by one + peak of one forward and
backward. The kernels are those of a GPU: see `mimo.plan.dry_run_kernels`.

Letters: T tokens of a lane, n tokens or rows of this rank, H hidden, k feature levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from data.batch import PackedLane
from mimo.config.schema import Recipe
from mimo.device import Staging
from mimo.errors import InputError
from mimo.families.registry import encoder_settings, language_settings, weights_of
from mimo.families.wire import DTYPES
from mimo.model.activations import (
    item_plan,
    items_at_once,
    microbatches_at_once,
    microbatches_in_flight,
)
from mimo.model.build import build_model
from mimo.model.decoding import EncoderItems
from mimo.model.inputs import LanguageBatch, ReceivedRows, stage_items, stage_lane
from mimo.model.memory import RoleMemory
from mimo.model.modules import MimoModel
from mimo.parallel.grids import LANGUAGE, Layout, num_microbatches
from mimo.parallel.groups import simulated_topology
from mimo.plan.dry_run_kernels import TensorMemory, gpu_kernels, shared_buffers


class _Received(torch.autograd.Function):
    """Makes rows that, as those of a bridge, nothing but their use keeps alive."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return token.new_empty(size, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].new_empty((), dtype=torch.float32), None, None


class _Sent(torch.autograd.Function):
    """Sends rows: keeps them until their gradient arrives, and returns a scalar."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.rows = rows.detach()
        return rows.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = torch.empty_like(ctx.rows)
        ctx.rows = None
        return gradient


@dataclass(frozen=True)
class DryRun:
    """Bytes of one rank of a role.

    formula: what `mimo.model.memory` says. rank: the one that was simulated. state: weights,
    gradients, optimizer. inputs: of this step and the next. kept: by one microbatch between its
    forward and its backward. step: peak of one forward and backward. in_flight: microbatches
    between forward and backward at the peak.
    """

    formula: RoleMemory
    rank: int
    state: float
    inputs: float
    kept: float
    step: float
    in_flight: float

    @property
    def waiting(self) -> float:
        """Bytes kept by the other microbatches at the peak."""
        return max(self.in_flight - 1, 0) * self.kept

    @property
    def total(self) -> float:
        return self.state + self.inputs + self.waiting + self.step


def dry_run(
    recipe: Recipe,
    layout: Layout,
    role: RoleMemory,
    rank: int | None = None,
    worst_experts: bool = False,
) -> DryRun:
    """Simulate ``rank``, or the first, of a role. Raises InputError, which names the role.

    worst_experts: whether the tokens of all ranks choose experts of this rank.

    The process must belong to no world, and is not fit for training afterwards.
    """
    rank = role.ranks[0] if rank is None else rank
    size = language_settings(recipe).padded_vocab_size(1)
    with gpu_kernels(worst_experts), simulated_topology(layout, rank) as topology:
        names = [
            f"{module}.{weight.name}"
            for module in topology.modules
            for weight in weights_of(recipe, module, size)
        ]
        try:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                # Nothing is drawn for parameters that are said to be provided.
                model = build_model(recipe, topology, size, provided=names, trains=False)
            return _Rank(recipe, layout, role, rank, model, mode).run()
        except (RuntimeError, ValueError, AssertionError) as error:
            raise InputError(f"{role.role}, rank {rank}: {error}") from error


class _Staging(Staging):
    """Makes inputs fake, and counts them."""

    def __init__(self, mode: FakeTensorMode, memory: TensorMemory) -> None:
        super().__init__(None)
        self._mode, self._memory = mode, memory

    def copy(self, tensor: Tensor) -> Tensor:
        fake = self._mode.from_tensor(tensor)
        self._memory.add(fake)
        return fake

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return self.copy(torch.cat(list(parts)))


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


class _Rank:
    """One module of a simulated rank.

    model: of the rank, with fake parameters. mode: under which these were made.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        role: RoleMemory,
        rank: int,
        model: MimoModel,
        mode: FakeTensorMode,
    ) -> None:
        self.recipe, self.layout, self.role, self.rank = recipe, layout, role, rank
        self.model, self.mode, self.name = model, mode, role.module
        self.module = cast("Any", model.modules[self.name])
        self.grid, self.dtype = layout.grids[self.name], DTYPES[recipe.train.precision]
        self.stage = self.grid.coords(rank).pp
        self.memory = TensorMemory()
        self.kept = 0

    def run(self) -> DryRun:
        params = [param for chunk in self.module.raw for param in chunk.parameters()]
        trained = [param for param in params if param.requires_grad]
        for param in trained:  # DDP adds a gradient to its own buffer at once
            param.register_post_accumulate_grad_hook(_drop_gradient)
        self.module.begin_step(False, 1.0)
        for chunk in self.module.raw:  # operations may return views of them
            for tensor in (*chunk.parameters(), *chunk.buffers()):
                self.memory.add(tensor)
        held, staging = self.memory.now, _Staging(self.mode, self.memory)
        batch = self._tokens(staging) if self.name == LANGUAGE else self._items(staging)
        staged = self.memory.now
        with self.mode, self.memory:
            if self.name == LANGUAGE:
                self._run_language(batch)
            else:
                self._run_tower(batch)
        size, wide = self.dtype.itemsize, max(4, self.dtype.itemsize)
        batches = num_microbatches(self.recipe, self.layout)
        batches /= microbatches_at_once(self.recipe, self.layout, self.name)
        return DryRun(
            formula=self.role,
            rank=self.rank,
            state=sum(param.numel() for param in params) * size
            + sum(param.numel() for param in trained) * wide
            + self.role.optimizer,
            inputs=2 * batches * (staged - held),
            kept=self.kept - staged,
            step=self.memory.peak - staged,
            in_flight=microbatches_in_flight(self.recipe, self.layout, self.name, self.stage),
        )

    # -------------------------------------------------------------------- language

    def _tokens(self, staging: Staging) -> LanguageBatch:
        """Return a full microbatch whose tokens all stand for items, and all have a loss."""
        data, tokens = self.recipe.data, self.recipe.longest_microbatch
        full, rest = divmod(tokens, data.sequence_length)
        lengths = (*[data.sequence_length] * full, *[rest] * (rest > 0))
        items, first = [], 0
        for length in lengths if self.recipe.encoders else ():
            rows = item_plan(self.recipe, next(iter(self.recipe.encoders))).num_rows
            last = first + length - rows
            items += [(start, rows) for start in range(first, last + 1, rows)]
            first += length
        zeros = np.zeros(tokens, np.int64)
        lane = PackedLane(
            input_ids=zeros,
            labels=zeros,
            loss_mask=np.ones(tokens, np.float32),
            position_ids=np.tile(zeros, (3, 1)),
            lengths=lengths,
            real_lengths=lengths,
            packed=data.packing,
            items=tuple(items),
        )
        model, partition = self.model, self.model.partition
        assert partition is not None, "a language rank has a partition adapter"
        forms = self.module.attention_forms()
        rules, whole = model.item_rules, model.whole_rows
        return stage_lane(lane, rules, partition, whole, forms, staging, {})

    def _run_language(self, batch: LanguageBatch) -> None:
        length, sequences = batch.size
        length //= self.module.sequence_parts
        passed = []  # from chunk to chunk, in the order of the forward
        for number, chunk in enumerate(self.module.chunks):
            if not chunk.pre_process:
                size = length, sequences, self.model.hidden_size
                chunk.set_input_tensor([torch.empty(size, dtype=self.dtype, requires_grad=True)])
            passed.append(self._forward(number, chunk, batch, length * sequences))
        self._run_backward(passed)

    def _forward(self, number: int, chunk: Any, batch: LanguageBatch, num_tokens: int) -> Tensor:
        received = self._received(number, chunk.pre_process, num_tokens)
        return chunk(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            labels=batch.labels,
            loss_at=batch.loss_at,
            packed_seq_params=batch.segments,
            place=partial(self.model.place, batch, received) if chunk.pre_process else None,
            levels=self.model.levels(batch, received),
        )

    def _received(self, chunk: int, is_first: bool, num_tokens: int) -> list[ReceivedRows]:
        """Return the rows of each encoder for a chunk: all tokens are items of the first."""
        if self.model.whole_rows:
            num_tokens = self.recipe.longest_microbatch
        received = []
        for name in self.layout.encoders:
            count = 0 if received else num_tokens
            for link in self.layout.links_of(name):
                levels = link.chunks.count(chunk) if link.stage == self.stage else 0
                if levels:
                    width, trains = self.model.hidden_size, self.recipe.module(name).trains
                    token = torch.zeros((), requires_grad=trains)
                    rows = _Received.apply(token, (count, levels * width), self.dtype)
                    places = torch.arange(count)
                    received.append(ReceivedRows.of(rows, places, width, has_embeddings=is_first))
        return received

    # -------------------------------------------------------------------- encoders

    def _items(self, staging: Staging) -> Any:
        """Return the items of a full microbatch, or of a group that is encoded in one go."""
        settings = encoder_settings(self.recipe, self.name)
        form = settings.processor(self.recipe.encoders[self.name].media).wire
        plan = item_plan(self.recipe, self.name)
        count = items_at_once(self.recipe, self.layout, self.name)
        patches = None
        if self.stage == 0:
            with self.mode:
                width = (count * plan.num_patches, form.width)
                patches = [(form, torch.empty(width, dtype=_TORCH_DTYPES[form.dtype.name]))]
        return stage_items(
            [EncoderItems(patches, np.tile(np.array(plan.grid), (count, 1)))],
            self.module.whole,
            staging,
        )

    def _run_tower(self, batch: Any) -> None:
        tower = self.module.whole
        if self.stage > 0:
            size = tower.stage_shapes(batch.items).received
            tower.set_input_tensor([torch.empty(size, dtype=self.dtype, requires_grad=True)])
        with torch.set_grad_enabled(self.module.trains):
            output = tower(batch.patches, batch.items)
            output = getattr(output, "values", output)
            # The rows of colocated encoders stay until the backward; others are sent.
            if self.stage == self.grid.pp - 1 and self.name not in self.layout.colocated:
                output = _Sent.apply(output)
        self._run_backward([output])

    def _run_backward(self, outputs: list[Tensor]) -> None:
        """Run the backward of outputs, the last first."""
        self.kept = self.memory.now - sum(buffer.nbytes for buffer in shared_buffers())
        for output in reversed(outputs):
            if output.requires_grad:
                torch.autograd.backward(output, torch.empty_like(output))


_TORCH_DTYPES = {"uint8": torch.uint8, "float32": torch.float32}
