"""The plan against a row-by-row reading of what it must do, over hundreds of layouts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import (
    BridgePlan,
    Exchange,
    assign_items,
    imbalance,
    sharded_destination,
)
from tests.bridge.layouts import Case, Traffic, cases, filled, lanes_of, simulate


def rows_by_peer(exchange: Exchange) -> list[np.ndarray]:
    return np.split(exchange.index, np.cumsum(exchange.counts)[:-1]) if exchange.peers else []


def crossing_rows(plan: BridgePlan) -> int:
    """Rows that messages carry forward; copies on a rank do not count."""
    return int(plan.length[plan.source_rank != plan.destination_rank].sum())


def check_forward(case: Case, traffic: Traffic) -> None:
    """Every row is where it is needed, once, and nothing else is anywhere."""
    for rank, arrived in traffic.arrived.items():
        sequence = case.local_sequence[rank]
        for row, local in arrived:
            assert sequence[local] == row
    for lane, c in np.ndindex(*case.language_ranks.shape[:2]):
        group = case.language_ranks[lane, c].tolist()
        got = {rank: Counter(row for row, _ in traffic.arrived[rank]) for rank in group}
        if case.delivery == "shared_out":
            together = sum(got.values(), Counter())
            assert together == Counter(case.rows_of(case.cp_sequence[lane, c]))
        else:
            for rank in group:
                assert got[rank] == Counter(case.rows_of(case.local_sequence[rank]))


def check_backward(case: Case, traffic: Traffic) -> None:
    """Every row's gradient is complete where it leaves, and comes back once to its sender."""
    returned = Counter(row for rows in traffic.returned.values() for row in rows)
    assert returned == Counter(case.rows)
    assert Counter(row for rows in traffic.collected.values() for row in rows) == returned
    for lane, c, t in np.ndindex(*case.language_ranks.shape):
        # Positions outside its CP rank's sequence have a zero gradient on a rank.
        rank = int(case.language_ranks[lane, c, t])
        assert set(traffic.returned[rank]) <= set(case.cp_sequence[lane, c])
    for (rank, peer), rows in traffic.backward.items():
        sent = Counter(traffic.forward[peer, rank])
        assert all(sent[row] for row in rows)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_every_row_arrives_exactly_where_it_is_needed(case: Case) -> None:
    check_forward(case, simulate(case, case.build()))


@settings(max_examples=400, deadline=None)
@given(cases())
def test_every_gradient_returns_exactly_once_from_a_rank_that_holds_it(case: Case) -> None:
    check_backward(case, simulate(case, case.build()))


@pytest.mark.parametrize("delivery", ["sequence_parallel", "shared_out", "replicated"])
@pytest.mark.parametrize(
    ("encoder", "language"),
    [
        ((4, 1), (1, 1, 4)),  # fan-in
        ((1, 4), (4, 2, 1)),  # fan-out
        ((3, 1), (2, 1, 2)),  # lane counts that do not divide
        ((2, 3), (3, 2, 2)),
        ((5, 2), (4, 3, 3)),
        ((2, 4), (4, 1, 2)),
    ],
)
def test_lane_counts_need_not_divide(encoder, language, delivery) -> None:
    case = filled(encoder, language, delivery)
    plan = case.build()
    traffic = simulate(case, plan)
    check_forward(case, traffic)
    check_backward(case, traffic)
    # Some sample's items are encoded on different lanes.
    spread = set(zip(case.runs.sample.tolist(), case.runs.source_lane.tolist(), strict=True))
    assert encoder[0] == 1 or len(spread) > case.runs.num_samples
    copies = language[1] * language[2] if delivery == "replicated" else 1
    assert crossing_rows(plan) == len(case.rows) * copies


