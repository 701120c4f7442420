"""The plan against a brute-force reading of what it must do, over hundreds of layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import (
    BridgePlan,
    ItemRuns,
    assign_items,
    gathered_destination,
    imbalance,
    replicated_source,
    sequence_parallel_destination,
)


@dataclass(frozen=True)
class Case:
    """A random layout: encoder ranks from 0 on, language ranks behind them."""

    encoder_lanes: int
    encoder_tp: int
    language_lanes: int
    language_tp: int
    sequence_parallel: bool
    runs: ItemRuns
    tokens: tuple[int, ...]

    def source_rank(self, lane: int, t: int) -> int:
        return lane * self.encoder_tp + t

    def destination_rank(self, lane: int, t: int) -> int:
        return self.encoder_lanes * self.encoder_tp + lane * self.language_tp + t

    def build(self) -> BridgePlan:
        rows = [sum(self.runs.split_sizes(lane)) for lane in range(self.encoder_lanes)]
        source = replicated_source(rows, self.encoder_tp, self.source_rank)
        if self.sequence_parallel:
            destination = sequence_parallel_destination(
                self.tokens, self.language_tp, self.destination_rank
            )
        else:
            destination = gathered_destination(
                self.tokens, self.runs, self.language_tp, self.destination_rank
            )
        return BridgePlan.build(self.runs, source, destination)

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Every row as (source lane, number in it, destination lane, position), one by one."""
        found, seen = [], Counter[int]()
        for i in range(self.runs.rows.size):
            lane = int(self.runs.source_lane[i])
            for r in range(int(self.runs.rows[i])):
                found.append(
                    (
                        lane,
                        seen[lane],
                        int(self.runs.destination_lane[i]),
                        int(self.runs.position[i]) + r,
                    )
                )
                seen[lane] += 1
        return found


