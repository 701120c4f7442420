"""The plan of one training step: which rank does what with which sample, in pure integers.

Every rank computes it from the data index alone and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bridge import (
    BridgePlan,
    ItemRuns,
    LaneSegments,
    ReplicatedSource,
    SequenceShardedSource,
    ShardMap,
    Source,
    assign_items,
    imbalance,
    replicated_destination,
    sharded_destination,
)
from data.batch import GlobalMicrobatch, Padding, plan_microbatch, sizes_in_order
from data.index.samples import Index
from data.order import SampleOrder
from data.packing import TokenBudget, Used, deal, packs_of_samples, packs_of_tokens
from mimo.layout.grids import GridSpec, Layout
from mimo.layout.levels import Link
from mimo.layout.padding import segment_multiple, sequence_multiple


@dataclass(frozen=True)
class PlannedItems:
    """The items of one encoder in a global microbatch, and how their rows are delivered.

    item: (k,) numbers in the microbatch, ascending. lane: (k,) the encoder lane of each.
    bridges: by link, all with the same rows; filled in for the planner's links once it is known
        which samples are unusable.
    """

    item: np.ndarray
    lane: np.ndarray
    bridges: dict[Link, BridgePlan] = field(default_factory=dict)

    def of_lane(self, lane: int) -> np.ndarray:
        """Numbers in the microbatch of the items that one encoder lane owns, in order."""
        return self.item[self.lane == lane]


@dataclass(frozen=True)
class PlannedMicrobatch:
    """One global microbatch and how its items are encoded and delivered, by encoder."""

    samples: GlobalMicrobatch
    encoders: dict[str, PlannedItems]

    def runs_of(self, encoder: str) -> ItemRuns:
        """The encoder's items as runs of rows."""
        samples, own = self.samples, self.encoders[encoder]
        sample = samples.item_sample[own.item]
        return ItemRuns(
            sample=sample,
            source_lane=own.lane,
            destination_lane=samples.lane[sample],
            position=samples.item_position[own.item],
            rows=samples.item_rows[own.item],
            num_samples=samples.num_samples,
        )


@dataclass(frozen=True)
class StepPlan:
    """All microbatches of a step.

    num_loss_tokens: N, of the whole global batch. num_tokens: real tokens, without padding.
    encoder_imbalance: largest lane load over the mean, averaged over the microbatches (or
    groups of them) that are encoded in one go, of the encoder where it is worst.
    """

    microbatches: tuple[PlannedMicrobatch, ...]
    num_loss_tokens: int
    num_tokens: int
    encoder_imbalance: float

    def bridges(self, link: Link) -> list[BridgePlan]:
        """For each microbatch, the plan of the bridge over ``link``."""
        return [m.encoders[link.encoder].bridges[link] for m in self.microbatches]


