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
from tests.mimo import tiny
from tests.mimo.model.test_parity import check

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
    "1 lane to 1": (2, DISJOINT),
    "3 lanes to 2": (
        5,
        [
            *DISJOINT,
            "encoders.vision.grid.dp=3",
            "language.grid.dp=2",
            "train.micro_batch_size=2",
        ],
    ),
    "language cp2 tp2 with sp": (5, [*DISJOINT, "language.grid={cp: 2, tp: 2, sp: true}"]),
    "colocated pp2": (2, [*COLOCATED, "language.grid.pp=2"]),
    "encoder tp2 with recompute": (
        3,
        [*DISJOINT, "encoders.vision.grid.tp=2", "encoders.vision.recompute=full"],
    ),
    "encoder tp2 with sp": (3, [*DISJOINT, "encoders.vision.grid={tp: 2, sp: true, dp: 1}"]),
    "encoder tp2 with sp, only the projector learns": (
        3,
        [
            *DISJOINT,
            "encoders.vision.grid={tp: 2, sp: true, dp: 1}",
            "encoders.vision.freeze=tower",
            "language.freeze=true",
        ],
    ),
    "encoder pp2": (3, [*DISJOINT, "encoders.vision.grid.pp=2"]),
    "2 lanes tp2 with sp to tp2 with sp": (
        6,
        [
            *DISJOINT,
            "encoders.vision.grid={tp: 2, sp: true, dp: 2}",
            "language.grid={tp: 2, sp: true}",
        ],
    ),
}

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
# The quickstart's model with this family's layers.
VERIFIED = [
    FAMILY,
    "encoders.vision.model.window_size=56",
    "encoders.vision.model.full_attention_layers=[1]",
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny_qwen2_5")
    tiny.write_samples(directory)
    return tiny.write_recipe(directory)


@pytest.mark.parametrize(
    "layout",
    quick(LAYOUTS, "encoder pp2"),
)
def test_steps_equal_those_of_one_rank(run_ranks: RunRanks, recipe: Path, layout: str) -> None:
    check(run_ranks, recipe, *LAYOUTS[layout])


@pytest.mark.parametrize(
    "grids",
    [
        pytest.param([], marks=pytest.mark.slow),  # the recipe's own
        ["language.grid={tp: 2, sp: true, pp: 2}", "encoders.vision.grid={tp: 2, sp: true, dp: 1}"],
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
