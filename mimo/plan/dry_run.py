"""Run a microbatch of one rank without its numbers, and count the memory of its tensors.

The process pretends to be one rank of the whole job. It builds this rank's modules by the code that
trains them, on fake tensors (shapes without memory) and groups that send nothing. A full microbatch
whose tokens all stand for items then runs forward and backward. Under FSDP2 two of them run,
because gathered weights and whole gradients may stay between them.

Peak = state + inputs + (microbatches in flight - 1) · kept by one + peak of one forward and
backward. The kernels are those of a GPU: see `mimo.plan.dry_run_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor as fakes

from data.batch import PackedLane
from mimo.config.schema import Recipe
from mimo.device import Staging
from mimo.engines.contract import Draw
from mimo.engines.fsdp import sharding
from mimo.engines.fsdp.context import FsdpContext
from mimo.engines.fsdp.sharding import local_part
from mimo.errors import InputError
from mimo.families.registry import (
    encoder_settings,
    generator_settings,
    language_settings,
    weights_of,
)
from mimo.families.wire import DTYPES
from mimo.model import fsdp
from mimo.model.build import build_model
from mimo.model.dataset import targets
from mimo.model.decoding import EncoderItems
from mimo.model.inputs import (
    Batch,
    ReceivedRows,
    WholeBatch,
    stage_items,
    stage_lane,
    stage_whole,
)
from mimo.model.module_sizes import (
    RoleMemory,
    draw_size,
    item_plan,
    items_at_once,
    microbatches_at_once,
    microbatches_in_flight,
)
from mimo.model.modules import MimoModel
from mimo.model.outputs import HostDraw
from mimo.parallel.grids import LANGUAGE, Layout, num_microbatches
from mimo.parallel.groups import simulated_topology
from mimo.plan.dry_run_kernels import TensorMemory, gpu_kernels, shared_buffers


@dataclass(frozen=True)
class DryRun:
    """Bytes of one rank of a role.

    formula: what `mimo.model.memory` says. rank: the one that was simulated. state: weights,
    gradients, optimizer. inputs: of this step and the next. kept: by one microbatch between its
    forward and its backward. waiting: kept by the other microbatches at the peak. step: peak of one
    forward and backward.
    """

    formula: RoleMemory
    rank: int
    state: float
    inputs: float
    kept: float
    waiting: float
    step: float

    @property
    def total(self) -> float:
        return self.state + self.inputs + self.waiting + self.step


def dry_run(
    recipe: Recipe, layout: Layout, role: RoleMemory, rank: int, worst_experts: bool = False
) -> DryRun:
    """Simulate a rank of a role. Raises InputError, which names the role.

    worst_experts: whether the tokens of all ranks choose experts of this rank.

    The process must belong to no world, and is not fit for training afterwards.
    """
    size = language_settings(recipe).padded_vocab_size(1)
    with gpu_kernels(worst_experts), simulated_topology(layout, rank) as topology:
        names = [
            f"{module}.{weight.name}"
            for module in topology.modules
            for weight in weights_of(recipe, module, size)
        ]
        try:
            mode = fakes.FakeTensorMode(allow_non_fake_inputs=True)
            with ExitStack() as stack:
                stack.enter_context(mode)
                stack.enter_context(mock.patch.object(fsdp, "shard", _shard_outside_of_fakes))
                if recipe.generators:
                    from diffusers.models.modeling_utils import ModelMixin  # late: it takes seconds

                    build = classmethod(_build_without_weights)
                    stack.enter_context(mock.patch.object(ModelMixin, "from_pretrained", build))
                # Nothing is drawn for parameters that are said to be provided.
                model = build_model(recipe, topology, size, provided=names, trains=False)
            return _Rank(recipe, layout, role, rank, model, mode).run()
        except (fakes.DataDependentOutputException, fakes.DynamicOutputShapeException) as error:
            reason = f"the model branches on computed numbers ({error.func}); train a step instead"
            raise InputError(f"{role.role}, rank {rank}: {reason}") from error
        except (RuntimeError, ValueError, AssertionError) as error:
            raise InputError(f"{role.role}, rank {rank}: {error}") from error


def _shard_outside_of_fakes(module: nn.Module, ctx: FsdpContext) -> None:
    """Shard fake parameters with fake tensors off: a mesh needs the numbers of its ranks."""
    with fakes.unset_fake_temporarily():
        sharding.shard(module, ctx)


def _build_without_weights(
    kind: Any, folder: str, torch_dtype: torch.dtype, **options: Any
) -> nn.Module:
    """Build an autoencoder of diffusers by its configuration alone."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch_dtype)
    try:
        return kind.from_config(kind.load_config(folder))
    finally:
        torch.set_default_dtype(default)