@settings(max_examples=300, deadline=None)
@given(cases())
def test_bytes_are_at_the_lower_bound(case: Case) -> None:
    plan = case.build()
    traffic = simulate(case, plan)
    missing = sum(
        row not in case.held.get(rank, ())
        for rank, arrived in traffic.arrived.items()
        for row, _ in arrived
    )
    assert crossing_rows(plan) == missing
    assert crossing_rows(plan) == sum(
        len(rows) for (rank, peer), rows in traffic.forward.items() if rank != peer
    )
    if case.disjoint and case.delivery != "replicated":
        assert missing == len(case.rows)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_no_replica_sends_or_receives_more_than_its_even_share_and_one_row(case: Case) -> None:
    traffic = simulate(case, case.build())
    if not case.sequence_sharded:
        for ranks in case.encoder_ranks.tolist():
            sent = [
                sum(len(rows) for (a, b), rows in traffic.forward.items() if a == rank != b)
                for rank in ranks
            ]
            assert max(sent) <= sum(sent) / len(ranks) + 1
    shares = {"shared_out": traffic.arrived, "replicated": traffic.returned}.get(case.delivery, {})
    for lane, c in np.ndindex(*case.language_ranks.shape[:2]):
        group = case.language_ranks[lane, c].tolist()
        rows = len(case.rows_of(case.cp_sequence[lane, c]))
        assert all(len(shares.get(rank, ())) <= rows / case.tp + 1 for rank in group)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_rows_of_items_are_those_of_every_lane(case: Case) -> None:
    for lane in range(len(case.encoder_ranks)):
        assert sum(case.runs.rows_of_lane(lane)) == len(case.lane_rows[lane])


@pytest.mark.parametrize("delivery", ["sequence_parallel", "shared_out", "replicated"])
def test_a_microbatch_without_rows_has_no_peers(delivery) -> None:
    empty = dataclasses.replace(
        filled((2, 2), (2, 2, 2), delivery), samples=(((), ()), (((0, 0, 1),),))
    )
    plan = empty.build()
    assert empty.runs.num_samples == 3
    assert not empty.runs.rows.any()
    for rank in range(12):
        for exchange in (
            plan.sends(rank),
            plan.receives(rank),
            plan.returns(rank),
            plan.collects(rank),
        ):
            assert exchange.peers == exchange.counts == ()
            assert exchange.num_rows == 0


@settings(max_examples=100, deadline=None)
@given(cases())
def test_places_are_slices_where_rows_are_contiguous_and_name_the_same_rows(case: Case) -> None:
    plan = case.build()
    for exchange in (plan.collects(rank) for rank in case.held):
        line = np.arange(exchange.index.max(initial=0) + 1)
        for rows, places in zip(rows_by_peer(exchange), exchange.places, strict=True):
            np.testing.assert_array_equal(line[places], rows)
            assert isinstance(places, slice) == (np.diff(rows) == 1).all()
        merged = np.concatenate([line[places] for places in exchange.merged_places] or [line[:0]])
        np.testing.assert_array_equal(np.sort(merged), np.sort(exchange.index))


@settings(max_examples=100, deadline=None)
@given(cases(deliveries=["sequence_parallel", "shared_out"]))
def test_with_one_destination_per_row_gradients_go_the_way_the_rows_came(case: Case) -> None:
    plan = case.build()
    for rank in case.held:
        sends, collects = plan.sends(rank), plan.collects(rank)
        assert (sends.peers, sends.counts) == (collects.peers, collects.counts)
        np.testing.assert_array_equal(sends.index, collects.index)
    for rank in case.local_sequence:
        receives, returns = plan.receives(rank), plan.returns(rank)
        assert (receives.peers, receives.counts) == (returns.peers, returns.counts)
        np.testing.assert_array_equal(returns.index, np.arange(receives.num_rows))


def test_rows_that_a_rank_of_both_grids_holds_are_copied_there() -> None:
    disjoint = filled((1, 4), (1, 1, 4), "sequence_parallel")
    case = dataclasses.replace(disjoint, encoder_ranks=disjoint.language_ranks[:, 0])
    plan = case.build()
    assert crossing_rows(plan) == 0
    for rank in case.held:
        assert plan.sends(rank).peers == plan.receives(rank).peers == (rank,)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_a_message_holds_rows_in_order_of_their_positions(case: Case) -> None:
    plan = case.build()
    for rank in case.local_sequence:
        exchange = plan.receives(rank)
        for message in rows_by_peer(exchange):
            assert (np.diff(message) > 0).all()