class StepPlanner:
    """Plans steps of a fixed shape over a fixed order of samples.

    media: by encoder, all media of the items that it encodes.
    delivery: "sharded" (each row only where it is needed) or "replicated" (to all ranks of a
        language lane).
    encode_group: microbatches that colocated encoders encode in one go; None for all.
    done: the steps before this run, and the samples used in them: they continue where they
        stopped, whatever the batch size or the budget was.
    packed: whether a lane's samples share one sequence.
    links: the bridges to plan; None for all. A rank needs only those that it is at one end of.
    tokens_on_rank: the multiple for the part of a sequence that a rank holds.
    budget: of the tokens of a lane's microbatch; then it has as many samples as fit instead of
        ``micro_batch_size``. linear_tokens: a lane's load of L tokens in one sample is
        L · (linear_tokens + L): the length at which attention costs as much as everything else.
    fixed_tokens: of every lane's sequence; None for those that its samples need.
    """

    def __init__(
        self,
        layout: Layout,
        media: Mapping[str, tuple[str, ...]],
        indexes: Sequence[Index],
        order: SampleOrder,
        micro_batch_size: int,
        num_microbatches: int,
        delivery: str = "sharded",
        encode_group: int | None = None,
        done: tuple[int, Used] = (0, Used()),
        packed: bool = True,
        links: Collection[Link] | None = None,
        tokens_on_rank: int = 1,
        budget: TokenBudget | None = None,
        linear_tokens: int = 0,
        fixed_tokens: int | None = None,
    ) -> None:
        assert budget is None or packed, "a budget is of the tokens of one sequence"
        assert not any(isinstance(own, str) for own in media.values()), "media are tuples of names"
        self.delivery = delivery
        self.encode_group = encode_group
        self._done = self._latest = done
        self.budget = budget
        self.linear_tokens = linear_tokens
        self.fixed_tokens = fixed_tokens
        self.layout = layout
        self.media = media
        self.indexes = indexes
        self.order = order
        self.micro_batch_size = micro_batch_size
        self.num_microbatches = num_microbatches
        language = layout.language
        self.links = {
            name: [link for link in layout.links_of(name) if links is None or link in links]
            for name in layout.encoders
        }
        self.padding = Padding(
            packed,
            segment=segment_multiple(language.cp),
            sequence=sequence_multiple(language.cp, language.tp, language.sp, tokens_on_rank),
        )

    def used_before(self, step: int) -> Used:
        """The samples used in all steps before this one; quick if asked in the order of steps."""
        known, used = self._latest if self._latest[0] <= step else self._done
        assert known <= step, f"step {step} is before the first step, {known}"
        for _ in range(known, step):
            used = used.with_packs(self._packs(used))
        self._latest = step, used
        return used

    def _packs(self, used: Used) -> list[np.ndarray]:
        """The next step's packs, lane by lane of each microbatch."""
        lanes = self.layout.language.dp
        count = self.num_microbatches * lanes
        if self.budget is None:
            return packs_of_samples(used, count, self.micro_batch_size)
        sizes = sizes_in_order(self.indexes, self.order)
        packs = packs_of_tokens(used, count, self.budget, sizes)
        tokens, _ = sizes(np.concatenate(packs))
        first = np.cumsum([0, *(len(pack) for pack in packs[:-1])])
        loads = np.add.reduceat(tokens * (self.linear_tokens + tokens), first)
        return [packs[pack] for pack in deal(loads, lanes).flat]

    def microbatches(self, step: int) -> list[PlannedMicrobatch]:
        """The microbatches of a step with items assigned to lanes, but nothing blanked yet."""
        used, lanes = self.used_before(step), self.layout.language.dp
        packs = self._packs(used)
        self._latest = step + 1, used.with_packs(packs)
        planned = []
        grids = self.layout.encoders
        step_loads = {name: np.zeros(grid.dp, np.int64) for name, grid in grids.items()}
        group_loads = {name: np.zeros(grid.dp, np.int64) for name, grid in grids.items()}
        for m in range(self.num_microbatches):
            samples = plan_microbatch(
                self.indexes,
                self.order,
                packs[m * lanes : (m + 1) * lanes],
                self.padding,
            )
            encoders = {}
            for name, grid in grids.items():
                if m % self._group_size(name) == 0:
                    group_loads[name][:] = 0
                item = samples.items_of_media(*self.media[name])
                cost = samples.item_cost[item]
                lane = assign_items(cost, grid.dp, group_loads[name], step_loads[name])
                for loads in (group_loads[name], step_loads[name]):
                    np.add.at(loads, lane, cost)
                encoders[name] = PlannedItems(item, lane)
            planned.append(PlannedMicrobatch(samples, encoders))
        return planned

    def _group_size(self, encoder: str) -> int:
        """Microbatches that the encoder encodes in one go, over which its lanes are balanced."""
        if encoder not in self.layout.colocated:
            return 1
        return self.encode_group or self.num_microbatches

    def finish(
        self, microbatches: Sequence[PlannedMicrobatch], unusable: Sequence[int] = ()
    ) -> StepPlan:
        """Blank the unusable samples and plan the bridges.

        unusable: sample numbers in the step, the same on every rank.
        """
        tokens = self.fixed_tokens
        if tokens is None and self.layout.language.vpp > 1:  # interleaved stages need one length
            tokens = max(m.samples.longest_sequence for m in microbatches)
        if tokens is not None:
            microbatches = [replace(m, samples=m.samples.padded_to(tokens)) for m in microbatches]
        finished = []
        for first, planned in zip(first_samples(microbatches), microbatches, strict=True):
            numbers = range(first, first + planned.samples.num_samples)
            here = [sample - first for sample in unusable if sample in numbers]
            kept = ~np.isin(planned.samples.item_sample, here)
            renumbered = np.cumsum(kept) - 1
            samples = planned.samples.without(here)
            encoders = {}
            for name, items in planned.encoders.items():
                usable = kept[items.item]
                item, lane = renumbered[items.item[usable]], items.lane[usable]
                encoders[name] = PlannedItems(item, lane)
            finished.append(PlannedMicrobatch(samples, encoders))
        for name, links in self.links.items():
            if not links:
                continue
            for planned, source in zip(finished, self._sources(name, finished), strict=True):
                bridges = self._bridges(name, planned, source)
                planned.encoders[name] = replace(planned.encoders[name], bridges=bridges)
        return StepPlan(
            microbatches=tuple(finished),
            num_loss_tokens=int(sum(m.samples.loss_tokens.sum() for m in finished)),
            num_tokens=int(sum(m.samples.length.sum() for m in finished)),
            encoder_imbalance=max(
                (self._imbalance(name, finished) for name in self.layout.encoders), default=1.0
            ),
        )

    def _imbalance(self, encoder: str, microbatches: Sequence[PlannedMicrobatch]) -> float:
        size = self._group_size(encoder)
        found = []
        for first in range(0, len(microbatches), size):
            group = microbatches[first : first + size]
            planned = [(m.samples.item_cost[m.encoders[encoder].item], m) for m in group]
            cost = np.concatenate([own for own, _ in planned])
            lane = np.concatenate([m.encoders[encoder].lane for _, m in planned])
            found.append(imbalance(cost, lane, self.layout.encoders[encoder].dp))
        return float(np.mean(found))

    def _sources(self, name: str, microbatches: Sequence[PlannedMicrobatch]) -> list[Source]:
        """Which rank of an encoder has which of its rows, per microbatch."""
        grid, size = self.layout.encoders[name], self._group_size(name)
        ranks = _ranks(grid, grid.pp - 1)[:, 0, :]
        planned = [(m.samples.item_rows, m.encoders[name]) for m in microbatches]
        rows = [
            np.bincount(own.lane, weights=of_item[own.item], minlength=grid.dp).astype(np.int64)
            for of_item, own in planned
        ]
        if not grid.sp:
            return [ReplicatedSource(mine, ranks) for mine in rows]
        groups = [rows[first : first + size] for first in range(0, len(rows), size)]
        return [s for g in groups for s in SequenceShardedSource.encoded_together(g, ranks)]

    def _bridges(
        self, name: str, planned: PlannedMicrobatch, source: Source
    ) -> dict[Link, BridgePlan]:
        runs, segments = planned.runs_of(name), _segments(planned.samples)
        return {
            link: BridgePlan.build(runs, source, *self._destination(link.stage, segments, runs))
            for link in self.links[name]
        }

    def _destination(
        self, stage: int, segments: LaneSegments, runs: ItemRuns
    ) -> tuple[ShardMap, ShardMap | None]:
        """Where rows go on a stage, and which ranks return gradients if rows have copies there."""
        language = self.layout.language
        ranks = _ranks(language, stage)
        if self.delivery == "sharded":
            return sharded_destination(segments, ranks, language.sp, runs), None
        # Every TP rank has a row's whole gradient: they return even shares.
        returning = sharded_destination(segments, ranks, False, runs)
        return replicated_destination(segments.tokens, ranks), returning


