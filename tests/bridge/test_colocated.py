"""Both directions of a colocated bridge on eight ranks, bit for bit, and feature levels on ranks.

Letters: T tokens of a language lane, N rows of an encoder lane, H hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bridge import (
    BridgePlan,
    BridgeReceiver,
    BridgeSender,
    ColocatedBridge,
    ItemRows,
    ItemRuns,
    ReplicatedSource,
    Source,
    UnexpectedRows,
    replicated_destination,
    sharded_destination,
)
from tests.bridge.layouts import cut_together, lanes_of
from tests.bridge.two_grids import make_end
from tests.conftest import RunRanks

HIDDEN = 3
TOKENS = 16  # per language lane
PADDING = -1.0  # in rows that belong to no item


def runs_of(microbatch: int, encoder_lanes: int, language_lanes: int) -> ItemRuns:
    """Items of uneven size on all lanes; in the second microbatch the last lane has none."""
    generator = np.random.default_rng(microbatch)
    lanes = language_lanes - (microbatch == 1)
    destination = np.repeat(np.arange(lanes), 2)
    rows = generator.integers(0, 7, destination.size)
    return ItemRuns(
        sample=np.arange(destination.size),
        source_lane=generator.integers(0, encoder_lanes, destination.size),
        destination_lane=destination,
        position=np.tile([1, 9], lanes),
        rows=rows,
        num_samples=2 * language_lanes,
    )


GROUPS = (range(0, 2), range(2, 3))  # microbatches that are encoded in one go


def sources_of(all_runs: list[ItemRuns], encoder: np.ndarray, cut: bool) -> list[Source]:
    """encoder: ranks [lane, tp]. cut: whether the output is sequence-sharded."""
    rows = [
        np.array([sum(runs.rows_of_lane(lane)) for lane in range(len(encoder))])
        for runs in all_runs
    ]
    if not cut:
        return [ReplicatedSource(mine, encoder) for mine in rows]
    parts = [cut_together([rows[m] for m in group], encoder) for group in GROUPS]
    return [source for group in parts for source in group]


def plan_of(runs: ItemRuns, source: Source, language: np.ndarray, delivery: str) -> BridgePlan:
    """language: ranks [lane, cp, tp]."""
    segments = lanes_of([[TOKENS]] * len(language))
    if delivery == "replicated":
        shared = sharded_destination(segments, language, False, runs)
        return BridgePlan.build(
            runs, source, replicated_destination(segments.tokens, language), shared
        )
    destination = sharded_destination(segments, language, delivery == "sp", runs)
    return BridgePlan.build(runs, source, destination)


def new_groups(rank: int, table: np.ndarray) -> Any:
    """The group of the row of ``table`` that this rank is in."""
    groups = [dist.new_group(ranks.tolist()) for ranks in table]
    return next((g for g, ranks in zip(groups, table, strict=True) if rank in ranks), None)


def there_and_back(
    rank: int, encoder_shape: Any, language_shape: Any, delivery: str, cut: bool = False
) -> None:
    encoder = np.arange(8).reshape(encoder_shape)
    language = np.arange(8).reshape(language_shape[0], 1, language_shape[1])
    encoder_tp, language_tp = new_groups(rank, encoder), new_groups(rank, language[:, 0])
    lane = int(np.flatnonzero((encoder == rank).any(1))[0])
    gather = language_tp if delivery == "gathered" else None
    end = make_end(rank, (dist.new_group(), dist.new_group()), HIDDEN, gather=gather)
    shares = encoder.shape[1] > 1 and not cut
    bridge = ColocatedBridge(end, lane, True, encoder_tp if shares else None)
    all_runs = [runs_of(m, *(len(encoder), len(language))) for m in range(3)]
    sources = sources_of(all_runs, encoder, cut)
    pairs = zip(all_runs, sources, strict=True)
    bridge.begin([plan_of(*pair, language, delivery) for pair in pairs])
    for group in GROUPS:
        # A row's content names its place: microbatch, language lane and position.
        values = torch.cat([places(runs, lane, m) for m, runs in enumerate(all_runs) if m in group])
        if cut:
            values = part_of(values, int(np.flatnonzero(encoder[lane] == rank)[0]), len(encoder[0]))
        sizes = rows_of_items([all_runs[m] for m in group], lane)
        bridge.deliver(group, ItemRows(values, sizes, len(encoder[0]) if cut else 1))
        mine = int(np.flatnonzero((language[:, 0] == rank).any(1))[0])
        t = int(np.flatnonzero(language[mine, 0] == rank)[0])
        shift = t * TOKENS // language.shape[2] if delivery == "sp" else 0
        for m in group:
            rows, positions = bridge.receive(m)
            expected = content(m, mine, positions + shift)
            assert torch.equal(rows.detach(), expected), "another row stands at this position"
            wanted = wanted_rows(all_runs[m], mine, t, language.shape[2], delivery)
            assert sorted((positions + shift).tolist()) == wanted
            # Every copy of a row has the whole gradient, twice the row.
            rows.grad = 2 * rows.detach()
        gradient = bridge.collect(group)
        # The gradient of padding is zero, whatever stands there.
        expected = torch.where(values == PADDING, 0.0, 2 * values)
        assert torch.equal(gradient, expected), "a gradient came back not at all or twice"
    bridge.finish()


def content(microbatch: int, lane: int, positions: torch.Tensor) -> torch.Tensor:
    """(n, H) what stands at positions of a language lane."""
    base = 1000.0 * microbatch + 100.0 * lane + positions.float()
    return base[:, None] + torch.arange(HIDDEN) / 8


def rows_of_items(all_runs: list[ItemRuns], lane: int) -> tuple[int, ...]:
    """Rows per item of an encoder lane, one microbatch after the other."""
    return tuple(size for runs in all_runs for size in runs.rows_of_lane(lane))


def places(runs: ItemRuns, lane: int, microbatch: int) -> torch.Tensor:
    """(N, H) the rows of one encoder lane, in plan order."""
    parts = [torch.zeros(0, HIDDEN)]
    for i in np.flatnonzero(runs.source_lane == lane):
        positions = torch.arange(int(runs.rows[i])) + int(runs.position[i])
        parts.append(content(microbatch, int(runs.destination_lane[i]), positions))
    return torch.cat(parts)


def part_of(rows: torch.Tensor, t: int, parts: int) -> torch.Tensor:
    """(N, H) -> the t-th of equal parts of them, filled up with padding."""
    part = -(-len(rows) // parts)
    padded = torch.full((parts * part, HIDDEN), PADDING)
    padded[: len(rows)] = rows
    return padded[t * part : (t + 1) * part]


def wanted_rows(runs: ItemRuns, lane: int, t: int, tp: int, delivery: str) -> list[int]:
    """Positions that a language rank must hold, by looking at every one."""
    return sorted(
        position
        for i in np.flatnonzero(runs.destination_lane == lane)
        for position in range(int(runs.position[i]), int(runs.position[i] + runs.rows[i]))
        if delivery != "sp" or position // (TOKENS // tp) == t
    )


@pytest.mark.parametrize("delivery", ["sp", "gathered", "replicated"])
@pytest.mark.parametrize(
    ("encoder", "language"),
    [
        ((2, 4), (4, 2)),
        pytest.param((4, 2), (2, 4), marks=pytest.mark.slow),
        pytest.param((8, 1), (2, 4), marks=pytest.mark.slow),
        pytest.param((2, 4), (8, 1), marks=pytest.mark.slow),
    ],
)
def test_rows_and_gradients_change_between_colocated_grids_bit_for_bit(
    run_ranks: RunRanks, encoder: tuple[int, int], language: tuple[int, int], delivery: str
) -> None:
    run_ranks(there_and_back, 8, encoder, language, delivery)


@pytest.mark.parametrize("delivery", ["sp", "gathered", "replicated"])
@pytest.mark.parametrize(
    ("encoder", "language"),
    [
        ((2, 4), (4, 2)),
        pytest.param((4, 2), (2, 4), marks=pytest.mark.slow),
        pytest.param((1, 8), (2, 4), marks=pytest.mark.slow),
    ],
)
def test_rows_that_are_cut_over_the_encoders_ranks_go_there_and_back_bit_for_bit(
    run_ranks: RunRanks, encoder: tuple[int, int], language: tuple[int, int], delivery: str
) -> None:
    run_ranks(there_and_back, 8, encoder, language, delivery, True)


def lone_bridge(trainable: bool) -> tuple[ColocatedBridge, list[ItemRuns]]:
    """Encoder and language model on one rank, three microbatches under way."""
    end = make_end(0, [dist.group.WORLD] * 2, HIDDEN, trainable=trainable)
    bridge = ColocatedBridge(end, 0, True, None)
    all_runs = [runs_of(m, 1, 2) for m in range(3)]
    sources = sources_of(all_runs, np.array([[0]]), False)
    language = np.zeros((2, 1, 1), np.int64)
    pairs = zip(all_runs, sources, strict=True)
    bridge.begin([plan_of(*pair, language, "sp") for pair in pairs])
    return bridge, all_runs


def deliver_narrow_rows(rank: int) -> str:
    bridge, all_runs = lone_bridge(trainable=True)
    rows = places(all_runs[0], 0, 0)[:, :1]
    with pytest.raises(UnexpectedRows) as caught:
        bridge.deliver(range(1), ItemRows(rows, rows_of_items(all_runs[:1], 0)))
    return str(caught.value)


def test_rows_that_do_not_fit_the_plan_are_refused_before_anything_is_sent(
    run_ranks: RunRanks,
) -> None:
    assert run_ranks(deliver_narrow_rows, 1) == [
        "encoder vision, lane 0, microbatch 0: the tower produced rows of size 1, the language "
        f"model needs {HIDDEN}"
    ]


def rows_kept_without_gradients(rank: int) -> int:
    bridge, all_runs = lone_bridge(trainable=False)
    for m, runs in enumerate(all_runs):
        rows = ItemRows(places(runs, 0, m), runs.rows_of_lane(0))
        bridge.deliver(range(m, m + 1), rows)
        bridge.receive(m)
    return len(bridge._leaves)


def test_without_gradients_the_rows_of_one_group_are_kept_only(run_ranks: RunRanks) -> None:
    assert run_ranks(rows_kept_without_gradients, 1) == [1]


# --------------------------------------------------------------------- feature levels


def levels_to_their_stages(rank: int) -> list[int]:
    """Rank 0 encodes; ranks 1, 2 are the first stage (tp 2), ranks 3, 4 the second.

    Level 0 belongs to the first stage, levels 1 and 2 to layers of the second.
    """
    encoder = np.array([[0]])
    stages = [np.array([[[1, 2]]]), np.array([[[3, 4]]])]
    groups = [[dist.new_group([0, *stage.ravel()]) for _ in range(2)] for stage in stages]
    runs = runs_of(0, 1, 1)
    source = ReplicatedSource(np.array([sum(runs.rows_of_lane(0))]), encoder)
    segments = lanes_of([[TOKENS]])
    received = []
    for number, levels in enumerate([(0,), (1, 2)]):
        destination = sharded_destination(segments, stages[number], True, runs)
        plan = BridgePlan.build(runs, source, destination)
        end = make_end(rank, groups[number], HIDDEN * len(levels))
        rows = [level * 10_000 + places(runs, 0, 0) for level in levels]
        if rank == 0:
            values = torch.cat(rows, dim=-1).requires_grad_()
            sender = BridgeSender(end, lane=0, run_ahead=1)
            sender.begin([plan])
            token = sender.send(0, ItemRows(values, runs.rows_of_lane(0)))
            (gradient,) = torch.autograd.grad(token, values)
            assert torch.equal(gradient, 2 * values)
            sender.finish()
        elif rank in stages[number]:
            receiver = BridgeReceiver(end, run_ahead=2, posted_ahead=1)
            receiver.begin([plan])
            arrived, positions = receiver.receive(0)
            shift = (rank - int(stages[number][0, 0, 0])) * TOKENS // 2
            expected = [level * 10_000 + content(0, 0, positions + shift) for level in levels]
            assert torch.equal(arrived.detach(), torch.cat(expected, dim=-1))
            arrived.backward(2 * arrived.detach())
            receiver.finish()
            received.append(arrived.shape[1])
    return received


def test_each_feature_level_goes_to_the_stage_that_owns_its_layer_in_shared_messages(
    run_ranks: RunRanks,
) -> None:
    widths = run_ranks(levels_to_their_stages, 5)
    assert widths == [[], [HIDDEN], [HIDDEN], [2 * HIDDEN], [2 * HIDDEN]]