def test_as_many_replicas_as_copies_send_one_copy_each_in_one_message() -> None:
    case = filled((1, 4), (1, 2, 2), "replicated")
    plan = case.build()
    assert all(len(plan.receives(rank).peers) == 1 for rank in case.local_sequence)
    assert all(len(plan.sends(rank).peers) == 1 for rank in case.held)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_without_context_parallelism_only_the_lengths_of_whole_lanes_matter(
    sequence_parallel: bool,
) -> None:
    case = filled((2, 2), (3, 1, 4), "sequence_parallel")
    whole = lanes_of([[sum(lengths)] for lengths in case.segments])
    one, other = (
        sharded_destination(segments, case.language_ranks, sequence_parallel, case.runs)
        for segments in (whole, lanes_of(case.segments))
    )
    for name in ("lane_start", "start", "rank", "local"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_lengths_that_do_not_divide_are_named() -> None:
    case = filled((1, 1), (2, 2, 2), "sequence_parallel")
    with pytest.raises(ValueError, match="lane 1: a segment of 6 tokens is not a multiple of 2"):
        sharded_destination(lanes_of([[4], [8, 6]]), case.language_ranks, False, case.runs)
    with pytest.raises(ValueError, match="lane 1: 6 tokens are not a multiple of cp 1 × tp 4"):
        sharded_destination(lanes_of([[4], [6]]), np.arange(8).reshape(2, 1, 4), True, case.runs)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_equal_metadata_give_equal_digests_and_any_change_another(case: Case) -> None:
    digest = case.build().digest
    assert digest == dataclasses.replace(case).build().digest
    if not case.rows:
        return
    # One token more in front of everything; another source rank; rows returned by others.
    samples = tuple(
        tuple(tuple((gap + 1, rows, lane) for gap, rows, lane in items) for items in lane_samples)
        for lane_samples in case.samples
    )
    assert digest != dataclasses.replace(case, samples=samples).build().digest
    others = case.encoder_ranks + 1000
    assert digest != dataclasses.replace(case, encoder_ranks=others).build().digest
    plan = case.build()
    assert digest != dataclasses.replace(plan, returned=~plan.returned).digest


def test_an_encoder_lane_that_owns_an_empty_item_changes_the_digest_too() -> None:
    case = filled((2, 1), (1, 1, 1), "sequence_parallel")
    one = dataclasses.replace(case, samples=((((0, 3, 0), (0, 0, 0)),),))
    two = dataclasses.replace(case, samples=((((0, 3, 0), (0, 0, 1)),),))
    assert one.build().digest != two.build().digest


@settings(deadline=None)
@given(st.data(), st.integers(1, 150), st.integers(0, 3), st.integers(0, 2**16))
def test_each_item_goes_to_the_lane_that_is_least_loaded_when_its_turn_comes(
    data: st.DataObject, lanes: int, scale: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    costs = draw.integers(0, 10**scale, data.draw(st.integers(0, 300)))
    loads, earlier = (draw.integers(0, most, lanes) for most in draw.integers(1, 2000, 2))
    assigned = assign_items(costs, lanes, loads, earlier)
    work = list(zip(loads.tolist(), earlier.tolist(), range(lanes), strict=True))
    for item in sorted(range(costs.size), key=lambda item: (-costs[item], item)):
        load, before, lane = min(work)
        assert assigned[item] == lane
        work[lane] = (load + int(costs[item]), before, lane)


@given(st.lists(st.integers(0, 1000), max_size=7), st.integers(1, 3))
def test_items_are_spread_within_a_third_of_the_best_possible(costs: list[int], lanes: int) -> None:
    """R. L. Graham, Bounds on multiprocessing timing anomalies, 1969."""
    ways = np.array([*product(range(lanes), repeat=len(costs))], int)
    loads_of = [np.where(ways == lane, costs, 0).sum(axis=1) for lane in range(lanes)]
    best = np.max(loads_of, axis=0).min()
    loads = np.bincount(assign_items(costs, lanes), weights=costs, minlength=lanes)
    assert 3 * lanes * loads.max() <= (4 * lanes - 1) * best
    assert imbalance(loads) >= 1.0
