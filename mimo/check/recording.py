"""Record what our modules compute in one training step, on the ranks of a layout of any engine.

Hooks record it call by call; the step's plan tells which rows of the whole tensors that is. Both
engines reach the same points. Megatron's tensors are sequence first (S, 1, H); those of
transformers' modules batch first (1, S, H), or flat in a tower.

Letters: n rows of a tensor on this rank, k columns, T packed tokens of a lane, S local tokens,
P patches, N rows of a tower, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, override

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.index.reader import SampleReader
from mimo.check.compare import LOGITS, PIXELS, POSITIONS, TOKENS, Fault, Part, RankSteps, Shard
from mimo.check.points import Recording, level_point, watch_blocks, watch_text
from mimo.check.steps import WatchedSteps, open_trainer, train_watched
from mimo.config.schema import Recipe
from mimo.engines.contract import Module
from mimo.engines.fsdp.language import LanguageModel
from mimo.engines.megatron.config import ProcessGroupCollection
from mimo.engines.megatron.module import MegatronModule
from mimo.families.registry import language_settings
from mimo.model.step_plan import StepPlan
from mimo.ops.segments import zigzag_indices
from mimo.parallel.grids import LANGUAGE, Layout
from mimo.train.rank import join_world

_ROWS = "rows"  # a tower's whole output: embeddings and all levels side by side
_PADDING = -1  # the index of padding


def run_points(recipe: Recipe, layout: Layout, names: set[str], fault: Fault | None) -> RankSteps:
    """Run one step as a rank of a new world; record all points, and the parameters ``names``."""
    if fault is not None:
        fault()
    join_world(recipe)
    trainer, dataset = open_trainer(recipe, layout)
    modules = trainer.model.modules
    watched = _WatchedStep(modules, dist.get_rank(), names)
    towers = {name: record_tower(m) for name, m in modules.items() if name != LANGUAGE}
    chunks = record_language(modules[LANGUAGE]) if LANGUAGE in modules else []
    steps = train_watched(trainer, dataset, watched, 1)
    assert watched.plan is not None
    parts = _Parts(dataset.readers[0], watched.plan)
    for chunk in chunks:
        parts.add_language(chunk, modules[LANGUAGE])
    size, count = language_settings(recipe).hidden_size, len(watched.plan.microbatches)
    for name, recording in towers.items():
        group = (trainer.model.encode_group or count) if name in layout.colocated else 1
        batches = [range(n, min(n + group, count)) for n in range(0, count, group)]
        parts.add_tower(recording, modules[name], batches, size)
    steps.points = parts.points
    return steps


class _WatchedStep(WatchedSteps):
    """Copies the plan of the only step, its gradients, and the weights before it."""

    def __init__(self, modules: Mapping[str, Module], rank: int, names: Collection[str]) -> None:
        super().__init__(modules, rank)
        self._names = names
        self.plan: StepPlan | None = None

    @property
    @override
    def shards(self) -> list[Shard]:
        return [shard for shard in super().shards if shard.name in self._names]

    @override
    def planned(self, step: int, plan: StepPlan) -> None:
        self.plan = plan
        self.note_weights()

    @override
    def updated(self, step: int, modules: Mapping[str, Module]) -> None:
        pass  # the new weights are not compared


class _Parts:
    """This rank's parts of points; rows of a whole tensor are in the order of the samples."""

    def __init__(self, reader: SampleReader, plan: StepPlan) -> None:
        self.points: dict[str, list[Part]] = {}
        index, self._plan = reader.index, plan
        patches = [reader.plan(item).num_patches for item in range(index.num_items)]
        self._token_start = np.cumsum([0, *index.column("token_length")])
        self._row_start = np.cumsum([0, *index.column("item_rows")])
        self._patch_start = np.cumsum([0, *patches])

    def add_language(self, chunk: LayoutRecording, module: Module) -> None:
        groups = module.groups
        for point, calls in chunk.states.items():
            for number, (lengths, values) in enumerate(zip(chunk.lengths, calls, strict=True)):
                of_lane = self._tokens(number, groups.dp.rank(), sum(lengths))
                held = _held_tokens(len(values), lengths, groups)
                column = groups.tp.rank() * values.shape[1] if point == LOGITS else 0
                self._add(point, module.name, of_lane[held], values, column)

    def add_tower(
        self, recording: LayoutRecording, module: Module, batches: list[range], hidden_size: int
    ) -> None:
        """Add what a tower computed of each point. batches: microbatches of each call."""
        groups = module.groups
        for point, calls in recording.states.items():
            is_split = point != PIXELS and module.sequence_parts > 1
            for batch, values in zip(batches, calls, strict=True):
                whole = self._items(batch, module.name, groups.dp.rank(), rows=point == _ROWS)
                count = len(values)
                start = groups.tp.rank() * count if is_split else 0
                # Blank rows, which come last, are padding.
                index = np.append(whole, np.full(start + count, _PADDING))[start:][:count]
                if point != _ROWS:
                    self._add(point, module.name, index, values)
                    continue
                for number, level in enumerate(values.split(hidden_size, dim=1)):
                    self._add(level_point(number), module.name, index, level)

    def _add(
        self, point: str, module: str, index: np.ndarray, values: Tensor, column: int = 0
    ) -> None:
        """Add the values that are not padding."""
        real = index != _PADDING
        where = f"{module}, rank {dist.get_rank()}"
        part = Part(where, index[real], column, values.numpy()[real])
        self.points.setdefault(point, []).append(part)

    def _tokens(self, microbatch: int, lane: int, length: int) -> np.ndarray:
        """Return (T,) rows of the tokens of a lane, which has ``length`` of them."""
        samples = self._plan.microbatches[microbatch].samples
        rows = np.full(length, _PADDING)
        for i in samples.samples_of_lane(lane).tolist():
            start, count = int(samples.start[i]), int(samples.length[i])
            first = int(self._token_start[int(samples.sample[i])])
            rows[start : start + count] = np.arange(first, first + count)
        return rows

    def _items(self, microbatches: range, encoder: str, lane: int, rows: bool) -> np.ndarray:
        """Return (N,) rows, or (P,) patches, of the items that a lane encodes in one call."""
        starts = self._row_start if rows else self._patch_start
        indices = [np.zeros(0, np.int64)]
        for planned in (self._plan.microbatches[m] for m in microbatches):
            items = planned.samples.item[planned.items[encoder].of_lane(lane)].tolist()
            indices += [np.arange(int(starts[item]), int(starts[item + 1])) for item in items]
        return np.concatenate(indices)


