"""What a rank plans of a step's bridges, against plans of all ranks, made one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bridge import DrawnIndex
from bridge import (
    BridgePlan,
    LaneSegments,
    ReplicatedSource,
    Source,
    replicated_destination,
    sharded_destination,
)
from data.order import SampleOrder
from data.packing import TokenBudget
from mimo.model.step_plan import PlannedMicrobatch, StepPlan, StepPlanner
from mimo.parallel.connections import bridge_ends
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout, Link
from tests.bridge.layouts import cut_together, lanes_of

INDEX = DrawnIndex(num_samples=90)
LINKS = (Link("vision"), Link("vision", 1, (1, 2), (0, 0)))


@dataclass(frozen=True)
class Case:
    """A layout of two stages at most, and how its steps are planned."""

    layout: Layout
    delivery: str
    packed: bool
    budget: TokenBudget | None
    num_microbatches: int
    encode_group: int | None

    def plan(self, rank: int | None, unusable: list[int]) -> StepPlan:
        index: Any = INDEX
        planner = StepPlanner(
            self.layout,
            {"vision": ("image",)},
            [index],
            SampleOrder([len(INDEX)], [1.0], seed=0, block=1),
            micro_batch_size=2,
            num_microbatches=self.num_microbatches,
            delivery=self.delivery,
            encode_group=self.encode_group,
            packed=self.packed,
            budget=self.budget,
            rank=rank,
        )
        return planner.finish(planner.microbatches(0), unusable)

    def ends(self, link: Link, rank: int) -> tuple[list[int], list[int]]:
        """The ranks of this rank's encoder lane, and those of its language lane on the link."""
        encoder, language = self.layout.encoders["vision"], self.layout.language
        senders = [r for r in encoder.ranks if _same_lane(encoder, r, rank)]
        stage = [r for r in language.ranks if language.coords(r).pp == link.stage]
        return senders, [r for r in stage if _same_lane(language, r, rank)]


def _same_lane(grid: GridSpec, one: int, other: int) -> bool:
    return other in grid.ranks and grid.coords(one).dp == grid.coords(other).dp


@st.composite
def cases(draw: st.DrawFn) -> Case:
    colocated, encoder_tp = draw(st.booleans()), draw(st.sampled_from([1, 2, 4]))
    tp, cp, pp, dp = (
        draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2], [1, 2], [1, 2, 3])
    )
    size = tp * cp * pp * dp
    if colocated:
        encoder_tp = max(n for n in (1, 2, 4) if n <= encoder_tp and size % n == 0)
    lanes = size // encoder_tp if colocated else draw(st.sampled_from([1, 3, 4, 5]))
    encoder = GridSpec("vision", tp=encoder_tp, sp=encoder_tp > 1 and draw(st.booleans()), dp=lanes)
    offset = 0 if colocated else encoder.size
    sp = tp > 1 and draw(st.booleans())
    language = GridSpec(LANGUAGE, tp=tp, sp=sp, cp=cp, pp=pp, dp=dp, rank_offset=offset)
    together = frozenset(["vision"]) if colocated else frozenset()
    possible = [n for n in (1, 2, 3) if lanes % n == dp % n == 0 and not (colocated and n > 1)]
    links, blocks = {"vision": LINKS[:pp]}, draw(st.sampled_from(possible))
    layout = Layout(language, {"vision": encoder}, size + offset, together, links, blocks)
    packed = draw(st.booleans())
    return Case(
        layout,
        draw(st.sampled_from(["sharded", "replicated"])),
        packed,
        draw(st.none() | st.just(TokenBudget(9000, window=20))) if packed else None,
        draw(st.integers(1, 4)),
        draw(st.none() | st.integers(1, 2)),
    )


