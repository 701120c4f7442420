"""Our side: one training step on the ranks of a layout, and what every module computes in it.

Letters: n rows of a tensor on this rank, k columns, N rows of a tower, H hidden, L levels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, override

import numpy as np
from torch import Tensor

from mimo.engines.megatron.module import MegatronModule as Module
from mimo.families.registry import language_settings
from mimo.hf.initial import initial_weights
from mimo.layout.grids import LANGUAGE, Layout
from mimo.layout.groups import Topology, build_topology
from mimo.model.modules import MimoModel
from mimo.parity.places import NOTHING, Places, held_part, held_tokens
from mimo.parity.recording import ROWS, Recording, record_language, record_tower
from mimo.parity.results import LOGITS, PIXELS, OursOnRank, Part, level_point
from mimo.recipe.schema import Recipe
from mimo.step.dataset import open_dataset
from mimo.step.plan import StepPlan
from mimo.train.loop import Trainer
from mimo.train.rank import collective_timeout, join_world
from mimo.verify.results import Fault, RankSteps
from mimo.verify.run import WatchedSteps


def run_ours(
    recipe: Recipe, layout: Layout, names: Collection[str], fault: Fault | None = None
) -> OursOnRank:
    """Be one rank of a world launched for this.

    names: of the parameters whose gradients and weights are wanted. fault: a deliberate bug.
    """
    if fault is not None:
        fault()
    join_world(recipe)
    topology = build_topology(layout, collective_timeout(recipe))
    trainer = Trainer(recipe, topology, Path(recipe.train.run_dir), initial_weights(recipe))
    dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
    assert dataset is not None
    modules: Any = trainer.model.modules
    watched = _WatchedStep(modules, topology.rank, names)
    towers = {name: record_tower(m) for name, m in modules.items() if name != LANGUAGE}
    chunks = record_language(modules[LANGUAGE]) if LANGUAGE in modules else []
    steps = trainer.train(dataset, None, watched)
    metrics = next(steps)
    steps.close()
    assert watched.plan is not None
    places = Places(dataset.readers[0], watched.plan)
    parts: list[Part] = []
    for chunk in chunks:
        parts += _language_parts(chunk, modules[LANGUAGE], places, topology.rank)
    size = language_settings(recipe).hidden_size
    for name, recording in towers.items():
        count = len(watched.plan.microbatches)
        batches = _batches_of_calls(trainer.model, topology, name, count)
        parts += _tower_parts(recording, modules[name], places, batches, size, topology.rank)
    return OursOnRank(parts, RankSteps([metrics], watched.shards))


class _WatchedStep(WatchedSteps):
    """Keeps the plan of the only step, and the weights that it begins with."""

    def __init__(self, modules: Mapping[str, Module], rank: int, names: Collection[str]) -> None:
        """names: of the parameters that are watched."""
        super().__init__(modules, rank)
        self.parameters = [pair for pair in self.parameters if pair[0].name in names]
        self.plan: StepPlan | None = None

    @override
    def planned(self, step: int, plan: StepPlan) -> None:
        self.plan = plan
        self.note_weights()

    @override
    def updated(self, step: int, modules: Mapping[str, Module]) -> None:
        """Do nothing: the new weights are not compared."""


def _language_parts(chunk: Recording, module: Module, places: Places, rank: int) -> Iterator[Part]:
    """What a chunk of the language model had of each point."""
    groups, where = module.groups, f"{module.name}, rank {rank}"
    for point, calls in chunk.states.items():
        for number, values in enumerate(calls):
            lengths = chunk.lengths[number]
            of_lane = places.tokens(number, groups.dp.rank(), sum(lengths))
            held = held_tokens(len(values), lengths, groups)
            columns = groups.tp.rank() * values.shape[1] if point == LOGITS else 0
            yield _part(point, where, of_lane[held], values, columns)


def _batches_of_calls(
    model: MimoModel, topology: Topology, encoder: str, num_microbatches: int
) -> list[range]:
    """For each call of an encoder, the microbatches whose items it encodes."""
    size = 1
    if encoder in topology.layout.colocated:
        size = model.encode_group or num_microbatches
    starts = range(0, num_microbatches, size)
    return [range(start, min(start + size, num_microbatches)) for start in starts]


def _tower_parts(
    recording: Recording,
    module: Module,
    places: Places,
    batches: list[range],
    hidden_size: int,
    rank: int,
) -> Iterator[Part]:
    """What a tower had of each point. hidden_size: H."""
    groups, where = module.groups, f"{module.name}, rank {rank}"
    for point, calls in recording.states.items():
        for batch, values in zip(batches, calls, strict=True):
            items = places.items(batch, module.name, groups.dp.rank())
            whole = places.rows(items) if point == ROWS else places.patches(items)
            parts = 1 if point == PIXELS else module.sequence_parts
            held = held_part(len(values), len(whole), parts, groups.tp.rank())
            # Blank rows have no place.
            index = np.append(whole, NOTHING)[held]
            if point != ROWS:
                yield _part(point, where, index, values)
                continue
            for number, rows in enumerate(values.split(hidden_size, dim=1)):
                yield _part(level_point(number), where, index, rows)


def _part(point: str, where: str, index: np.ndarray, values: Tensor, columns: int = 0) -> Part:
    """The values that are not padding, as a part of ``point``."""
    real = index != NOTHING
    return Part(point, where, index[real], values.numpy()[real], columns)
