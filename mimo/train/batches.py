"""The global batches of a split, one after another, as one rank sees them.

All ranks make the same plan, and each reads its own part. What one rank cannot read, all leave out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
import torch.distributed as dist

from bridge import SampleKeys
from data.batch import PackedLane
from data.packing import Used
from mimo.device import local_device
from mimo.layout.grids import LANGUAGE, num_microbatches
from mimo.layout.groups import Topology
from mimo.recipe.schema import Recipe
from mimo.step.dataset import Dataset, linear_tokens, token_budget
from mimo.step.loader import EncoderItems, LoadedStep, StepLoader, gather_items, pack_language
from mimo.step.plan import StepPlan, StepPlanner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankBatch:
    """What the modules of this rank compute on in one step.

    language: the packed microbatches of its lane, on language ranks. items: those of its lane, by
    encoder on this rank. name, sample_keys: for messages; the keys are those of one microbatch.
    """

    name: str
    plan: StepPlan
    language: list[PackedLane]
    items: dict[str, list[EncoderItems]]
    sample_keys: SampleKeys


class Batches:
    """The batches of ``steps`` in order; a context manager that every rank of the world enters.

    For each batch call `plan`, then `read`, then `read_next` and `sum_over_world`.
    name: what messages call one batch, such as "step". used: the samples before the first batch;
    later, those before the batch at hand.
    ahead: batches to read ahead of use. encode_group: as for `StepPlanner`.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        topology: Topology,
        dataset: Dataset,
        steps: range,
        used: Used,
        ahead: int,
        encode_group: int | None,
    ) -> None:
        self.name = name
        self.steps = steps
        self.dataset = dataset
        self.used = used
        self._layout, self._rank = topology.layout, topology.rank
        self._media = {name: one.media for name, one in recipe.encoders.items()}
        self._planner = StepPlanner(
            topology.layout,
            {name: tuple(one.media_tokens) for name, one in recipe.encoders.items()},
            dataset.indexes,
            dataset.order,
            recipe.train.micro_batch_size,
            num_microbatches(recipe, topology.layout),
            delivery=recipe.bridge.delivery,
            encode_group=encode_group,
            done=(steps.start, used),
            packed=recipe.data.packing,
            links=topology.bridges,
            budget=token_budget(recipe),
            linear_tokens=linear_tokens(recipe),
        )
        self._loader = StepLoader(
            self._planner,
            dataset.readers,
            topology.layout,
            topology.rank,
            steps.start,
            steps.stop,
            ahead,
        )
        self._left = len(steps)
        self._loaded: LoadedStep | None = None
        self._unusable: list[int] = []

    def __enter__(self) -> Self:
        try:
            self.read_next()
            self.sum_over_world()
        except BaseException:
            self._loader.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loader.close()

    def plan(self) -> StepPlan:
        """The plan of the current batch, without its unusable samples; the same on all ranks."""
        return self._planner.finish(self._at_hand.microbatches, self._unusable)

    def unusable_samples(self) -> set[tuple[int, int]]:
        """(data source, sample) of each sample left out of the current batch."""
        microbatches = [planned.samples for planned in self._at_hand.microbatches]
        source = np.concatenate([samples.source for samples in microbatches])[self._unusable]
        sample = np.concatenate([samples.sample for samples in microbatches])[self._unusable]
        return set(zip(source.tolist(), sample.tolist(), strict=True))

    def read(self, plan: StepPlan) -> RankBatch:
        """What this rank needs of the current batch, in the order of its plan."""
        loaded, dataset, language, items = self._at_hand, self.dataset, [], {}
        readers = dataset.readers
        for name in self._layout.modules_of(self._rank):
            coords = self._layout.grids[name].coords(self._rank)
            if name == LANGUAGE:
                padding = readers[0].chat.pad_token_id
                language = pack_language(loaded, plan, readers, coords.dp, padding)
            else:
                dim = readers[0].processors[self._media[name]].patch_dim
                items[name] = gather_items(loaded, plan, readers, name, coords, dim)

        def sample_keys(microbatch: int) -> list[str]:
            return dataset.sample_keys(plan.microbatches[microbatch].samples)

        return RankBatch(f"{self.name} {loaded.step}", plan, language, items, sample_keys)

    def read_next(self) -> None:
        """Move on to the next batch, which is already being read; after the last there is none."""
        if self._loaded is not None:
            self.used = self._loaded.used
        self._loaded = self._loader.next() if self._left > 0 else None
        self._left -= 1

    def sum_over_world(self, *values: float) -> list[float]:
        """Sum ``values`` over all ranks, after `read_next`; every rank of the world calls it.

        The same message carries which samples of the current batch each rank could not read.
        """
        sums = sum_over_world([*values, *self._flags()])
        flags = sums[len(values) :]
        self._unusable = [sample for sample, flag in enumerate(flags) if flag > 0]
        return sums[: len(values)]

    @property
    def _at_hand(self) -> LoadedStep:
        assert self._loaded is not None, "there is no batch after the last one"
        return self._loaded

    def _flags(self) -> list[float]:
        """For each sample of the current batch, 1 if this rank could not read it."""
        if self._loaded is None:
            return []
        flags = [0.0] * sum(m.samples.num_samples for m in self._loaded.microbatches)
        for sample, error in self._loaded.unusable.items():
            flags[sample] = 1.0
            logger.warning("skipped %s", error)
        return flags


def sum_over_world(values: Sequence[float]) -> list[float]:
    """Element-wise sum over all ranks, in fp64; every rank calls it with equally many values."""
    if not values:
        return []
    total = torch.tensor(list(values), dtype=torch.float64, device=local_device())
    dist.all_reduce(total)
    return total.tolist()
