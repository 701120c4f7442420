"""The bridge plans of a step: which rank sends which rows to which, for all microbatches.

All microbatches are planned in one go as a single one, in which lane l of microbatch m is lane
m·L + l. Then the plan is split.

A rank plans only what its lanes send or receive. Because the ranks of a lane share its rows, that
depends on all items of the encoder lanes involved, and on all items of the language lanes that
these send to. So the work of a rank does not grow with the number of lanes.

Letters: M microbatches, E encoder lanes, L language lanes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bridge import (
    BridgePlan,
    ItemRuns,
    LaneSegments,
    ReplicatedSource,
    SequenceShardedSource,
    ShardMap,
    Source,
    replicated_destination,
    sharded_destination,
)
from bridge.runs import Ints, count_up, totals
from data.batch import GlobalMicrobatch
from mimo.parallel.grids import GridSpec, Layout, Link


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of a module's items in all microbatches of a step, and their places in sequences.

    An encoder makes the rows, and they go to these places. A generator's rows come from there: its
    plan is that of an encoder, whose communication runs backwards (`bridge/outputs.py`).
    """

    layout: Layout
    module: str
    delivery: str
    encode_group: int
    samples: Sequence[GlobalMicrobatch]
    runs: Sequence[ItemRuns]

    def plans(self, link: Link, rank: int | None = None) -> list[BridgePlan]:
        """Plan the bridge over ``link`` per microbatch, for all ranks or the lanes of ``rank``."""
        every, lanes = self._side_by_side, self.layout.language.dp
        gets = np.ones(len(self.runs) * lanes, np.bool_)
        if rank is not None:
            gets = self._lanes_reached_by(rank)
        lane, item = np.flatnonzero(gets), np.flatnonzero(gets[every.destination_lane])
        source_lane, source_number = np.unique(every.source_lane[item], return_inverse=True)
        runs = ItemRuns(
            sample=every.sample[item],
            source_lane=source_number,
            destination_lane=np.searchsorted(lane, every.destination_lane[item]),
            position=every.position[item],
            rows=every.rows[item],
            num_samples=every.num_samples,
        )
        destination, returning = self._destination(link, lane, runs)
        plan = BridgePlan.build(runs, self._source(source_lane), destination, returning)
        microbatch = every.destination_lane[item[plan.item]] // lanes
        bounds = np.searchsorted(microbatch, np.arange(len(self.runs) + 1)).tolist()
        whole = functools.cache(lambda: self.plans(link))
        partial = item.size < every.rows.size
        return [
            plan.part(
                slice(*bounds[m : m + 2]), runs, held, (lambda m=m: whole()[m]) if partial else None
            )
            for m, (runs, held) in enumerate(zip(self.runs, self._held, strict=True))
        ]

    @functools.cached_property
    def _side_by_side(self) -> ItemRuns:
        """All runs, with the lanes and samples of the microbatches numbered one after another."""
        senders, receivers = self.layout.item_grids[self.module].dp, self.layout.language.dp
        before = np.cumsum([0, *(runs.num_samples for runs in self.runs)]).tolist()
        columns = [
            (
                runs.sample + before[m],
                runs.source_lane + m * senders,
                runs.destination_lane + m * receivers,
                runs.position,
                runs.rows,
            )
            for m, runs in enumerate(self.runs)
        ]
        return ItemRuns(*map(np.concatenate, zip(*columns, strict=True)), num_samples=before[-1])

    def _lanes_reached_by(self, rank: int) -> np.ndarray:
        """Return (M·L,) bool: the language lanes with items on which a rank's transfers depend."""
        every, language = self._side_by_side, self.layout.language
        grid = self.layout.item_grids[self.module]
        gives = np.zeros((len(self.runs), grid.dp), np.bool_)
        gets = np.zeros((len(self.runs), language.dp), np.bool_)
        if rank in grid.ranks:
            gives[:, grid.coords(rank).dp] = True
        if rank in language.ranks:
            gets[:, language.coords(rank).dp] = True
        gives, gets = gives.reshape(-1), gets.reshape(-1)
        gives[every.source_lane[gets[every.destination_lane]]] = True
        gets[every.destination_lane[gives[every.source_lane]]] = True
        return gets

    @functools.cached_property
    def _rows(self) -> tuple[Ints, Ints, Ints]:
        """(M, E) rows of each lane, those encoded before them in the same go, and of all of it."""
        every, lanes = self._side_by_side, self.layout.item_grids[self.module].dp
        rows = totals(every.source_lane, every.rows, len(self.runs) * lanes).reshape(-1, lanes)
        together = np.arange(len(rows)) // self.encode_group
        before = np.cumsum(rows, axis=0) - rows
        total = np.add.reduceat(rows, np.arange(0, len(rows), self.encode_group))
        return rows, before - before[together * self.encode_group], total[together]

    @property
    def _held(self) -> Ints:
        """(M, E) rows on each rank of a lane, with padding."""
        rows, _, total = self._rows
        grid = self.layout.item_grids[self.module]
        return -(-total // grid.tp) if grid.sp else rows

    def _source(self, lane: Ints) -> Source:
        """Map rows to ranks of the encoder, for some lanes of all microbatches."""
        grid = self.layout.item_grids[self.module]
        rows, before, total = (values.reshape(-1)[lane] for values in self._rows)
        ranks = stage_ranks(grid, grid.pp - 1)[lane % grid.dp, 0]
        if grid.sp:
            return SequenceShardedSource(ranks, before, total)
        return ReplicatedSource(rows, ranks)

    def _destination(
        self, link: Link, lane: Ints, runs: ItemRuns
    ) -> tuple[ShardMap, ShardMap | None]:
        """Map rows to ranks of the link's stage, and copied rows to ranks that return gradients."""
        language, segments = self.layout.language, self._segments(lane)
        ranks = stage_ranks(language, link.stage)[lane % language.dp]
        if self.delivery == "sharded":
            return sharded_destination(segments, ranks, language.sp, runs), None
        # Every TP rank has a row's whole gradient: they return even shares.
        returning = sharded_destination(segments, ranks, False, runs)
        return replicated_destination(segments.tokens, ranks), returning

    def _segments(self, lane: Ints) -> LaneSegments:
        """Return the padded segments of these lanes, with the padding of a packed sequence."""
        lanes = self.layout.language.dp
        of_sample = np.concatenate([part.lane + m * lanes for m, part in enumerate(self.samples)])
        first = np.searchsorted(of_sample, lane)
        count = np.searchsorted(of_sample, lane, side="right") - first
        sample, number = np.repeat(first, count) + count_up(count), np.arange(lane.size)
        length = np.concatenate([part.segment_length for part in self.samples])[sample]
        if not self.samples[0].packed:
            return LaneSegments(np.repeat(number, count), length, lane.size, packed=False)
        tokens = np.concatenate([part.lane_tokens for part in self.samples])[lane]
        tail = tokens - totals(np.repeat(number, count), length, lane.size)
        length = np.insert(length, np.cumsum(count), tail)
        return LaneSegments(np.repeat(number, count + 1), length, lane.size)


def stage_ranks(grid: GridSpec, stage: int) -> np.ndarray:
    """Return (lanes, cp, tp) global ranks of one pipeline stage."""
    first = grid.rank(pp=stage)
    return np.arange(first, first + grid.dp * grid.cp * grid.tp).reshape(grid.dp, grid.cp, grid.tp)
