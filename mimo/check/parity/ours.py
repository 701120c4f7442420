"""Our side: one training step on the ranks of a layout, and what every module computes in it.

Recordings keep it call by call; the step's plan tells which rows of the whole tensors that is.

Letters: n rows of a tensor on this rank, T packed tokens of a lane, P patches, N rows of a tower,
H hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import override

import numpy as np
import torch.distributed as dist
from torch import Tensor

from data.index.reader import SampleReader
from mimo.check.parity.compare import LOGITS, PIXELS, OursOnRank, Part, level_point
from mimo.check.parity.recording import ROWS, Recording, record_language, record_tower
from mimo.check.verify.compare import Fault, Shard
from mimo.check.verify.run import WatchedSteps, open_trainer, train_watched
from mimo.config.schema import Recipe
from mimo.engines.contract import Module
from mimo.engines.megatron.groups import ProcessGroupCollection
from mimo.families.registry import language_settings
from mimo.model.step_plan import StepPlan
from mimo.ops.segments import zigzag_indices
from mimo.parallel.grids import LANGUAGE, Layout
from mimo.train.rank import join_world

_NOTHING = -1  # the place of padding


def run_ours(
    recipe: Recipe, layout: Layout, names: Collection[str], fault: Fault | None = None
) -> OursOnRank:
    """Be one rank of a world launched for this.

    names: of the parameters whose gradients and weights are wanted. fault: a deliberate bug.
    """
    if fault is not None:
        fault()
    join_world(recipe)
    trainer, dataset = open_trainer(recipe, layout)
    modules, rank = trainer.model.modules, dist.get_rank()
    watched = _WatchedStep(modules, rank, names)
    towers = {name: record_tower(m) for name, m in modules.items() if name != LANGUAGE}
    chunks = record_language(modules[LANGUAGE]) if LANGUAGE in modules else []
    steps = train_watched(trainer, dataset, watched, 1)
    assert watched.plan is not None
    places = _Places(dataset.readers[0], watched.plan)
    parts: list[Part] = []
    for chunk in chunks:
        parts += _language_parts(chunk, modules[LANGUAGE], places, rank)
    size, count = language_settings(recipe).hidden_size, len(watched.plan.microbatches)
    for name, recording in towers.items():
        group = (trainer.model.encode_group or count) if name in layout.colocated else 1
        batches = [range(n, min(n + group, count)) for n in range(0, count, group)]
        parts += _tower_parts(recording, modules[name], places, batches, size, rank)
    return OursOnRank(parts, steps)


class _WatchedStep(WatchedSteps):
    """Keeps the plan of the only step, and the weights that it begins with."""

    def __init__(self, modules: Mapping[str, Module], rank: int, names: Collection[str]) -> None:
        """names: of the parameters that are watched."""
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
        """Do nothing: the new weights are not compared."""


# ---------------------------------------------------------------------------- places


class _Places:
    """Rows of the whole tensors, in the order of the samples, of what a step's plan packs."""

    def __init__(self, reader: SampleReader, plan: StepPlan) -> None:
        index, self._plan = reader.index, plan
        patches = [int(np.prod(reader.plan(item).grid)) for item in range(index.num_items)]
        self._token_start = np.cumsum([0, *index.column("token_length")])
        self._row_start = np.cumsum([0, *index.column("item_rows")])
        self._patch_start = np.cumsum([0, *patches])

    def tokens(self, microbatch: int, lane: int, length: int) -> np.ndarray:
        """(T,) rows of the tokens of a lane, which has ``length`` of them."""
        samples = self._plan.microbatches[microbatch].samples
        found = np.full(length, _NOTHING)
        for i in samples.samples_of_lane(lane).tolist():
            start, count = int(samples.start[i]), int(samples.length[i])
            first = int(self._token_start[int(samples.sample[i])])
            found[start : start + count] = np.arange(first, first + count)
        return found

    def of_items(
        self, microbatches: Sequence[int], encoder: str, lane: int, rows: bool
    ) -> np.ndarray:
        """(N,) rows, or (P,) patches, of the items that a lane encodes in one call, in order."""
        starts = self._row_start if rows else self._patch_start
        found = [np.zeros(0, np.int64)]
        for planned in (self._plan.microbatches[m] for m in microbatches):
            items = planned.samples.item[planned.encoders[encoder].of_lane(lane)].tolist()
            found += [np.arange(int(starts[item]), int(starts[item + 1])) for item in items]
        return np.concatenate(found)


def _language_parts(chunk: Recording, module: Module, places: _Places, rank: int) -> Iterator[Part]:
    """What a chunk of the language model had of each point."""
    groups, where = module.groups, f"{module.name}, rank {rank}"
    for point, calls in chunk.states.items():
        for number, (lengths, values) in enumerate(zip(chunk.lengths, calls, strict=True)):
            of_lane = places.tokens(number, groups.dp.rank(), sum(lengths))
            held = _held_tokens(len(values), lengths, groups)
            columns = groups.tp.rank() * values.shape[1] if point == LOGITS else 0
            yield _part(point, where, of_lane[held], values, columns)


def _held_tokens(
    count: int, lengths: tuple[int, ...], groups: ProcessGroupCollection
) -> np.ndarray:
    """Places in the lane (n,) of the ``count`` tokens of a tensor that this rank has.

    They are all tokens, its context-parallel share, or its sequence-parallel share of that.
    lengths: of the segments, padded.
    """
    held = np.arange(sum(lengths))
    if count < len(held) and groups.cp.size() > 1:
        held = zigzag_indices(lengths, groups.cp.size(), groups.cp.rank()).numpy()
    if count < len(held):
        held = held.reshape(groups.tp.size(), count)[groups.tp.rank()]
    return held


def _tower_parts(
    recording: Recording,
    module: Module,
    places: _Places,
    batches: list[range],
    hidden_size: int,
    rank: int,
) -> Iterator[Part]:
    """What a tower had of each point. batches: microbatches of each call. hidden_size: H."""
    groups, where = module.groups, f"{module.name}, rank {rank}"
    for point, calls in recording.states.items():
        is_split = point != PIXELS and module.sequence_parts > 1
        for batch, values in zip(batches, calls, strict=True):
            whole = places.of_items(batch, module.name, groups.dp.rank(), rows=point == ROWS)
            count = len(values)
            start = groups.tp.rank() * count if is_split else 0
            # Blank rows, which come last, have no place.
            index = np.append(whole, np.full(start + count, _NOTHING))[start:][:count]
            if point != ROWS:
                yield _part(point, where, index, values)
                continue
            for number, rows in enumerate(values.split(hidden_size, dim=1)):
                yield _part(level_point(number), where, index, rows)


def _part(point: str, where: str, index: np.ndarray, values: Tensor, columns: int = 0) -> Part:
    """The values that are not padding, as a part of ``point``."""
    real = index != _NOTHING
    return Part(point, where, index[real], values.numpy()[real], columns)
