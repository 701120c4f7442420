"""The plan of a step: one plan per bridge and microbatch, to the ranks that the bridge goes to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mimo.dataset import item_processors, open_dataset, open_tokenizer
from mimo.layout import build_layout
from mimo.recipe import load_recipe
from mimo.step_plan import StepPlanner
from tests.mimo import tiny
from tests.mimo.test_levels_parity import DISJOINT, LAYERS


@pytest.mark.parametrize("delivery", ["sharded", "replicated"])
def test_every_link_has_a_plan_of_all_rows_to_the_ranks_of_its_stage(
    tmp_path: Path, delivery: str
) -> None:
    tiny.write_samples(tmp_path)
    overrides = [LAYERS, *DISJOINT, "language.grid={tp: 2, pp: 2}"]
    recipe = load_recipe(tiny.write_recipe(tmp_path), overrides)
    dataset = open_dataset(recipe, "sources", open_tokenizer(recipe), item_processors(recipe))
    assert dataset is not None
    layout = build_layout(recipe)
    planner = StepPlanner(
        layout, {"vision": "image"}, dataset.indexes, dataset.order, 4, 3, delivery
    )
    plan = planner.finish(planner.microbatches(0))
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
            assert own.split_sizes(0) == tuple(expected.astype(int).tolist())