def _held_tokens(count: int, lengths: Sequence[int], groups: ProcessGroupCollection) -> np.ndarray:
    """Return positions in the lane (n,) of the ``count`` tokens of a tensor on this rank.

    They are all tokens, its context-parallel share, or its sequence-parallel share of that.
    lengths: of the segments, padded.
    """
    held = np.arange(sum(lengths))
    if count < len(held) and groups.cp.size() > 1:
        held = zigzag_indices(lengths, groups.cp.size(), groups.cp.rank()).numpy()
    if count < len(held):
        held = held.reshape(groups.tp.size(), count)[groups.tp.rank()]
    return held


@dataclass
class LayoutRecording(Recording):
    """The calls of one model chunk. lengths: of the language model's segments."""

    lengths: list[tuple[int, ...]] = field(default_factory=list)

    def keep_inputs(self, kwargs: dict[str, Any]) -> None:
        """Keep input_ids (1, S) and position_ids (3, 1, S) of a call of a language model."""
        self.lengths.append(kwargs["packed_seq_params"].lengths)
        self.keep(TOKENS, kwargs["input_ids"].T)
        self.keep(POSITIONS, kwargs["position_ids"][:, 0].T)

    def keep_output(self, point: str, layer: nn.Module) -> None:
        """Keep a layer's output (S, 1, H), which comes alone or as the first of several."""
        layer.register_forward_hook(
            lambda _, __, output: self.keep(
                point, (output if isinstance(output, Tensor) else output[0])[:, 0]
            )
        )