@settings(max_examples=60, deadline=None)
@given(cases(), st.lists(st.integers(0, 5), max_size=2), st.data())
def test_a_rank_plans_for_its_lanes_what_the_plan_for_all_ranks_says(
    case: Case, unusable: list[int], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, case.layout.world_size - 1))
    own, everything = case.plan(rank, unusable), case.plan(None, unusable)
    for link in case.layout.links_of("vision"):
        one_by_one = planned_one_by_one(case, link, everything.microbatches)
        senders, receivers = case.ends(link, rank)
        block_of = {
            rank: block
            for block, ends in enumerate(bridge_ends(case.layout, link))
            for rank in (*ends[0], *ends[1])
        }
        for got, full, expected in zip(
            own.bridges[link], everything.bridges[link], one_by_one, strict=True
        ):
            assert got.digest == full.digest == expected.digest
            for one, other in zip(full.source_rank, full.destination_rank, strict=True):
                assert block_of[int(one)] == block_of[int(other)]
            assert got.held_rows.tolist() == expected.held_rows.tolist()
            assert got.source_parts == expected.source_parts
            for lane in range(case.layout.encoders["vision"].dp):
                assert got.runs.rows_of_lane(lane) == expected.runs.rows_of_lane(lane)
            for name, ranks in (
                ("sends", senders),
                ("collects", senders),
                ("receives", receivers),
                ("returns", receivers),
            ):
                for one in ranks:
                    found, needed = (getattr(plan, name)(one) for plan in (got, expected))
                    assert (found.peers, found.counts) == (needed.peers, needed.counts)
                    np.testing.assert_array_equal(found.index, needed.index)


def test_what_a_rank_plans_does_not_grow_with_the_number_of_lanes() -> None:
    pieces = []
    for lanes in (4, 40):
        language = GridSpec(LANGUAGE, dp=lanes, tp=2, sp=True, rank_offset=lanes)
        layout = Layout(language, {"vision": GridSpec("vision", dp=lanes)}, 3 * lanes)
        case = Case(layout, "sharded", True, None, 3, None)
        own, everything = (case.plan(rank, []).bridges[Link("vision")] for rank in (0, None))
        pieces.append([sum(plan.length.size for plan in plans) for plans in (own, everything)])
    assert pieces[1][1] > 8 * pieces[0][1]
    assert pieces[1][0] < 2 * pieces[0][1]


# --------------------------------------------------------------- one microbatch after another


def planned_one_by_one(
    case: Case, link: Link, microbatches: tuple[PlannedMicrobatch, ...]
) -> list[BridgePlan]:
    """The plans for all ranks, each from the samples of its microbatch alone."""
    language = case.layout.language
    ranks = ranks_of(language, link.stage)
    found = []
    for planned, source in zip(microbatches, sources(case, microbatches), strict=True):
        runs, segments = planned.runs_of("vision"), segments_of(planned)
        if case.delivery == "sharded":
            maps = (sharded_destination(segments, ranks, language.sp, runs), None)
        else:
            returning = sharded_destination(segments, ranks, False, runs)
            maps = (replicated_destination(segments.tokens, ranks), returning)
        found.append(BridgePlan.build(runs, source, *maps))
    return found


def ranks_of(grid: GridSpec, stage: int) -> np.ndarray:
    """(lanes, cp, tp)."""
    return np.array(
        [
            [[grid.rank(dp, stage, cp, tp) for tp in range(grid.tp)] for cp in range(grid.cp)]
            for dp in range(grid.dp)
        ]
    )


def sources(case: Case, microbatches: tuple[PlannedMicrobatch, ...]) -> list[Source]:
    grid, size = case.layout.encoders["vision"], 1
    if case.layout.colocated:
        size = case.encode_group or len(microbatches)
    ranks = ranks_of(grid, 0)[:, 0]
    rows = [
        np.array([sum(m.runs_of("vision").rows_of_lane(lane)) for lane in range(grid.dp)])
        for m in microbatches
    ]
    if not grid.sp:
        return [ReplicatedSource(own, ranks) for own in rows]
    groups = [rows[first : first + size] for first in range(0, len(rows), size)]
    return [s for g in groups for s in cut_together(g, ranks)]


def segments_of(planned: PlannedMicrobatch) -> LaneSegments:
    samples = planned.samples
    lengths = [
        samples.segment_length[samples.lane == lane].tolist()
        for lane in range(len(samples.lane_tokens))
    ]
    if not samples.packed:
        return lanes_of(lengths, packed=False)
    ends = zip(lengths, samples.lane_tokens.tolist(), strict=True)
    return lanes_of([[*own, tokens - sum(own)] for own, tokens in ends])
