"""Sharded delivery, which never builds a whole sequence, against replicated, which does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bridge import communicator
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.parallel import groups
from mimo.parallel.build import build_layout
from mimo.parallel.connections import Host
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.model.test_parity import ENCODER_SP, LANGUAGE_SP, TWO_LANES

LAYOUTS = {
    "tp2 with sp": [LANGUAGE_SP],
    "tp2 without sp": ["language.grid={tp: 2}"],
    "encoder tp2, 2 lanes, to 2 lanes tp2 with sp": [
        "encoders.vision.grid={tp: 2, dp: 2}",
        "language.grid={tp: 2, sp: true, dp: 2}",
        "train.micro_batch_size=2",
    ],
    "cp2": ["language.grid.cp=2"],
    "cp2 tp2 with sp": ["language.grid={cp: 2, tp: 2, sp: true}"],
    "cp2 tp2 without sp, unpacked": ["language.grid={cp: 2, tp: 2}", "data.packing=false"],
    "encoder output cut over tp2": [ENCODER_SP, "language.grid={tp: 2, sp: true, dp: 1}"],
    "colocated with other tp": [
        "encoders.vision={family: qwen_vl, placement: colocated, grid: {tp: 1}}",
        "encoders.vision.model={num_layers: 2, hidden_size: 16, ffn_hidden_size: 24, "
        "num_attention_heads: 2, temporal_patch_size: 1, min_pixels: 784, max_pixels: 12544, "
        "init_std: 0.2}",
        "language.grid={tp: 2, sp: true, dp: 2}",
        "train.micro_batch_size=2",
    ],
}


def run(run_ranks: RunRanks, recipe: Path, overrides: list[str]) -> list[dict[str, Any]]:
    ranks = build_layout(load_recipe(recipe, overrides)).world_size
    return run_ranks(tiny.run_layout_steps, ranks, recipe, overrides)


def check_gradients(got: list[Any], expected: list[Any], tolerance: float) -> None:
    gradients = tiny.assemble(expected, "gradient")
    reference = {name: {"gradient": gradient} for name, gradient in gradients.items()}
    worst = tiny.errors(tiny.assemble(got, "gradient"), reference, "gradient")
    name = max(worst, key=lambda n: worst[n])
    assert worst[name] <= tolerance, f"gradient of {name}: error {worst[name]:.2e}"


@pytest.mark.parametrize("layout", quick(LAYOUTS, "cp2 tp2 with sp"))
def test_both_deliveries_give_the_same_forward_bit_for_bit_and_the_same_gradients(
    run_ranks: RunRanks, recipe: Path, layout: str
) -> None:
    sharded, replicated = (
        run(run_ranks, recipe, [*LAYOUTS[layout], f"bridge.delivery={delivery}"])
        for delivery in ("sharded", "replicated")
    )
    assert sharded[0]["metrics"][0]["loss"] == replicated[0]["metrics"][0]["loss"]
    check_gradients(sharded, replicated, 1e-6)


def run_on_hosts(
    rank: int, path: Path, overrides: list[str], ranks_per_host: int
) -> tuple[dict[str, Any], int]:
    """Train; return also how often rows or gradients were shared out over a lane."""
    first = rank - rank % ranks_per_host
    host = Host(tuple(range(first, first + ranks_per_host)), "", 0, 1)
    share_out = mock.patch.object(communicator, "share_out", side_effect=communicator.share_out)
    with share_out as shared, mock.patch.object(groups, "find_host", return_value=host):
        return tiny.run_layout_steps(rank, path, overrides), shared.call_count


def test_on_one_host_replicas_of_an_encoder_get_the_same_gradients_without_passing_them_on(
    run_ranks: RunRanks, recipe: Path
) -> None:
    overrides = ["encoders.vision.grid={tp: 2}", "language.grid={tp: 2, sp: true, dp: 1}"]
    on_one, on_two = (run_ranks(run_on_hosts, 4, recipe, overrides, n) for n in (4, 2))
    assert [count for _, count in on_one] == [0] * 4
    assert [count > 0 for _, count in on_two] == [True, True, False, False]
    gradients, expected = (
        tiny.assemble([result for result, _ in results], "gradient") for results in (on_one, on_two)
    )
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient == expected[name]).all(), name


@pytest.mark.slow
def test_bf16_on_the_wire_stays_within_its_own_rounding(run_ranks: RunRanks, recipe: Path) -> None:
    exact, rounded = (
        run(run_ranks, recipe, [*TWO_LANES, f"bridge.wire_dtype={dtype}"])
        for dtype in ("fp32", "bf16")
    )
    first, other = exact[0]["metrics"][0], rounded[0]["metrics"][0]
    # Rows and gradients are rounded once each, to 8 bits of mantissa: 0.4 % at most per number.
    assert first["loss"] != other["loss"]
    assert other["loss"] == pytest.approx(first["loss"], rel=2e-3)
    check_gradients(rounded, exact, 1e-2)