def record_language(module: Module) -> list[LayoutRecording]:
    """Watch all chunks of a language model; the recordings fill as the next steps compute."""
    if isinstance(module, MegatronModule):
        return [_record_chunk(cast("Any", chunk)) for chunk in module.raw]
    return [_record_text(cast("LanguageModel", module.whole))]


def record_tower(module: Module) -> LayoutRecording:
    """Watch an encoder; the recording fills as the next steps compute."""
    if isinstance(module, MegatronModule):
        return _record_stage(module)
    tower, recording = cast("Any", module.whole), LayoutRecording()
    keep = recording.keep
    tower.register_forward_pre_hook(lambda _, args: keep(PIXELS, tower.values(args[0].args[0])))
    watch_blocks(tower.units, tower.config, keep)
    tower.register_forward_hook(lambda _, __, output: keep(_ROWS, output.values))
    return recording


def _record_chunk(chunk: Any) -> LayoutRecording:
    recording = LayoutRecording()
    chunk.register_forward_pre_hook(
        lambda _, __, kwargs: recording.keep_inputs(kwargs), with_kwargs=True
    )
    if chunk.pre_process:
        _keep_first_input(recording, "language.embedding", chunk.decoder)
    for layer in chunk.decoder.layers:
        recording.keep_output(f"language.layers.{layer.layer_number - 1}", layer)
    if chunk.post_process:
        recording.keep_output("language.norm", chunk.decoder.final_layernorm)

        def keep_logits(head: nn.Module, args: tuple[Tensor, Tensor | None]) -> None:
            """Keep logits (S, 1, V/tp) of all tokens, which a step does not compute.

            args: hidden states and the head's weight if it is tied. A collective of tp.
            """
            with torch.no_grad():
                recording.keep(LOGITS, head.forward(*args)[0][:, 0])

        chunk.output_layer.register_forward_pre_hook(keep_logits)
    return recording


def _record_stage(module: MegatronModule) -> LayoutRecording:
    tower, recording = cast("Any", module.raw[0]), LayoutRecording()
    keep, stage, stages = recording.keep, module.groups.pp.rank(), module.groups.pp.size()
    if stage == 0:
        tower.register_forward_pre_hook(lambda _, args: keep(PIXELS, tower.values(args[0])))
        _keep_first_input(recording, "vision.embedding", tower.blocks)
    for layer in tower.blocks.layers:
        recording.keep_output(f"vision.blocks.{layer.layer_number - 1}", layer)
    if stage == stages - 1:
        tower.register_forward_hook(lambda _, __, output: keep(_ROWS, output.values))
    return recording


def _keep_first_input(recording: LayoutRecording, point: str, blocks: nn.Module) -> None:
    """Keep the hidden_states (S, 1, H) that a stack of layers receives."""
    blocks.register_forward_pre_hook(
        lambda _, __, kwargs: recording.keep(point, kwargs["hidden_states"][:, 0]), with_kwargs=True
    )


def _record_text(model: LanguageModel) -> LayoutRecording:
    recording = LayoutRecording()
    model.register_forward_pre_hook(lambda _, args: recording.keep_inputs(args[0].keywords))
    watch_text(model.text, recording.keep)

    def keep_logits(norm: nn.Module, args: object, hidden: Tensor) -> None:
        """Keep the logits of this rank, V/tp, from hidden (1, S, H): a collective of tp."""
        with torch.no_grad():
            logits, tp = model.logits(hidden)[0], model.ctx.tp
        part = logits if tp is None else logits.chunk(tp.size(), 1)[tp.get_local_rank()]
        recording.keep(LOGITS, part)

    model.text.norm.register_forward_hook(keep_logits)
    return recording