class _Staging(Staging):
    """Makes inputs fake, except for integers, and counts them."""

    def __init__(self, mode: fakes.FakeTensorMode, memory: TensorMemory) -> None:
        super().__init__(None)
        self._mode, self._memory = mode, memory

    def copy(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            tensor = self._mode.from_tensor(tensor)
        self._memory.add(tensor)
        return tensor

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return self.copy(torch.cat(list(parts)))


@dataclass
class _Rank:
    """One module of a simulated rank. model: with fake parameters, which ``mode`` made."""

    recipe: Recipe
    layout: Layout
    role: RoleMemory
    rank: int
    model: MimoModel
    mode: fakes.FakeTensorMode

    def __post_init__(self) -> None:
        self.name, self.dtype = self.role.module, DTYPES[self.recipe.train.precision]
        self.module = cast("Any", self.model.modules[self.name])
        grid = self.layout.grids[self.name]
        self.stage, self.is_sharded = grid.coords(self.rank).pp, grid.engine == "fsdp"
        self.chunks = [self.module.whole] if self.is_sharded else self.module.chunks
        self.memory = TensorMemory()

    def run(self) -> DryRun:
        recipe, layout = self.recipe, self.layout
        trained = [p for chunk in self.chunks for p in chunk.parameters() if p.requires_grad]
        for param in trained if not self.is_sharded else ():  # DDP has a buffer for gradients
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        self.module.begin_step(False, 1.0)
        modules = [*self.chunks]
        if self.name in layout.generators and self.module.whole.encode.autoencoder is not None:
            modules.append(self.module.whole.encode.autoencoder.module)
        for part in modules:  # operations may return views of them
            for tensor in (*part.parameters(), *part.buffers()):
                self.memory.add(local_part(tensor))
        held, staging = self.memory.now, _Staging(self.mode, self.memory)
        make_batch, forward = {
            LANGUAGE: (self._tokens, self._run_language),
            **dict.fromkeys(self.layout.encoders, (self._items, self._run_tower)),
            **dict.fromkeys(self.layout.generators, (self._draw, self._run_generator)),
        }[self.name]
        batch = make_batch(staging)
        staged = self.memory.now
        batches = num_microbatches(recipe, layout) / microbatches_at_once(recipe, layout, self.name)
        in_flight = microbatches_in_flight(recipe, layout, self.name, self.stage)
        gradients, base = sum(p.numel() for p in trained) * max(4, self.dtype.itemsize), staged
        if self.is_sharded:  # FSDP2 makes gradients in the backward
            gradients = self.role.gradients
            base += gradients
        with self.mode, self.memory:
            if self.is_sharded and batches > 1:
                kept, peak = self._run_two(partial(forward, batch), base, in_flight > 1)
            else:
                outputs = forward(batch)
                kept = self.memory.now - staged - sum(buffer.nbytes for buffer in shared_buffers())
                self._run_backward(outputs)
                peak = self.memory.peak
        return DryRun(
            formula=self.role,
            rank=self.rank,
            state=held + gradients + self.role.optimizer,
            inputs=2 * batches * (staged - held),
            kept=kept,
            waiting=max(in_flight - 1, 0) * kept,
            step=peak - base,
        )

    def _run_two(
        self, forward: Callable[[], list[Tensor]], base: float, runs_ahead: bool
    ) -> tuple[float, float]:
        """Run two microbatches; FSDP2 may keep whole gradients and gathered weights between them.

        base: bytes before, and of gradients. runs_ahead: whether the second forward comes before
        the first backward. Returns the bytes that one microbatch keeps, and the peak without a
        second one that only waits.
        """
        memory, waiting, kept = self.memory, [forward()], 0.0
        if runs_ahead:
            before = memory.now
            waiting.append(forward())
            kept = memory.now - before
        with self.module.accumulate_only():
            self._run_backward(waiting.pop(0))
        first_peak = memory.peak - kept
        memory.peak = memory.now
        if not runs_ahead:
            waiting.append(forward())
            kept = memory.now - base
        self._run_backward(waiting.pop())
        return kept, max(first_peak, memory.peak)

    def _tokens(self, staging: Staging) -> Batch:
        """Return a full microbatch whose tokens all stand for items, and all have a loss."""
        data, tokens = self.recipe.data, self.recipe.longest_microbatch
        full, rest = divmod(tokens, data.sequence_length)
        lengths = (*[data.sequence_length] * full, *[rest] * (rest > 0))
        items, parts, ids = list[tuple[int, int]](), list[Any](), np.zeros(tokens, np.int64)
        for name in [*self.recipe.encoders][:1]:
            plan, gap = item_plan(self.recipe, name), int(self.model.takes_rows)
            rows = plan.num_rows
            for number, length in enumerate(lengths):
                starts = range(gap, length - rows + 1, rows + gap)  # gap: a token of text
                items += [(number * data.sequence_length + at, rows) for at in starts]
            parts = [(self.recipe.encoders[name].media, plan.grid)] * len(items)
        lane = PackedLane(
            input_ids=ids,
            labels=np.zeros(tokens, np.int64),
            loss_mask=np.ones(tokens, np.float32),
            position_ids=np.zeros((3, tokens), np.int64),
            lengths=lengths,
            real_lengths=lengths,
            packed=data.packing,
            items=tuple(items),
            parts=tuple(parts),
        )
        if self.model.takes_rows:
            for first, rows in items:
                ids[first : first + rows] = self.module.whole.placeholders.ids[parts[0][0]]
            return stage_whole(lane, self.module.whole, staging)
        model, forms = self.model, self.module.attention_forms()
        assert model.partition is not None, "a language rank has a partition adapter"
        rules, whole_rows = model.item_rules, model.whole_rows
        return stage_lane(lane, rules, model.partition, whole_rows, forms, staging, {})

    def _run_language(self, batch: Batch) -> list[Tensor]:
        if isinstance(batch, WholeBatch):
            num_rows = sum(sum(sizes) for sizes, _ in batch.inputs.order.values())
            (received,) = self._received(0, True, num_rows)
            (name,) = self.layout.encoders
            return [self.module.whole(inputs=batch.inputs, rows={name: received.side_by_side})]
        length, sequences = batch.size
        length //= self.module.sequence_parts
        whole, part = self.recipe.longest_microbatch, length * sequences
        num_rows = whole if self.model.whole_rows else part
        outputs = []  # the input of each chunk comes from another rank
        for number, chunk in enumerate(self.chunks):
            is_first = self.is_sharded or chunk.pre_process
            if not is_first:
                size = length, sequences, self.model.hidden_size
                chunk.set_input_tensor([torch.empty(size, dtype=self.dtype, requires_grad=True)])
            received = self._received(number, is_first, num_rows)
            outputs.append(
                chunk(
                    input_ids=batch.input_ids,
                    position_ids=batch.position_ids,
                    labels=batch.labels,
                    loss_at=batch.loss_at,
                    packed_seq_params=batch.segments,
                    place=partial(self.model.place, batch, received) if is_first else None,
                    levels=self.model.levels(batch, received),
                    emit=self._emit if self.recipe.generators else None,
                )
            )
            del received
        return outputs

    def _emit(self, hidden: Tensor) -> Tensor:
        """Return the sum of the generators' tokens; products keep rows until their gradient."""
        rows = hidden.transpose(0, 1).flatten(0, 1)
        tokens = []
        for name in self.layout.generators:
            items, _, of_item = draw_size(self.recipe, self.layout, name)
            ranks = self.layout.language.dp * self.layout.language.cp * self.module.sequence_parts
            sent = rows[: items * of_item * self.layout.generators[name].dp // ranks].clone()
            tokens.append(torch.dot(sent.flatten(), sent.detach().flatten()))
        return torch.stack(tokens).sum()

    def _received(self, chunk: int, is_first: bool, num_rows: int) -> list[ReceivedRows]:
        """Return the rows of each encoder for a chunk: all are items of the first."""
        received = []
        for name in self.layout.encoders:
            count = 0 if received else num_rows
            for link in self.layout.links_of(name):
                levels = link.chunks.count(chunk) if link.stage == self.stage else 0
                if levels:
                    width, trains = self.model.hidden_size, self.recipe.module(name).trains
                    # As rows of a bridge, a copy of a number is kept alive only by its use.
                    number = torch.zeros((), dtype=self.dtype, requires_grad=trains)
                    rows = number.expand(count, levels * width).contiguous()
                    places = torch.arange(count)
                    received.append(ReceivedRows.of(rows, places, width, has_embeddings=is_first))
        return received

    def _items(self, staging: Staging) -> Any:
        """Return the items of a full microbatch, or of a group that is encoded in one go."""
        settings = encoder_settings(self.recipe, self.name)
        form = settings.processor(self.recipe.encoders[self.name].media).wire
        plan = item_plan(self.recipe, self.name)
        count = items_at_once(self.recipe, self.layout, self.name)
        patches, dtype = None, torch.float32 if form.normalise is None else torch.uint8
        if self.stage == 0:
            with self.mode:
                patches = [(form, torch.empty(count * plan.num_patches, form.width, dtype=dtype))]
        items = EncoderItems(patches, np.tile(np.array(plan.grid), (count, 1)))
        return stage_items([items], self.module.whole, staging)

    def _draw(self, staging: Staging) -> Draw:
        """Return a draw of the largest items, one for each sample of a full microbatch."""
        settings = generator_settings(self.recipe, self.name)
        form = targets(settings, self.recipe.generators[self.name]).wire
        count, grid, num_rows = draw_size(self.recipe, self.layout, self.name)
        size = math.prod(grid)
        draw = Draw(
            grid=grid,
            patches=None,
            noise=torch.zeros(count, size, settings.in_channels),
            times=torch.zeros(count),
            rows=torch.arange(count * num_rows).view(count, num_rows),
            lengths=torch.full((count,), num_rows),
            weights=torch.zeros(count, dtype=torch.float64),
            counted=torch.zeros(count),
        )
        with self.mode:
            patches = torch.zeros(count * size, form.width, dtype=torch.uint8)
        return HostDraw([(form, patches)], draw).staged(staging)

    def _run_generator(self, draw: Draw) -> list[Tensor]:
        rows = torch.empty(draw.rows.numel(), self.model.hidden_size, dtype=self.dtype)
        rows.requires_grad_(self.recipe.trains_before_generators)
        return [(self.module.whole(draw, rows) * draw.weights).sum()]

    def _run_tower(self, batch: Any) -> list[Tensor]:
        tower, grid = self.module.whole, self.layout.grids[self.name]
        if self.stage > 0:
            size = tower.stage_shapes(batch.items).received
            tower.set_input_tensor([torch.empty(size, dtype=self.dtype, requires_grad=True)])
        with torch.set_grad_enabled(self.module.trains):
            output = tower(batch.patches, batch.items)
            output = getattr(output, "values", output)
            if self.stage == grid.pp - 1 and self.name not in self.layout.colocated:
                # Rows that are sent are kept until their gradient arrives, as by this product.
                output = torch.dot(output.flatten(), output.detach().flatten())
        return [output]

    def _run_backward(self, outputs: list[Tensor]) -> None:
        """Run the backward of outputs, the last first."""
        for output in reversed(outputs):
            if output.requires_grad:
                torch.autograd.backward(output, torch.empty_like(output))
