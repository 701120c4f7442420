"""Sharded delivery, which never builds a whole sequence, against replicated, which does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import tiny

LAYOUTS = {
    "tp2 with sp": (3, ["language.grid={tp: 2, sp: true}"]),
    "tp2 without sp": (3, ["language.grid={tp: 2}"]),
    "encoder tp2, 2 lanes, to 2 lanes tp2 with sp": (
        8,
        [
            "encoders.vision.grid={tp: 2, dp: 2}",
            "language.grid={tp: 2, sp: true, dp: 2}",
            "train.micro_batch_size=2",
        ],
    ),
    "cp2": (3, ["language.grid.cp=2"]),
    "cp2 tp2 with sp": (5, ["language.grid={cp: 2, tp: 2, sp: true}"]),
    "cp2 tp2 without sp, unpacked": (5, ["language.grid={cp: 2, tp: 2}", "data.packing=false"]),
    "encoder output cut over tp2": (
        4,
        ["encoders.vision.grid={tp: 2, sp: true, dp: 1}", "language.grid={tp: 2, sp: true, dp: 1}"],
    ),
    "colocated with other tp": (
        4,
        [
            "encoders.vision={family: qwen_vl, placement: colocated, grid: {tp: 1}}",
            "encoders.vision.model={num_layers: 2, hidden_size: 16, ffn_hidden_size: 24, "
            "num_attention_heads: 2, temporal_patch_size: 1, min_pixels: 784, max_pixels: 12544, "
            "init_std: 0.2}",
            "language.grid={tp: 2, sp: true, dp: 2}",
            "train.micro_batch_size=2",
        ],
    ),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    tiny.write_samples(directory)
    return tiny.write_recipe(directory)


@pytest.mark.parametrize(
    "layout",
    quick(LAYOUTS, "cp2 tp2 with sp"),
)
def test_both_deliveries_give_the_same_forward_bit_for_bit_and_the_same_gradients(
    run_ranks: RunRanks, recipe: Path, layout: str
) -> None:
    ranks, overrides = LAYOUTS[layout]
    sharded, replicated = (
        run_ranks(tiny.run_layout_steps, ranks, recipe, [*overrides, f"bridge.delivery={delivery}"])
        for delivery in ("sharded", "replicated")
    )
    first, other = sharded[0]["metrics"][0], replicated[0]["metrics"][0]
    assert first["loss"] == other["loss"]
    gradients = tiny.assemble(sharded, "gradient")
    reference = {
        name: {"gradient": gradient}
        for name, gradient in tiny.assemble(replicated, "gradient").items()
    }
    worst = tiny.errors(gradients, reference, "gradient")
    name = max(worst, key=lambda n: worst[n])
    assert worst[name] <= 1e-6, f"gradient of {name}: error {worst[name]:.2e}"


@pytest.mark.slow
def test_bf16_on_the_wire_stays_within_its_own_rounding(run_ranks: RunRanks, recipe: Path) -> None:
    overrides = ["language.grid.dp=2", "train.micro_batch_size=2"]
    exact, rounded = (
        run_ranks(tiny.run_layout_steps, 3, recipe, [*overrides, f"bridge.wire_dtype={dtype}"])
        for dtype in ("fp32", "bf16")
    )
    first, other = exact[0]["metrics"][0], rounded[0]["metrics"][0]
    # Rows and gradients are rounded once each, to 8 bits of mantissa: 0.4 % at most per number.
    assert first["loss"] != other["loss"]
    assert other["loss"] == pytest.approx(first["loss"], rel=2e-3)
    reference = {
        name: {"gradient": gradient} for name, gradient in tiny.assemble(exact, "gradient").items()
    }
    worst = tiny.errors(tiny.assemble(rounded, "gradient"), reference, "gradient")
    name = max(worst, key=lambda n: worst[n])
    assert worst[name] <= 1e-2, f"gradient of {name}: error {worst[name]:.2e}"
