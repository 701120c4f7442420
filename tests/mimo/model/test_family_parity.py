"""Any layout with models of the Gemma-3 or Qwen2.5-VL kind takes the same steps as one rank.

As in `test_parity`. Gemma-3's layers differ (local and global), its images see themselves whole,
also where context parallelism cuts them, and its positions are plain. Layers of Qwen2.5-VL's tower
attend inside windows of 2 × 2 rows or whole frames; images have up to 4 × 5 rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.check.layouts import recipe_cells
from mimo.check.verify import Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.model.recipe_checks import check_recipe
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.model.test_parity import COLOCATED, ENCODER_SP, RECOMPUTED, TWO_LANES, check

# Three tokens of a window, four of an image: the window cuts inside images, too.
GEMMA = [
    "language.family=gemma3",
    "language.model={num_layers: 4, hidden_size: 32, ffn_hidden_size: 48, num_attention_heads: 4, "
    "num_query_groups: 2, head_size: 8, query_pre_attn_scalar: 10, sliding_window: 3, "
    "sliding_window_pattern: 2, local_rotary_base: 100.0, rotary_base: 1000.0, rotary_factor: 3.0, "
    "init_std: 0.2}",
    "encoders.vision.family=gemma3",
    "encoders.vision.model={num_layers: 2, hidden_size: 16, ffn_hidden_size: 24, "
    "num_attention_heads: 2, image_size: 28, patch_size: 7, mm_tokens_per_image: 4, init_std: 0.2}",
]
QWEN = [
    "language.family=qwen2_5",
    "encoders.vision.model={num_layers: 4, hidden_size: 16, ffn_hidden_size: 24, "
    "num_attention_heads: 2, window_size: 28, full_attention_layers: [1, 3], patch_size: 7, "
    "temporal_patch_size: 1, min_pixels: 784, max_pixels: 3920, init_std: 0.2}",
]
LAYOUTS = {
    "gemma3, 3 lanes to 2": [*GEMMA, "encoders.vision.grid.dp=3", *TWO_LANES],
    "gemma3, cp2 tp2 with sp": [*GEMMA, "language.grid={cp: 2, tp: 2, sp: true}"],
    # Three layers a stage: the second stage begins with a global one.
    "gemma3, colocated pp2, stages unlike": [
        *GEMMA,
        *COLOCATED,
        "language.grid.pp=2",
        "language.model.num_layers=6",
    ],
    "gemma3, encoder tp2 with sp, recomputed": [
        *GEMMA,
        ENCODER_SP,
        "encoders.vision.recompute=full",
        RECOMPUTED,
    ],
    "gemma3, cp2, recomputed in part": [
        *GEMMA,
        "language.grid.cp=2",
        "language.recompute=selective",
    ],
    "gemma3, interleaved pp2 vpp2": [
        *GEMMA,
        "language.grid={pp: 2, vpp: 2}",
        "train.micro_batch_size=3",
    ],
    "qwen2_5, language cp2 tp2 with sp": [*QWEN, "language.grid={cp: 2, tp: 2, sp: true}"],
    "qwen2_5, colocated pp2": [*QWEN, *COLOCATED, "language.grid.pp=2"],
    "qwen2_5, encoder tp2 with sp, only the projector learns": [
        *QWEN,
        ENCODER_SP,
        "encoders.vision.freeze=tower",
        "language.freeze=true",
    ],
    "qwen2_5, encoder pp2": [*QWEN, "encoders.vision.grid.pp=2"],
    "qwen2_5, 2 lanes tp2 with sp to tp2 with sp": [
        *QWEN,
        "encoders.vision.grid={tp: 2, sp: true, dp: 2}",
        "language.grid={tp: 2, sp: true}",
    ],
}


# `tests/mimo/check/test_parity.py` compares Gemma-3 in cp2 tp2 with transformers.
@pytest.mark.parametrize("layout", quick(LAYOUTS, "qwen2_5, encoder pp2"))
def test_steps_equal_those_of_one_rank(run_ranks: RunRanks, recipe: Path, layout: str) -> None:
    check(run_ranks, recipe, LAYOUTS[layout])


def test_unpacked_batches_with_images_are_refused(recipe: Path) -> None:
    wrong = load_recipe(recipe, [*GEMMA, "data.packing=false"])
    with pytest.raises(RecipeError, match=r"data\.packing: got false.*set it to true"):
        check_recipe(wrong, None)


QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
VERIFIED = [
    "language.family=qwen2_5",
    "encoders.vision.model.window_size=56",
    "encoders.vision.model.full_attention_layers=[1]",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "grids",
    [[], ["language.grid={tp: 2, sp: true, pp: 2}", ENCODER_SP]],
    ids=["its layout", "tp2 with sp, pp2"],
)
def test_verify_passes_with_windows(run_ranks: RunRanks, tmp_path: Path, grids: list[str]) -> None:
    recipe = load_recipe(QUICKSTART, [*VERIFIED, *grids])
    (cell,) = recipe_cells(recipe, 8, full=False).cells
    result = Verifier(tmp_path, "fp32").run(cell)
    assert result.comparison is not None, result.failure
    assert result.passed, str(result.comparison.first)
