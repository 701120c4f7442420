"""The plan of a step: one plan per bridge and microbatch, to the ranks that the bridge goes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo.hf.recipes import load_recipe
from mimo.layout.grids import build_layout
from mimo.step.dataset import item_processors, open_dataset, open_tokenizer
from mimo.step.plan import StepPlanner
from tests.mimo import tiny
from tests.mimo.model.test_levels_parity import DISJOINT, LAYERS

OVERRIDES = [LAYERS, *DISJOINT, "language.grid={tp: 2, pp: 2}"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tiny.write_samples(tmp_path)
    return tiny.write_recipe(tmp_path)


def planner_of(path: Path, **given: Any) -> StepPlanner:
    """A planner of three microbatches, with levels needed on both stages of the language model."""
    recipe = load_recipe(path, OVERRIDES)
    dataset = open_dataset(recipe, "sources", open_tokenizer(recipe), item_processors(recipe))
    assert dataset is not None
    layout = build_layout(recipe)
    media = {"vision": ("image",)}
    return StepPlanner(layout, media, dataset.indexes, dataset.order, 4, 3, **given)


@pytest.mark.parametrize("delivery", ["sharded", "replicated"])
def test_every_link_has_a_plan_of_all_rows_to_the_ranks_of_its_stage(
    path: Path, delivery: str
) -> None:
    planner = planner_of(path, delivery=delivery)
    plan, layout = planner.finish(planner.microbatches(0)), planner.layout
    links = layout.links_of("vision")
    assert [link.stage for link in links] == [0, 1]
    copies = 2 if delivery == "replicated" else 1
    for link in links:
        ranks = {layout.language.rank(pp=link.stage, tp=tp) for tp in range(2)}
        for planned, bridge in zip(plan.microbatches, plan.bridges(link), strict=True):
            samples, own = planned.samples, planned.encoders["vision"]
            rows = int(samples.item_rows[own.item].sum())
            assert set(bridge.destination_rank.tolist()) == (ranks if rows else set())
            assert bridge.length.sum() == copies * rows
            assert bridge.length[bridge.returned].sum() == rows
            expected = np.bincount(
                samples.item_sample[own.item], samples.item_rows[own.item], samples.num_samples
            )
            sizes = planned.runs_of("vision").split_sizes(0)
            assert sizes == bridge.runs.split_sizes(0) == tuple(expected.astype(int).tolist())


def test_a_rank_plans_the_bridges_that_it_needs_as_every_other_rank_does(path: Path) -> None:
    everything = planner_of(path)
    first, second = everything.layout.links_of("vision")
    whole = everything.finish(everything.microbatches(0))
    one = planner_of(path, links=[second])
    plan = one.finish(one.microbatches(0))
    assert all(list(m.encoders["vision"].bridges) == [second] for m in plan.microbatches)
    for got, expected in zip(plan.bridges(second), whole.bridges(second), strict=True):
        assert got.digest == expected.digest
    assert whole.bridges(first)[0].digest != whole.bridges(second)[0].digest
    none = planner_of(path, links=[])
    assert none.finish(none.microbatches(0)).num_loss_tokens == whole.num_loss_tokens
