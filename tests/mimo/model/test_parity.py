"""Any layout takes the same steps as one rank: loss, gradient norm, every gradient, weights.

Two steps, fp32, SGD, real ranks on CPU. The batch has samples with 0-4 images of different sizes,
uneven token counts, and one whole microbatch without any image. With two encoders, samples have
items of both, of either or of none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.parallel.build import build_layout
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import tiny

TOLERANCE = 1e-5
FP64_TOLERANCE = 1e-10

# Four microbatches: interleaving wants a multiple of the pipeline's stages.
INTERLEAVED = [
    "language.grid.pp=2",
    "language.grid.vpp=2",
    "language.model.num_layers=4",
    "train.micro_batch_size=3",
]

COLOCATED = ["encoders.vision.placement=colocated", "encoders.vision.grid={tp: 1}"]
TWO_LANES = ["language.grid.dp=2", "train.micro_batch_size=2"]
ENCODER_SP = "encoders.vision.grid={tp: 2, sp: true, dp: 1}"
LANGUAGE_SP = "language.grid={tp: 2, sp: true}"
FROZEN_TOWER = "encoders.vision.freeze=tower"
RECOMPUTED = "language.recompute=full"

# Six sequences to a step, instead of twelve samples.
BY_TOKENS = [
    "data.tokens_per_microbatch=128",
    "data.rows_per_microbatch=48",
    "data.packing_window=6",
    "train.micro_batch_size=1",
    "train.global_batch_size=6",
]

# Layouts beyond those that `tests/device_model/test_nccl.py` compares with one rank.
# Every layout has four samples to a global microbatch.
LAYOUTS = {
    "1 lane to 2": [*TWO_LANES],
    "2 lanes to 2, gradients reduced during backward": [
        "encoders.vision.grid.dp=2",
        *TWO_LANES,
        "train.overlap_grad_reduce=true",
    ],
    "3 lanes to 2": ["encoders.vision.grid.dp=3", *TWO_LANES],
    "encoder tp2 with sp": [ENCODER_SP],
    "encoder tp2 with sp, frozen": [ENCODER_SP, "encoders.vision.freeze=true"],
    "encoder pp2 tp2 with sp and recompute": [
        "encoders.vision.grid={tp: 2, sp: true, pp: 2, dp: 1}",
        "encoders.vision.recompute=full",
    ],
    "2 lanes tp2 to tp2 pp2 with sp": [
        "encoders.vision.grid={tp: 2, dp: 2}",
        "language.grid={tp: 2, pp: 2, sp: true}",
    ],
    "untied embeddings": ["language.model.tie_word_embeddings=false"],
    "interleaved pp2 vpp2 with tp2 and sp": [
        *INTERLEAVED,
        "language.grid={tp: 2, sp: true, pp: 2, vpp: 2}",
    ],
    "colocated with other tp": [
        *COLOCATED,
        "encoders.vision.grid={tp: 2}",
        "language.grid={tp: 4, sp: true}",
        "language.model.num_query_groups=4",
    ],
    "colocated tp2 with sp in groups of two microbatches": [
        *COLOCATED,
        "encoders.vision.grid={tp: 2, sp: true}",
        "encoders.vision.encode_group=2",
        "language.grid={tp: 2, pp: 2}",
    ],
    "colocated lanes and rows gathered over tp": [
        *COLOCATED,
        "encoders.vision.grid={tp: 1}",
        "language.grid={tp: 2, dp: 2}",
        "train.micro_batch_size=2",
    ],
    "colocated in groups of two microbatches": [
        *COLOCATED,
        "encoders.vision.encode_group=2",
        "language.grid.pp=2",
        "train.overlap_grad_reduce=true",
    ],
    "colocated interleaved": [*INTERLEAVED, *COLOCATED],
    "colocated frozen": [*COLOCATED, "encoders.vision.freeze=true", *TWO_LANES],
    "only the projector of an encoder with pp2, tp2 and sp learns": [
        "language.freeze=true",
        FROZEN_TOWER,
        "encoders.vision.grid={tp: 2, sp: true, pp: 2, dp: 1}",
    ],
    "the tower is frozen, colocated": [*COLOCATED, FROZEN_TOWER, "language.grid.pp=2"],
    "unpacked, tp2 with sp, pp2": ["data.packing=false", "language.grid={tp: 2, sp: true, pp: 2}"],
    "unpacked, interleaved, tp2 without sp": [
        *INTERLEAVED,
        "data.packing=false",
        "language.grid.tp=2",
    ],
    "cp2 tp2 without sp, two lanes": ["language.grid={cp: 2, tp: 2}", "encoders.vision.grid.dp=2"],
    "cp3, unpacked": ["language.grid.cp=3", "data.packing=false", "data.sequence_length=126"],
    "cp2, interleaved pp2 vpp2": [*INTERLEAVED, "language.grid={cp: 2, pp: 2, vpp: 2}"],
    "cp2 tp2 pp2 with sp, colocated, recomputed": [
        *COLOCATED,
        "encoders.vision.grid={tp: 2}",
        "language.grid={cp: 2, tp: 2, sp: true, pp: 2}",
        RECOMPUTED,
    ],
    "cp2, the tower is frozen": ["language.grid.cp=2", FROZEN_TOWER],
    "cp2, recomputed in part": ["language.grid.cp=2", "language.recompute=selective"],
    "2 lanes to 2, by tokens": ["encoders.vision.grid.dp=2", "language.grid.dp=2", *BY_TOKENS],
    "by tokens, cp2, interleaved pp2 vpp2": [
        *INTERLEAVED,
        "language.grid={cp: 2, pp: 2, vpp: 2}",
        *BY_TOKENS,
    ],
    "clipped": ["train.clip_grad_norm=0.5", "language.grid.tp=2", "language.grid.pp=2"],
}

# Two encoders, `vision` for images and `glyphs` for videos.
SECOND = tiny.SECOND_ENCODER
SECOND_COLOCATED = [SECOND, "encoders.glyphs.placement=colocated", "encoders.glyphs.grid={tp: 1}"]
TWO_ENCODERS = {
    "both disjoint, interleaved, tp2 with sp": [
        SECOND,
        *INTERLEAVED,
        "encoders.glyphs.grid.dp=2",
        "language.grid={tp: 2, sp: true, pp: 2, vpp: 2}",
    ],
    "mixed with pp2": [*SECOND_COLOCATED, "encoders.vision.grid.dp=2", "language.grid.pp=2"],
    "mixed in groups of two microbatches": [
        *SECOND_COLOCATED,
        "encoders.glyphs.encode_group=2",
        "language.grid.pp=2",
        "train.overlap_grad_reduce=true",
    ],
    "mixed with sp, the first encoder frozen": [
        *SECOND_COLOCATED,
        "encoders.vision.freeze=true",
        LANGUAGE_SP,
    ],
    "both colocated": [
        *SECOND_COLOCATED,
        *COLOCATED,
        "encoders.glyphs.grid={tp: 2}",
        "language.grid={tp: 2, pp: 2}",
    ],
    "both colocated with lanes": [*SECOND_COLOCATED, *COLOCATED, *TWO_LANES],
}


def check(
    run_ranks: RunRanks, recipe: Path, overrides: list[str], tolerance: float = TOLERANCE
) -> None:
    """Compare the steps of a layout, on as many ranks as it needs, with those of one rank."""
    ranks = build_layout(load_recipe(recipe, overrides)).world_size
    reference = tiny.reference_steps(run_ranks, recipe, overrides)
    results = run_ranks(tiny.run_layout_steps, ranks, recipe, overrides)
    for result in results:
        for metrics, expected in zip(result["metrics"], reference["steps"], strict=True):
            assert metrics["loss_tokens"] == expected["loss_tokens"]
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=tolerance)
            assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)
    for what in ("gradient", "weight"):
        got = tiny.assemble(results, what)
        if "language.output_layer.weight" not in reference["parameters"]:
            # Tied over pipeline stages: the last stage's copy must be the embedding, bit for bit.
            copy = got.pop("language.output_layer.weight", None)
            if copy is not None:
                embedding = got["language.embedding.word_embeddings.weight"]
                assert (copy == embedding).all()
        worst = tiny.errors(got, reference["parameters"], what)
        name = max(worst, key=lambda n: worst[n])
        assert worst[name] <= tolerance, f"{what} of {name}: error {worst[name]:.2e}"


@pytest.mark.parametrize(
    "layout",
    quick(
        LAYOUTS,
        "colocated in groups of two microbatches",
        "unpacked, tp2 with sp, pp2",
        "cp2 tp2 without sp, two lanes",
        "2 lanes to 2, gradients reduced during backward",
        "2 lanes to 2, by tokens",
    ),
)
def test_steps_equal_those_of_one_rank(run_ranks: RunRanks, recipe: Path, layout: str) -> None:
    check(run_ranks, recipe, LAYOUTS[layout])


@pytest.mark.parametrize("layout", quick(TWO_ENCODERS, "mixed with pp2"))
def test_steps_with_two_encoders_equal_those_of_one_rank(
    run_ranks: RunRanks, two_encoder_recipe: Path, layout: str
) -> None:
    check(run_ranks, two_encoder_recipe, TWO_ENCODERS[layout])


def test_fp64_steps_equal_one_rank_to_ten_digits(run_ranks: RunRanks, recipe: Path) -> None:
    overrides = [*LAYOUTS["3 lanes to 2"], "train.precision=fp64"]
    check(run_ranks, recipe, overrides, FP64_TOLERANCE)


@pytest.mark.parametrize("module", ["language", "encoders.vision"])
def test_frozen_module_keeps_its_weights_and_the_other_learns_as_on_one_rank(
    run_ranks: RunRanks, recipe: Path, module: str
) -> None:
    check(run_ranks, recipe, ["language.grid.pp=2", f"{module}.freeze=true"])
