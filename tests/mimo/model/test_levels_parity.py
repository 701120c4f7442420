"""Any layout with feature levels takes the same steps as one rank, wherever the levels are needed.

As in `test_parity`, with an encoder of the Qwen3-VL kind: its embeddings enter the language model
below the first layer, its levels behind the first layers, which lie on different stages.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.model.test_parity import check

MODEL = (
    "model: {num_layers: 4, hidden_size: 16, ffn_hidden_size: 24, num_attention_heads: 2, "
    "deepstack_visual_indexes: [0, 1, 3], num_grid_per_side: 3, patch_size: 14, "
    "temporal_patch_size: 1, min_pixels: 784, max_pixels: 12544, init_std: 0.2}"
)
DISJOINT = [f"encoders.vision={{family: qwen3_vl, grid: {{dp: 1}}, {MODEL}}}"]
COLOCATED = [f"encoders.vision={{family: qwen3_vl, placement: colocated, grid: {{}}, {MODEL}}}"]
# Three levels in four layers: with two stages they are needed on both.
LAYERS = "language.model.num_layers=4"
INTERLEAVED = ["language.grid={pp: 2, vpp: 2}", "train.micro_batch_size=3"]

LAYOUTS = {
    "language pp2 recompute": [*DISJOINT, "language.grid.pp=2", "language.recompute=full"],
    "interleaved pp2 vpp2": [*DISJOINT, *INTERLEAVED],
    "interleaved pp2 vpp2 with the least run-ahead": [
        *DISJOINT,
        *INTERLEAVED,
        "encoders.vision.run_ahead=3",
    ],
    "interleaved pp2 vpp2 with tp2 and sp": [
        *DISJOINT,
        *INTERLEAVED,
        "language.grid={tp: 2, sp: true, pp: 2, vpp: 2}",
    ],
    "tp2 without sp, pp2": [*DISJOINT, "language.grid={tp: 2, pp: 2}"],
    "replicated, tp2 with sp, pp2": [
        *DISJOINT,
        "language.grid={tp: 2, sp: true, pp: 2}",
        "bridge.delivery=replicated",
    ],
    "cp2 tp2 with sp": [*DISJOINT, "language.grid={cp: 2, tp: 2, sp: true}"],
    "cp2 pp2, unpacked, recompute": [
        *DISJOINT,
        "language.grid={cp: 2, pp: 2}",
        "data.packing=false",
        "language.recompute=full",
    ],
    "replicated, cp2": [*DISJOINT, "language.grid.cp=2", "bridge.delivery=replicated"],
    "encoder tp2 with sp to pp2": [
        *DISJOINT,
        "encoders.vision.grid={tp: 2, sp: true, dp: 1}",
        "language.grid.pp=2",
    ],
    "encoder pp2 tp2 with sp": [*DISJOINT, "encoders.vision.grid={pp: 2, tp: 2, sp: true, dp: 1}"],
    "cp2, interleaved": [*DISJOINT, *INTERLEAVED, "language.grid={cp: 2, pp: 2, vpp: 2}"],
    "unpacked, tp2 with sp, pp2": [
        *DISJOINT,
        "language.grid={tp: 2, sp: true, pp: 2}",
        "data.packing=false",
    ],
    "unpacked, interleaved": [*DISJOINT, *INTERLEAVED, "data.packing=false"],
    "unpacked, replicated, tp2 with sp": [
        *DISJOINT,
        "language.grid={tp: 2, sp: true}",
        "data.packing=false",
        "bridge.delivery=replicated",
    ],
    "3 lanes to 2 with pp2": [
        *DISJOINT,
        "encoders.vision.grid.dp=3",
        "language.grid={dp: 2, pp: 2}",
        "train.micro_batch_size=2",
    ],
    "gradients reduced during backward, pp2": [
        *DISJOINT,
        "language.grid.pp=2",
        "train.overlap_grad_reduce=true",
    ],
    "frozen encoder to pp2": [*DISJOINT, "encoders.vision.freeze=true", "language.grid.pp=2"],
    "frozen language model, pp2": [*DISJOINT, "language.freeze=true", "language.grid.pp=2"],
    "colocated in groups with pp2": [
        *COLOCATED,
        "encoders.vision.encode_group=2",
        "language.grid.pp=2",
    ],
    "colocated tp2 with sp, pp2": [
        *COLOCATED,
        "encoders.vision.grid={tp: 2, sp: true}",
        "language.grid.pp=2",
    ],
    "colocated interleaved": [*COLOCATED, *INTERLEAVED],
    "colocated, tp2 without sp, pp2": [*COLOCATED, "language.grid={tp: 2, pp: 2}"],
}

# A second encoder: without levels, and with fewer than the first.
FEWER = (
    "encoders.glyphs={family: qwen3_vl, media: video, placeholder: '<|video_pad|>', grid: {dp: 1}, "
    "model: {num_layers: 2, hidden_size: 24, ffn_hidden_size: 32, num_attention_heads: 2, "
    "deepstack_visual_indexes: [1], num_grid_per_side: 4, patch_size: 7, temporal_patch_size: 1, "
    "min_pixels: 784, max_pixels: 3136, init_std: 0.2}}"
)
TWO_ENCODERS = {
    "one without levels, pp2": [*DISJOINT, tiny.SECOND_ENCODER, "language.grid.pp=2"],
    "one with fewer levels, interleaved": [*DISJOINT, FEWER, *INTERLEAVED],
    "mixed, pp2": [*COLOCATED, FEWER, "language.grid.pp=2"],
}


@pytest.mark.parametrize("layout", quick(LAYOUTS, "interleaved pp2 vpp2"))
def test_steps_with_levels_equal_those_of_one_rank(
    run_ranks: RunRanks, recipe: Path, layout: str
) -> None:
    check(run_ranks, recipe, [LAYERS, *LAYOUTS[layout]])


@pytest.mark.slow
@pytest.mark.parametrize("layout", TWO_ENCODERS)
def test_steps_with_levels_of_two_encoders_equal_those_of_one_rank(
    run_ranks: RunRanks, two_encoder_recipe: Path, layout: str
) -> None:
    check(run_ranks, two_encoder_recipe, [LAYERS, *TWO_ENCODERS[layout]])