def first_samples(microbatches: Sequence[PlannedMicrobatch]) -> list[int]:
    """For each microbatch of a step, the number in the step of its first sample."""
    counts = [planned.samples.num_samples for planned in microbatches]
    return [0, *np.cumsum(counts[:-1]).tolist()]


def _ranks(grid: GridSpec, stage: int) -> np.ndarray:
    """(lanes, cp, tp) global ranks of one pipeline stage."""
    first = grid.rank(pp=stage)
    return np.arange(first, first + grid.dp * grid.cp * grid.tp).reshape(grid.dp, grid.cp, grid.tp)


def _segments(samples: GlobalMicrobatch) -> LaneSegments:
    """The padded segments of all lanes; what fills up a packed sequence is a segment too."""
    lanes = len(samples.lane_tokens)
    if not samples.packed:
        return LaneSegments(samples.lane, samples.segment_length, lanes, packed=False)
    used = np.bincount(samples.lane, weights=samples.segment_length, minlength=lanes)
    tail = samples.lane_tokens - used.astype(np.int64)
    lane = np.concatenate((samples.lane, np.arange(lanes)))
    length = np.concatenate((samples.segment_length, tail))
    order = np.argsort(lane, kind="stable")
    return LaneSegments(lane[order], length[order], lanes)
