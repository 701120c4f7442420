"""Every vision tower computes what transformers' computes: rows, levels and every gradient.

fp32 on a CPU, random weights in every parameter. Rows differ by at most 1e-5 (they are of order
one), gradients by 1e-5 of their largest element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders import gemma3, qwen3_vl
from tests import lone_module
from tests.cases import quick
from tests.conftest import RunRanks
from tests.encoders.towers import GEMMA3, OUTPUT_SIZE, QWEN3_VL, TOWERS, Tower
from tests.lone_module import TowerOptions
from tests.tower_reference import TOLERANCE

every_tower = pytest.mark.parametrize("tower", TOWERS.values(), ids=TOWERS)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sp": True},
    "tp4 sp": {"tp": 4, "sp": True},
    "tp4 sp recompute": {"tp": 4, "sp": True, "recompute": "full"},
    "pp2": {"pp": 2},
    "tp2 sp pp2": {"tp": 2, "sp": True, "pp": 2},
    "tp2 pp2 recompute": {"tp": 2, "pp": 2, "recompute": "full"},
}
# An odd number of layers has no two equal stages.
CASES = {
    f"{name}, {layout}": (tower, options)
    for name, tower in TOWERS.items()
    for layout, options in LAYOUTS.items()
    if tower.settings["num_layers"] % options.get("pp", 1) == 0
}
QUICK = (
    "qwen2.5-vl, one rank",
    "qwen2.5-vl windows, recompute",
    "qwen2.5-vl windows, tp2 sp pp2",
    "qwen3-vl, selective",
    "qwen3-vl, tp2 sp pp2",
    "qwen3-vl, tp2 pp2 recompute",
    "gemma3, one rank",
    "gemma3, tp2 sp",
)


def run(
    run_ranks: RunRanks,
    tower: Tower,
    calls: Sequence[tuple[Tensor, Tensor]],
    row_gradients: Tensor | None = None,
    fresh: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Results of all ranks; fresh: with weights as they are drawn for training."""
    options = {"family": tower.family} | options
    return run_ranks(
        lone_module.run_tower,
        options.get("tp", 1) * options.get("pp", 1),
        tower.settings | ({"init_std": 0.05} if fresh else {}),
        OUTPUT_SIZE,
        None if fresh else tower.reference().weights,
        calls,
        row_gradients,
        TowerOptions(**options),
    )


def no_images(tower: Tower) -> tuple[Tensor, Tensor]:
    return torch.zeros(0, tower.patch_numbers), torch.zeros(0, 3, dtype=torch.int64)


@pytest.mark.parametrize("case", quick(CASES, *QUICK))
def test_rows_and_every_gradient_equal_those_of_transformers(
    run_ranks: RunRanks, case: str
) -> None:
    tower, options = CASES[case]
    reference = tower.reference()
    calls = [no_images(tower)] * (options.get("pp", 1) == 1) + [(reference.patches, tower.grids)]
    results = run(run_ranks, tower, calls, reference.row_gradients, **options)
    tp = options.get("tp", 1)
    last_stage = results[-tp:]
    for result in last_stage:
        assert result["rows_per_item"][-1] == tower.rows_per_image
        assert all(rows.shape == (0, tower.width) for rows in result["rows"][:-1])
    rows = [result["rows"][-1] for result in last_stage]
    if options.get("sp"):
        num_rows = len(reference.rows)
        assert all(len(part) == -(-num_rows // tp) for part in rows)
        rows = [torch.cat(rows)[:num_rows]]
    reference.check_rows(rows)
    reference.check_gradients(results)


def test_rows_of_one_tower_need_padding_on_every_number_of_ranks() -> None:
    for tp in (2, 4):
        assert any(len(tower.reference().rows) % tp for tower in TOWERS.values())


@every_tower
def test_no_images_give_no_rows_and_a_zero_gradient_to_every_parameter(
    run_ranks: RunRanks, tower: Tower
) -> None:
    (result,) = run(run_ranks, tower, [no_images(tower)], torch.zeros(0, tower.width))
    assert result["rows"][0].shape == (0, tower.width)
    gradients = lone_module.join_gradients([result])
    assert gradients.keys() == tower.reference().weights.keys()
    assert all((gradient == 0).all() for gradient in gradients.values())


@every_tower
def test_fresh_weights_are_the_same_function_on_one_rank_and_on_others(
    run_ranks: RunRanks, tower: Tower
) -> None:
    call = (tower.draw_patches(), tower.grids)
    (expected,) = run(run_ranks, tower, [call], fresh=True)[0]["rows"]
    grids = [{"tp": 2}] + [{"pp": 2}] * (tower.settings["num_layers"] % 2 == 0)
    for grid in grids:
        (rows,) = run(run_ranks, tower, [call], fresh=True, **grid)[-1]["rows"]
        torch.testing.assert_close(rows, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("indexes", [(2, 1), (1, 1), (4,)])
def test_levels_of_blocks_that_are_not_there_or_out_of_order_are_refused(
    indexes: tuple[int, ...],
) -> None:
    with pytest.raises(ValueError, match=r"deepstack_visual_indexes .* num_layers - 1, which is 3"):
        qwen3_vl.Settings.model_validate(QWEN3_VL.settings | {"deepstack_visual_indexes": indexes})


@pytest.mark.parametrize(("levels", "kept"), [(0, 0), (2, 2), (5, 3)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_scaled_down_tower_keeps_up_to_three_levels_and_divides_over_its_stages(
    levels: int, kept: int, stages: int
) -> None:
    change = {"num_layers": 12, "deepstack_visual_indexes": tuple(range(levels))}
    tiny = qwen3_vl.Settings.model_validate(QWEN3_VL.settings | change).scaled_down(stages, tp=2)
    assert tiny.num_levels == kept
    assert not list(tiny.grid_problems(tp=2, chunks=stages))
    assert qwen3_vl.Settings.model_validate(tiny.model_dump()) == tiny


@pytest.mark.parametrize(("key", "value"), [("mm_tokens_per_image", 8), ("image_size", 56)])
def test_rows_that_no_square_image_has_are_refused(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=r"mm_tokens_per_image .* must be a square number"):
        gemma3.Settings.model_validate(GEMMA3.settings | {key: value})
