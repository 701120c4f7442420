"""A Gemma-3 model takes the same steps in any layout as on one rank.

As test_parity.py, with a model whose layers differ (local and global), whose images see themselves
whole, also where context parallelism cuts them, and whose positions are plain. The reference runs
every sample's images in one forward; `test_gemma3_vl.py` compares it with transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.model.recipe_checks import check_recipe
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.model.test_parity import ENCODER_SP, RECOMPUTED, TWO_LANES, check

# Three tokens of a window, four of an image: the window cuts inside images, too.
LANGUAGE_MODEL = (
    "language.model={num_layers: 4, hidden_size: 32, ffn_hidden_size: 48, num_attention_heads: 4, "
    "num_query_groups: 2, head_size: 8, query_pre_attn_scalar: 10, sliding_window: 3, "
    "sliding_window_pattern: 2, local_rotary_base: 100.0, rotary_base: 1000.0, rotary_factor: 3.0, "
    "init_std: 0.2}"
)
TOWER = (
    "encoders.vision.model={num_layers: 2, hidden_size: 16, ffn_hidden_size: 24, "
    "num_attention_heads: 2, image_size: 28, patch_size: 7, mm_tokens_per_image: 4, init_std: 0.2}"
)
FAMILY = ["language.family=gemma3", LANGUAGE_MODEL, "encoders.vision.family=gemma3", TOWER]
COLOCATED = ["encoders.vision.placement=colocated", "encoders.vision.grid={tp: 1}"]

LAYOUTS = {
    "1 lane to 1": [],
    "3 lanes to 2": ["encoders.vision.grid.dp=3", *TWO_LANES],
    "cp2 tp2 with sp": ["language.grid={cp: 2, tp: 2, sp: true}"],
    # Three layers a stage: the second stage begins with a global one.
    "colocated pp2, stages unlike": [
        *COLOCATED,
        "language.grid.pp=2",
        "language.model.num_layers=6",
    ],
    "encoder tp2 with sp, recomputed": [ENCODER_SP, "encoders.vision.recompute=full", RECOMPUTED],
    "cp2, recomputed in part": ["language.grid.cp=2", "language.recompute=selective"],
    "interleaved pp2 vpp2": [
        "language.grid.pp=2",
        "language.grid.vpp=2",
        "train.micro_batch_size=3",
    ],
}


@pytest.mark.parametrize("layout", quick(LAYOUTS, "cp2 tp2 with sp"))
def test_steps_equal_those_of_one_rank(run_ranks: RunRanks, recipe: Path, layout: str) -> None:
    check(run_ranks, recipe, [*FAMILY, *LAYOUTS[layout]])


def test_unpacked_batches_with_images_are_refused(recipe: Path) -> None:
    wrong = load_recipe(recipe, [*FAMILY, "data.packing=false"])
    with pytest.raises(RecipeError, match=r"data\.packing: got false.*set it to true"):
        check_recipe(wrong, None)