@st.composite
def cases(draw) -> Case:
    encoder_lanes = draw(st.integers(1, 5))
    encoder_tp = draw(st.sampled_from([1, 2, 3, 4]))
    language_lanes = draw(st.integers(1, 5))
    language_tp = draw(st.sampled_from([1, 2, 4]))
    sample, position, destination, rows, tokens = [], [], [], [], []
    number = 0
    for lane in range(language_lanes):
        at = 0
        for _ in range(draw(st.integers(0, 3))):
            for _ in range(draw(st.integers(0, 3))):
                at += draw(st.integers(0, 4))
                count = draw(st.integers(0, 9))
                sample.append(number)
                position.append(at)
                destination.append(lane)
                rows.append(count)
                at += count
            number += 1
        at += draw(st.integers(1, 5))
        tokens.append(-(-at // language_tp) * language_tp)
    items = len(rows)
    owners = draw(st.lists(st.integers(0, encoder_lanes - 1), min_size=items, max_size=items))
    runs = ItemRuns(
        sample=np.array(sample, np.int64),
        source_lane=np.array(owners, np.int64),
        destination_lane=np.array(destination, np.int64),
        position=np.array(position, np.int64),
        rows=np.array(rows, np.int64),
        num_samples=number,
    )
    return Case(
        encoder_lanes,
        encoder_tp,
        language_lanes,
        language_tp,
        draw(st.booleans()),
        runs,
        tuple(tokens),
    )


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_row_arrives_once_where_its_position_lives(case: Case) -> None:
    plan = case.build()
    by_source = {(lane, number): (to, at) for lane, number, to, at in case.rows()}
    delivered = Counter[tuple[int, int]]()
    for p in range(plan.length.size):
        lane, _ = divmod(int(plan.source_rank[p]), case.encoder_tp)
        to_lane, t = divmod(
            int(plan.destination_rank[p]) - case.encoder_lanes * case.encoder_tp, case.language_tp
        )
        for r in range(int(plan.length[p])):
            expected_lane, position = by_source[lane, int(plan.source_local[p]) + r]
            local = int(plan.destination_local[p]) + r
            if case.sequence_parallel:
                local += t * (case.tokens[to_lane] // case.language_tp)
            assert (to_lane, local) == (expected_lane, position)
            delivered[to_lane, position] += 1
    # Exactly once each: the bytes that cross the grids are at their lower bound.
    assert delivered == Counter((to, at) for _, _, to, at in case.rows())


@settings(max_examples=200, deadline=None)
@given(cases())
def test_both_ends_of_every_message_agree_and_nothing_is_sent_for_nothing(case: Case) -> None:
    plan = case.build()
    senders = [
        case.source_rank(lane, t)
        for lane in range(case.encoder_lanes)
        for t in range(case.encoder_tp)
    ]
    receivers = [
        case.destination_rank(lane, t)
        for lane in range(case.language_lanes)
        for t in range(case.language_tp)
    ]
    wanted = {
        (lane, number): at + 1000 * to for lane, number, to, at in case.rows()
    }  # what each row is worth, as seen from the source
    sent: dict[tuple[int, int], list[int]] = {}
    for rank in senders:
        exchange = plan.sends(rank)
        assert all(count > 0 for count in exchange.counts)
        values = [wanted[rank // case.encoder_tp, int(i)] for i in exchange.index]
        start = 0
        for peer, count in zip(exchange.peers, exchange.counts, strict=True):
            sent[rank, peer] = values[start : start + count]
            start += count
    for rank in receivers:
        exchange = plan.receives(rank)
        lane, t = divmod(rank - len(senders), case.language_tp)
        shift = t * (case.tokens[lane] // case.language_tp) if case.sequence_parallel else 0
        values = [int(i) + shift + 1000 * lane for i in exchange.index]
        start = 0
        for peer, count in zip(exchange.peers, exchange.counts, strict=True):
            assert sent.pop((peer, rank)) == values[start : start + count]
            start += count
    assert not sent


@settings(max_examples=200, deadline=None)
@given(cases())
def test_no_replica_sends_or_receives_more_than_its_even_share_and_one_row(case: Case) -> None:
    plan = case.build()
    for lane in range(case.encoder_lanes):
        rows = plan.source_rows[lane]
        assert rows == sum(plan.split_sizes[lane])
        for t in range(case.encoder_tp):
            assert plan.sends(case.source_rank(lane, t)).num_rows <= rows // case.encoder_tp + 1
    if case.sequence_parallel:
        return
    for lane in range(case.language_lanes):
        rows = int(case.runs.rows[case.runs.destination_lane == lane].sum())
        for t in range(case.language_tp):
            received = plan.receives(case.destination_rank(lane, t)).num_rows
            assert received <= rows // case.language_tp + 1


@settings(max_examples=50, deadline=None)
@given(cases())
def test_equal_metadata_give_equal_digests_and_any_change_another(case: Case) -> None:
    plan = case.build()
    assert plan.digest == case.build().digest
    if case.runs.rows.sum() == 0:
        return
    runs = ItemRuns(
        sample=case.runs.sample,
        source_lane=case.runs.source_lane,
        destination_lane=case.runs.destination_lane,
        position=case.runs.position + 1,
        rows=case.runs.rows,
        num_samples=case.runs.num_samples,
    )
    tokens = tuple(t + case.language_tp for t in case.tokens)
    other = Case(**{**vars(case), "runs": runs, "tokens": tokens})
    assert plan.digest != other.build().digest


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_items_are_spread_within_a_third_of_the_best_possible(costs: list[int], lanes: int) -> None:
    assigned = assign_items(costs, lanes)
    loads = np.bincount(assigned, weights=costs, minlength=lanes) if costs else np.zeros(lanes)
    bound = max(sum(costs) / lanes, max(costs, default=0))
    assert loads.max() <= bound * (4 / 3) + max(costs, default=0) / 3
    assert imbalance(costs, assigned, lanes) >= 1.0
