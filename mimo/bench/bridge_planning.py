"""How long it takes to work out what one rank needs of a plan, and how well items balance."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bridge import (
    BridgePlan,
    ItemRuns,
    LaneSegments,
    ReplicatedSource,
    assign_items,
    imbalance,
    sharded_destination,
)
from data.media.images import ImageProcessor

PLAN_RANKS = (1024, 4096, 16384)
_PLAN_ROWS, _PLAN_ITEMS = 65536, 500
_PLAN_TP, _PLAN_ENCODER_LANES = 8, 64
_PLAN_REPEATS = 20

BALANCE_LANES = 64
BALANCE_ITEMS = (512, 4096)
_BALANCE_DRAWS = 20
_SIDES = (224, 1792)
_IMAGES_PER_SAMPLE = 8


@dataclass(frozen=True)
class PlanTime:
    """Median milliseconds to build a plan, and one rank's exchange, from the items.

    For a rank that receives and one that sends; the slower one counts.
    """

    num_ranks: int
    rows: int
    items: int
    receiver_ms: float
    sender_ms: float

    @property
    def ms(self) -> float:
        """The slower of the two, which is judged."""
        return max(self.receiver_ms, self.sender_ms)


@dataclass(frozen=True)
class PlanCase:
    """A language grid with tp 8, SP and many lanes, over which items are spread in turn."""

    runs: ItemRuns
    source_ranks: np.ndarray  # (encoder lanes, 1)
    ranks: np.ndarray  # (language lanes, 1, tp)
    tokens: np.ndarray  # (language lanes,)


def plan_case(num_ranks: int) -> PlanCase:
    """65,536 rows in 500 items for `num_ranks` ranks of the language model."""
    draw = np.random.default_rng(0)
    cuts = np.sort(draw.choice(np.arange(1, _PLAN_ROWS), _PLAN_ITEMS - 1, replace=False))
    rows = np.diff(np.concatenate(([0], cuts, [_PLAN_ROWS]))).astype(np.int64)
    lanes = num_ranks // _PLAN_TP
    lane = np.arange(_PLAN_ITEMS) * lanes // _PLAN_ITEMS
    position, end = np.zeros(_PLAN_ITEMS, np.int64), np.zeros(lanes, np.int64)
    for item in range(_PLAN_ITEMS):
        end[lane[item]] += int(draw.integers(1, 64))
        position[item] = end[lane[item]]
        end[lane[item]] += rows[item]
    runs = ItemRuns(
        sample=np.arange(_PLAN_ITEMS),
        source_lane=assign_items(rows, _PLAN_ENCODER_LANES),
        destination_lane=lane,
        position=position,
        rows=rows,
        num_samples=_PLAN_ITEMS,
    )
    encoder_ranks = np.arange(_PLAN_ENCODER_LANES).reshape(-1, 1)
    ranks = (_PLAN_ENCODER_LANES + np.arange(num_ranks)).reshape(lanes, 1, _PLAN_TP)
    return PlanCase(runs, encoder_ranks, ranks, -(-(end + 1) // _PLAN_TP) * _PLAN_TP)


def build_plan(case: PlanCase) -> BridgePlan:
    """Build the plan from the items, with nothing kept from before."""
    rows = np.bincount(
        case.runs.source_lane, weights=case.runs.rows, minlength=len(case.source_ranks)
    )
    source = ReplicatedSource(rows.astype(np.int64), case.source_ranks)
    segments = LaneSegments.whole(case.tokens)
    destination = sharded_destination(segments, case.ranks, True, case.runs)
    return BridgePlan.build(case.runs, source, destination)


def time_plan(num_ranks: int, repeats: int = _PLAN_REPEATS) -> PlanTime:
    """Median over `repeats` of building the plan and one rank's exchange."""
    case = plan_case(num_ranks)
    # A rank in the middle of the busiest language lane, and one of the busiest encoder lane.
    lane_rows = np.bincount(case.runs.destination_lane, weights=case.runs.rows)
    receiver = int(case.ranks[int(lane_rows.argmax()), 0, _PLAN_TP // 2])
    source_rows = np.bincount(case.runs.source_lane, weights=case.runs.rows)
    sender = int(case.source_ranks[int(source_rows.argmax()), 0])

    def median_ms(needed: Callable[[BridgePlan], object]) -> float:
        taken = []
        for _ in range(repeats + 2):  # the first two warm up
            start = time.perf_counter()
            needed(build_plan(case))
            taken.append(1000 * (time.perf_counter() - start))
        return statistics.median(taken[2:])

    return PlanTime(
        num_ranks=num_ranks,
        rows=int(case.runs.rows.sum()),
        items=case.runs.rows.size,
        receiver_ms=median_ms(lambda plan: plan.receives(receiver)),
        sender_ms=median_ms(lambda plan: plan.sends(sender)),
    )


@dataclass(frozen=True)
class Balance:
    """Largest lane load over the mean, for each draw of the images.

    bound: max(mean load, largest item) / mean; no assignment of whole items can be below it.
    items: items assigned one by one, largest first (`assign_items`). samples: the same, but all
    images of a sample stay together. in_turn: samples dealt out in turn, as plain data parallelism
    does.
    """

    num_items: int
    lanes: int
    bound: list[float]
    items: list[float]
    samples: list[float]
    in_turn: list[float]

    @property
    def worst(self) -> float:
        """The largest ratio of item-level imbalance to its bound over all draws."""
        return max(got / bound for got, bound in zip(self.items, self.bound, strict=True))


def measure_balance(
    num_items: int, lanes: int = BALANCE_LANES, draws: int = _BALANCE_DRAWS
) -> Balance:
    """The balance for images with sides log-uniform in 224-1,792 pixels, 1 to 8 per sample."""
    found = Balance(num_items, lanes, [], [], [], [])
    # No image is shrunk, so the sides are those drawn: the hardest case.
    processor = ImageProcessor(patch_size=14, max_pixels=_SIDES[1] ** 2)
    for seed in range(draws):
        draw = np.random.default_rng(seed)
        sides = np.exp(draw.uniform(np.log(_SIDES[0]), np.log(_SIDES[1]), (num_items, 2)))
        costs = np.array([processor.cost(w, h) for w, h in np.rint(sides).astype(int).tolist()])
        sizes = draw.integers(1, _IMAGES_PER_SAMPLE + 1, num_items)
        sample = np.repeat(np.arange(num_items), sizes)[:num_items]
        sample_costs = np.bincount(sample, weights=costs).astype(np.int64)
        num_samples = sample_costs.size
        mean = costs.sum() / lanes
        found.bound.append(float(max(mean, costs.max()) / mean))
        found.items.append(imbalance(costs, assign_items(costs, lanes), lanes))
        by_sample = assign_items(sample_costs, lanes)
        found.samples.append(imbalance(sample_costs, by_sample, lanes))
        found.in_turn.append(imbalance(sample_costs, np.arange(num_samples) % lanes, lanes))
    return found
