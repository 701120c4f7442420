"""Any layout with a model of the Qwen2.5-VL kind takes the same steps as one rank.

As in `test_parity`, with a tower whose layers attend inside windows or whole frames, and blocks of
rotary channels in the language model. Images are up to 4 × 5 rows, windows 2 × 2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.check.layouts import recipe_cells
from mimo.check.verify import Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.model.test_parity import ENCODER_SP, FROZEN_TOWER, LANGUAGE_SP, TWO_LANES, check

TOWER = (
    "model: {num_layers: 4, hidden_size: 16, ffn_hidden_size: 24, num_attention_heads: 2, "
    "window_size: 28, full_attention_layers: [1, 3], patch_size: 7, temporal_patch_size: 1, "
    "min_pixels: 784, max_pixels: 3920, init_std: 0.2}"
)
FAMILY = "language.family=qwen2_5"
DISJOINT = [FAMILY, f"encoders.vision={{family: qwen_vl, grid: {{dp: 1}}, {TOWER}}}"]
COLOCATED = [
    FAMILY,
    f"encoders.vision={{family: qwen_vl, placement: colocated, grid: {{}}, {TOWER}}}",
]

LAYOUTS = {
    "1 lane to 1": DISJOINT,
    "3 lanes to 2": [*DISJOINT, "encoders.vision.grid.dp=3", *TWO_LANES],
    "language cp2 tp2 with sp": [*DISJOINT, "language.grid={cp: 2, tp: 2, sp: true}"],
    "colocated pp2": [*COLOCATED, "language.grid.pp=2"],
    "encoder tp2 with recompute": [
        *DISJOINT,
        "encoders.vision.grid.tp=2",
        "encoders.vision.recompute=full",
    ],
    "encoder tp2 with sp": [*DISJOINT, ENCODER_SP],
    "encoder tp2 with sp, only the projector learns": [
        *DISJOINT,
        ENCODER_SP,
        FROZEN_TOWER,
        "language.freeze=true",
    ],
    "encoder pp2": [*DISJOINT, "encoders.vision.grid.pp=2"],
    "2 lanes tp2 with sp to tp2 with sp": [
        *DISJOINT,
        "encoders.vision.grid={tp: 2, sp: true, dp: 2}",
        LANGUAGE_SP,
    ],
}

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
# The quickstart's model with this family's layers.
VERIFIED = [
    FAMILY,
    "encoders.vision.model.window_size=56",
    "encoders.vision.model.full_attention_layers=[1]",
]


@pytest.mark.parametrize("layout", quick(LAYOUTS, "encoder pp2"))
def test_steps_equal_those_of_one_rank(run_ranks: RunRanks, recipe: Path, layout: str) -> None:
    check(run_ranks, recipe, LAYOUTS[layout])


@pytest.mark.parametrize(
    "grids",
    [
        pytest.param([], marks=pytest.mark.slow),  # the recipe's own
        ["language.grid={tp: 2, sp: true, pp: 2}", ENCODER_SP],
    ],
    ids=["its layout", "tp2 with sp, pp2"],
)
@pytest.mark.slow
def test_the_verifier_passes_a_recipe_with_windows(
    run_ranks: RunRanks, tmp_path: Path, grids: list[str]
) -> None:
    recipe = load_recipe(QUICKSTART, [*VERIFIED, *grids])
    (cell,) = recipe_cells(recipe, None, 8, full=False).cells
    result = Verifier(tmp_path, "fp32").run(cell)
    assert result.comparison is not None, result.failure
    assert result.passed, str(result.comparison.first)
