"""Check that the workload of a compared layout lets no difference hide."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from mimo.config.schema import Recipe
from mimo.families.contracts import FamilySettings
from mimo.families.registry import encoder_settings, generator_settings, language_settings
from mimo.model.step_plan import StepPlan
from mimo.parallel.grids import LANGUAGE, Layout, num_microbatches, run_ahead


def check_minimums(recipe: Recipe, layout: Layout, plan: StepPlan) -> None:
    """Raise AssertionError if the comparison would be trivial.

    Every pipeline chunk has a layer of every kind; there are more microbatches than pipeline
    depth and run-ahead; language lanes differ in rows and loss tokens, those of others in rows;
    samples have several items, one or none, one microbatch has none at all, and a lane packs
    several samples.
    """
    _check_stages(recipe, layout)
    ahead = [run_ahead(recipe, layout, n) for n in layout.encoders if n not in layout.colocated]
    needed = layout.language.pp + max(ahead, default=layout.ahead)
    microbatches = num_microbatches(recipe, layout)
    assert microbatches > needed, f"{microbatches} microbatches, but {needed} are under way at once"
    together = (np.bincount(planned.samples.lane).max() for planned in plan.microbatches)
    assert max(together) >= 2, "a lane of one sample packs nothing"
    _check_items(recipe, plan)
    _check_lanes(layout, plan)


def _check_stages(recipe: Recipe, layout: Layout) -> None:
    settings: dict[str, FamilySettings] = {
        name: encoder_settings(recipe, name) for name in layout.encoders
    }
    settings |= {name: generator_settings(recipe, name) for name in layout.generators}
    settings[LANGUAGE] = language_settings(recipe)
    for name, grid in layout.grids.items():
        kinds = settings[name].layer_kinds()
        assert len(kinds) == settings[name].num_layers
        size = len(kinds) // (grid.pp * grid.vpp)
        for first in range(0, len(kinds), max(size, 1)):
            present = set(kinds[first : first + size])
            assert present == set(kinds), f"{name}: layers {first}.. of a stage are only {present}"


def _check_items(recipe: Recipe, plan: StepPlan) -> None:
    if not recipe.encoders and not recipe.generators:
        return
    microbatches = [m.samples for m in plan.microbatches]
    # (samples, media): items of each media in each sample of the step.
    counts = np.concatenate(
        [
            np.stack(
                [
                    np.bincount(m.item_sample[m.items_of_media(media)], minlength=m.num_samples)
                    for media in m.media
                ],
                axis=1,
            )
            for m in microbatches
        ]
    )
    assert (counts.sum(axis=1) == 0).any(), "no sample is text only"
    assert (counts > 1).any(axis=0).all(), "a media never has several items in a sample"
    assert (counts > 0).all(axis=1).any(), "no sample has items of every media"
    assert min(len(m.item) for m in microbatches) == 0, "every microbatch has items"
    assert any(m.num_samples > 1 for m in microbatches), "nothing is packed"


def _check_lanes(layout: Layout, plan: StepPlan) -> None:
    tokens, rows = [], []
    for planned in plan.microbatches:
        m, lanes = planned.samples, layout.language.dp
        tokens.append(np.bincount(m.lane, weights=m.loss_tokens, minlength=lanes))
        of_item = m.lane[m.item_sample]
        rows.append(np.bincount(of_item, weights=m.item_rows, minlength=lanes))
    _assert_lanes_differ(np.array(tokens), "loss tokens of the language model")
    if layout.item_grids:
        _assert_lanes_differ(np.array(rows), "rows of the language model")
    for name, grid in layout.item_grids.items():
        encoded = []
        for planned in plan.microbatches:
            encoder = planned.items[name]
            weights = planned.samples.item_rows[encoder.item]
            encoded.append(np.bincount(encoder.lane, weights=weights, minlength=grid.dp))
        # Items are balanced over the lanes, so lanes differ only where items are few.
        rows_of_lanes = np.array(encoded)
        uneven = (rows_of_lanes != rows_of_lanes[:, :1]).any()
        assert uneven or grid.dp == 1, f"{name}: all lanes have equal rows in every microbatch"


def _assert_lanes_differ(values: np.ndarray, what: str) -> None:
    """values: (microbatches, lanes). Every pair of lanes differs in some microbatch."""
    for lane, other in combinations(range(values.shape[1]), 2):
        differ = (values[:, lane] != values[:, other]).any()
        assert differ, f"{what}: lanes {lane} and {other} are alike in every microbatch"
