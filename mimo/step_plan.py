"""The plan of one training step: which rank does what with which sample, in pure integers.

Every rank computes it from the data index alone and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bridge import (
    BridgePlan,
    ItemRuns,
    assign_items,
    gathered_destination,
    imbalance,
    replicated_source,
    sequence_parallel_destination,
)
from data.batch import GlobalMicrobatch, plan_microbatch
from data.index import Index
from data.order import SampleOrder
from mimo.layout import GridSpec, Layout


@dataclass(frozen=True)
class PlannedMicrobatch:
    """One global microbatch and how its items are encoded and delivered.

    item_lane: (m,) the encoder lane of each item. bridge: None without an encoder.
    """

    samples: GlobalMicrobatch
    item_lane: np.ndarray
    bridge: BridgePlan | None

    def items_of_lane(self, lane: int) -> np.ndarray:
        """Numbers in this microbatch of the items that an encoder lane owns, in order."""
        return np.flatnonzero(self.item_lane == lane)


@dataclass(frozen=True)
class StepPlan:
    """All microbatches of a step.

    num_loss_tokens: N, of the whole global batch. num_tokens: real tokens, without padding.
    encoder_imbalance: largest lane load over the mean, averaged over microbatches.
    """

    microbatches: tuple[PlannedMicrobatch, ...]
    num_loss_tokens: int
    num_tokens: int
    encoder_imbalance: float

    @property
    def bridges(self) -> list[BridgePlan]:
        """The bridge's plan of each microbatch; none without an encoder."""
        return [m.bridge for m in self.microbatches if m.bridge is not None]


class StepPlanner:
    """Plans steps of a fixed shape over a fixed order of samples."""

    def __init__(
        self,
        layout: Layout,
        indexes: Sequence[Index],
        order: SampleOrder,
        micro_batch_size: int,
        num_microbatches: int,
    ) -> None:
        assert len(layout.encoders) <= 1, "items of several encoders need an index of their own"
        self.layout = layout
        self.indexes = indexes
        self.order = order
        self.micro_batch_size = micro_batch_size
        self.num_microbatches = num_microbatches
        language = layout.language
        self.token_multiple = language.tp if language.sp else 1
        self.samples_per_microbatch = micro_batch_size * language.dp
        self.samples_per_step = self.samples_per_microbatch * num_microbatches

    def microbatches(self, step: int) -> list[PlannedMicrobatch]:
        """The microbatches of a step with items assigned to lanes, but nothing blanked yet."""
        first = step * self.samples_per_step
        planned = []
        for m in range(self.num_microbatches):
            samples = plan_microbatch(
                self.indexes,
                self.order,
                first + m * self.samples_per_microbatch,
                self.layout.language.dp,
                self.micro_batch_size,
                self.token_multiple,
            )
            lanes = self._encoder_grid().dp if self.layout.encoders else 1
            planned.append(PlannedMicrobatch(samples, assign_items(samples.item_cost, lanes), None))
        return planned

    def finish(
        self, microbatches: Sequence[PlannedMicrobatch], unusable: Sequence[int] = ()
    ) -> StepPlan:
        """Blank the unusable samples and plan the bridge.

        unusable: sample numbers in the step, the same on every rank.
        """
        if self.layout.language.vpp > 1:
            microbatches = _equal_lengths(microbatches)
        finished = []
        for m, planned in enumerate(microbatches):
            first = m * self.samples_per_microbatch
            here = [s - first for s in unusable if 0 <= s - first < self.samples_per_microbatch]
            kept = ~np.isin(planned.samples.item_sample, here)
            samples = planned.samples.without(here)
            item_lane = planned.item_lane[kept]
            bridge = self._bridge(samples, item_lane) if self.layout.encoders else None
            finished.append(PlannedMicrobatch(samples, item_lane, bridge))
        lanes = self._encoder_grid().dp if self.layout.encoders else 1
        imbalances = [imbalance(m.samples.item_cost, m.item_lane, lanes) for m in finished]
        return StepPlan(
            microbatches=tuple(finished),
            num_loss_tokens=int(sum(m.samples.loss_tokens.sum() for m in finished)),
            num_tokens=int(sum(m.samples.length.sum() for m in finished)),
            encoder_imbalance=float(np.mean(imbalances)),
        )

    def _encoder_grid(self) -> GridSpec:
        (grid,) = self.layout.encoders.values()
        return grid

    def _bridge(self, samples: GlobalMicrobatch, item_lane: np.ndarray) -> BridgePlan:
        encoder, language = self._encoder_grid(), self.layout.language
        runs = ItemRuns(
            sample=samples.item_sample,
            source_lane=item_lane,
            destination_lane=samples.lane[samples.item_sample],
            position=samples.item_position,
            rows=samples.item_rows,
            num_samples=samples.num_samples,
        )
        rows = np.bincount(item_lane, weights=samples.item_rows, minlength=encoder.dp)
        source = replicated_source(
            rows.astype(np.int64).tolist(),
            encoder.tp,
            lambda lane, t: encoder.rank(dp=lane, pp=encoder.pp - 1, tp=t),
        )
        tokens = samples.lane_tokens.tolist()
        if language.sp:
            destination = sequence_parallel_destination(
                tokens, language.tp, lambda lane, t: language.rank(dp=lane, tp=t)
            )
        else:
            destination = gathered_destination(
                tokens, runs, language.tp, lambda lane, t: language.rank(dp=lane, tp=t)
            )
        return BridgePlan.build(runs, source, destination)


def _equal_lengths(microbatches: Sequence[PlannedMicrobatch]) -> list[PlannedMicrobatch]:
    """Pad every lane of every microbatch to the longest: interleaved stages need one length."""
    longest = max(int(m.samples.lane_tokens.max()) for m in microbatches)
    return [
        replace(
            m,
            samples=replace(m.samples, lane_tokens=np.full_like(m.samples.lane_tokens, longest)),
        )
        for m in microbatches
    ]
