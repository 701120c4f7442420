"""The plan of a step: one plan per bridge and microbatch, to the ranks that the bridge goes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.packing import TokenBudget, Used
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.model.step_plan import PlannedMicrobatch, StepPlanner, first_samples, pads_samples
from tests.mimo import tiny
from tests.mimo.model.any_folder import make
from tests.mimo.model.test_levels_parity import DISJOINT, LAYERS

OVERRIDES = [LAYERS, *DISJOINT, "language.grid={tp: 2, pp: 2}"]


@pytest.mark.parametrize("delivery", ["sharded", "replicated"])
def test_every_link_plans_all_rows_to_the_ranks_of_its_stage(path: Path, delivery: str) -> None:
    planner = tiny.planner_of(path, *OVERRIDES, delivery=delivery)
    plan, layout = planner.finish(planner.microbatches(0)), planner.layout
    links = layout.links_of("vision")
    assert [link.stage for link in links] == [0, 1]
    copies = 2 if delivery == "replicated" else 1
    for link in links:
        ranks = {layout.language.rank(pp=link.stage, tp=tp) for tp in range(2)}
        for planned, bridge in zip(plan.microbatches, plan.bridges[link], strict=True):
            samples, own = planned.samples, planned.items["vision"]
            rows = int(samples.item_rows[own.item].sum())
            assert set(bridge.destination_rank.tolist()) == (ranks if rows else set())
            assert bridge.length.sum() == copies * rows
            assert bridge.length[bridge.returned].sum() == rows
            expected = tuple(samples.item_rows[own.item].tolist())
            assert planned.runs_of("vision").rows_of_lane(0) == expected
            assert bridge.runs.rows_of_lane(0) == expected


def test_a_rank_plans_the_bridges_that_it_needs_as_every_other_rank_does(path: Path) -> None:
    everything = tiny.planner_of(path, *OVERRIDES)
    first, second = everything.layout.links_of("vision")
    whole = everything.finish(everything.microbatches(0))
    partial = tiny.planner_of(path, *OVERRIDES, links=[second])
    plan = partial.finish(partial.microbatches(0))
    assert list(plan.bridges) == [second]
    for got, expected in zip(plan.bridges[second], whole.bridges[second], strict=True):
        assert got.digest == expected.digest
    assert whole.bridges[first][0].digest != whole.bridges[second][0].digest
    none = tiny.planner_of(path, *OVERRIDES, links=[])
    assert none.finish(none.microbatches(0)).num_loss_tokens == whole.num_loss_tokens


# ---------------------------------------------------------------------- budgets of tokens

BUDGET = TokenBudget(tokens=96, rows=40, window=7)
LANES = {  # microbatches and grid of the language model; four packs to a step
    "1 lane": (4, "{dp: 1}"),
    "2 lanes cp2": (2, "{dp: 2, cp: 2}"),
    "4 lanes tp2 with sp": (1, "{dp: 4, tp: 2, sp: true}"),
}


def planner_of_lanes(path: Path, lanes: str, **given: Any) -> StepPlanner:
    count, grid = LANES[lanes]
    overrides = [f"language.grid={grid}", "train.micro_batch_size=1", "data.shuffle_block=1"]
    return tiny.planner_of(path, *overrides, num_microbatches=count, **given)


def packs_of(microbatches: Iterable[PlannedMicrobatch]) -> Counter[tuple[int, ...]]:
    """The samples of every lane in every microbatch."""
    return Counter(
        tuple(m.samples.sample[m.samples.samples_of_lane(lane)].tolist())
        for m in microbatches
        for lane in range(len(m.samples.lane_tokens))
    )


@pytest.mark.parametrize("padded", [False, True])
def test_a_budget_packs_the_same_sequences_in_every_layout(path: Path, padded: bool) -> None:
    found = []
    for lanes in LANES:
        planner = planner_of_lanes(path, lanes, budget=BUDGET, linear_tokens=100, padded=padded)
        found.append([packs_of(planner.microbatches(step)) for step in range(5)])
        alone = planner_of_lanes(path, "1 lane", budget=BUDGET, padded=padded)
        assert planner.used_before(5) == alone.used_before(5)
        for planned in planner.microbatches(2):
            samples = planned.samples
            tokens = np.bincount(samples.lane, samples.length)
            if padded:
                longest = [samples.length[samples.lane == n].max() for n in range(len(tokens))]
                assert (np.bincount(samples.lane) * longest <= BUDGET.tokens).all()
            rows = np.bincount(
                samples.lane[samples.item_sample], samples.item_rows, minlength=len(tokens)
            )
            assert (tokens <= BUDGET.tokens).all()
            assert (rows <= 40).all()
            # Padding: up to 2·cp - 1 tokens of a sample, and of the whole for tp·sp.
            assert (samples.lane_tokens < tokens + 3 * np.bincount(samples.lane) + 2).all()
    assert found[0] == found[1] == found[2]
    assert len({len(pack) for step in found[0] for pack in step}) > 1
    assert any(planned.samples.num_samples > 4 for planned in planner.microbatches(0))


def test_models_that_pad_get_samples_of_similar_length(path: Path) -> None:
    in_order, sorted_by_length = (
        [m.samples.length.tolist() for m in tiny.planner_of(path, padded=on).microbatches(0)]
        for on in (False, True)
    )
    assert sorted(chain(*in_order)) == sorted(chain(*sorted_by_length))
    assert {len(lengths) for lengths in sorted_by_length} == {4}
    assert has_similar_lengths(sorted_by_length)
    assert not has_similar_lengths(in_order)


def has_similar_lengths(microbatches: list[list[int]]) -> bool:
    return all(min(a) >= max(b) for a, b in pairwise(sorted(microbatches, reverse=True)))


@pytest.mark.parametrize(
    ("family", "padded"), [("qwen3_5", True), ("llava", False), ("qwen3_vl", False)]
)
def test_the_verdict_of_the_gate_says_whether_a_model_pads(
    family: str, padded: bool, tmp_path: Path
) -> None:
    assert pads_samples(load_recipe(make(family, tmp_path))) == padded


@pytest.mark.parametrize("padded", [False, True])
def test_resuming_with_another_budget_or_batch_size_uses_every_sample_once(
    path: Path, padded: bool
) -> None:
    settings: list[tuple[str, TokenBudget | None]] = [
        ("1 lane", BUDGET),
        ("2 lanes cp2", TokenBudget(128, window=30)),
        ("4 lanes tp2 with sp", None),  # four samples each
        ("1 lane", TokenBudget(128, rows=64, window=4)),
    ]
    done, seen = (0, Used()), Counter[int]()
    for number, (lanes, budget) in enumerate(settings):
        planner = planner_of_lanes(path, lanes, budget=budget, done=done, padded=padded)
        end = done[0] + number + 1
        for step in range(done[0], end):
            for planned in planner.microbatches(step):
                seen.update(planned.samples.sample.tolist())
        done = end, planner.used_before(end)
        unused = np.array(done[1].passed_over, np.int64)
        left = Counter(planner.order.at(unused)[1].tolist())
        expected = Counter(planner.order.at(np.arange(done[1].end))[1].tolist())
        assert seen + left == expected, number
        assert done[1].samples == seen.total()


def test_a_sample_is_blanked_by_its_number_in_a_step_of_uneven_microbatches(path: Path) -> None:
    planner = planner_of_lanes(path, "2 lanes cp2", budget=BUDGET)
    microbatches = planner.microbatches(0)
    counts = [m.samples.num_samples for m in microbatches]
    assert first_samples(microbatches) == [0, counts[0]]
    assert counts[0] != counts[1], "the test needs microbatches of different sizes"
    for number in range(sum(counts)):
        microbatch = int(number >= counts[0])
        sample = number - microbatch * counts[0]
        plan = planner.finish(microbatches, [number])
        lost = int(microbatches[microbatch].samples.loss_tokens[sample])
        assert 0 < lost == planner.finish(microbatches).num_loss_tokens - plan.num_loss_tokens
        for m, (before, after) in enumerate(zip(microbatches, plan.microbatches, strict=True)):
            blank = before.samples.loss_tokens != after.samples.loss_tokens
            assert np.flatnonzero(blank).tolist() == ([sample] if m == microbatch else [])
            assert sample not in after.samples.item_sample or m != microbatch
