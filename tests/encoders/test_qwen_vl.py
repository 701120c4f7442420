"""The vision tower computes what transformers' Qwen2.5-VL tower computes with full attention.

fp32 on a CPU, random weights in every parameter. Rows differ by at most 1e-5 (they are of order
one), gradients by 1e-5 of their largest element.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from tests import lone_module
from tests.conftest import RunRanks
from tests.lone_module import TowerOptions, Weights, noise
from tests.tower_reference import TOLERANCE, TowerReference

SETTINGS = {
    "num_layers": 3,
    "hidden_size": 48,
    "ffn_hidden_size": 56,
    "num_attention_heads": 4,
    "patch_size": 14,
}
OUTPUT_SIZE = 40
PATCH_NUMBERS = 3 * 2 * 14 * 14
MERGE = 2
# Square, one row each way, wide, the smallest possible, two frames, and one size twice.
GRIDS = torch.tensor([[1, 6, 6], [1, 2, 10], [1, 14, 2], [1, 2, 2], [2, 4, 6], [1, 6, 6]])


def patches_of(grids: Tensor, seed: int = 1) -> Tensor:
    return noise(seed, int(grids.prod(1).sum()), PATCH_NUMBERS)


def rows_per_image(grids: Tensor) -> list[int]:
    return (grids.prod(1) // MERGE**2).tolist()


def to_ours(hf: Weights, num_layers: int = SETTINGS["num_layers"]) -> Weights:
    """Weights or gradients of transformers' tower under our names and in our layout."""
    heads = SETTINGS["num_attention_heads"]
    ours = {"patch_embed.weight": hf["patch_embed.proj.weight"].flatten(1)}
    for n in range(num_layers):
        there, here = f"blocks.{n}", f"blocks.layers.{n}"
        ours[f"{here}.input_layernorm.weight"] = hf[f"{there}.norm1.weight"]
        ours[f"{here}.pre_mlp_layernorm.weight"] = hf[f"{there}.norm2.weight"]
        for kind in ("weight", "bias"):
            qkv = hf[f"{there}.attn.qkv.{kind}"].chunk(3)
            attention, mlp = f"{here}.self_attention", f"{here}.mlp"
            ours[f"{attention}.linear_qkv.{kind}"] = lone_module.interleave_qkv(qkv, heads)
            ours[f"{attention}.linear_proj.{kind}"] = hf[f"{there}.attn.proj.{kind}"]
            gate_up = [hf[f"{there}.mlp.{which}_proj.{kind}"] for which in ("gate", "up")]
            ours[f"{mlp}.linear_fc1.{kind}"] = torch.cat(gate_up)
            ours[f"{mlp}.linear_fc2.{kind}"] = hf[f"{there}.mlp.down_proj.{kind}"]
    ours["blocks.final_layernorm.weight"] = hf["merger.ln_q.weight"]
    for kind in ("weight", "bias"):
        ours[f"merger.linear_fc1.{kind}"] = hf[f"merger.mlp.0.{kind}"]
        ours[f"merger.linear_fc2.{kind}"] = hf[f"merger.mlp.2.{kind}"]
    return {name: tensor.detach().contiguous() for name, tensor in ours.items()}


@pytest.fixture(scope="module")
def reference() -> TowerReference:
    config = Qwen2_5_VLVisionConfig(
        depth=SETTINGS["num_layers"],
        hidden_size=SETTINGS["hidden_size"],
        intermediate_size=SETTINGS["ffn_hidden_size"],
        num_heads=SETTINGS["num_attention_heads"],
        patch_size=SETTINGS["patch_size"],
        spatial_merge_size=MERGE,
        out_hidden_size=OUTPUT_SIZE,
        window_size=56,
        fullatt_block_indexes=list(range(SETTINGS["num_layers"])),
    )
    model = Qwen2_5_VisionTransformerPretrainedModel(config)
    lone_module.randomize(model, seed=0)

    def forward(patches: Tensor) -> Tensor:
        return model(patches, grid_thw=GRIDS).pooler_output

    return TowerReference.of(model, forward, patches_of(GRIDS), to_ours)


def test_rows_and_every_gradient_equal_those_of_transformers(
    run_ranks: RunRanks, reference: TowerReference
) -> None:
    (got,) = run_ranks(
        lone_module.run_tower,
        1,
        SETTINGS,
        OUTPUT_SIZE,
        reference.weights,
        [(reference.patches, GRIDS)],
        reference.row_gradients,
    )
    (rows,) = got["rows"]
    reference.check_rows([rows])
    reference.check_gradients([got])


def test_rows_of_an_image_do_not_depend_on_what_else_is_in_the_call(
    run_ranks: RunRanks, reference: TowerReference
) -> None:
    chosen = len(GRIDS) - 1  # another image has the same size, so both run in one dense call
    patches = list(reference.patches.split(GRIDS.prod(1).tolist()))
    sizes = rows_per_image(GRIDS)
    alone = (patches[chosen], GRIDS[chosen:])
    # Whatever leaked from the other images would not be a number.
    spoilt = torch.cat(
        [*(torch.full_like(p, torch.nan) for p in patches[:chosen]), patches[chosen]]
    )
    gradient = torch.zeros_like(reference.rows)
    gradient[-sizes[chosen] :] = 1.0
    (got,) = run_ranks(
        lone_module.run_tower,
        1,
        SETTINGS,
        OUTPUT_SIZE,
        reference.weights,
        [alone, (spoilt, GRIDS), (reference.patches, GRIDS)],
        gradient,
    )
    rows_alone, rows_spoilt, rows_together = got["rows"]
    assert rows_spoilt[: -sizes[chosen]].isnan().all()
    for rows in (rows_spoilt, rows_together):
        torch.testing.assert_close(rows[-sizes[chosen] :], rows_alone, rtol=0, atol=TOLERANCE)
    own = len(patches[chosen])
    assert (got["patch_gradients"][:-own] == 0).all()
    assert (got["patch_gradients"][-own:] != 0).any()


def test_no_images_give_no_rows_and_a_zero_gradient_to_every_parameter(
    run_ranks: RunRanks, reference: TowerReference
) -> None:
    none = (torch.zeros(0, PATCH_NUMBERS), torch.zeros(0, 3, dtype=torch.int64))
    (got,) = run_ranks(
        lone_module.run_tower,
        1,
        SETTINGS,
        OUTPUT_SIZE,
        reference.weights,
        [none],
        torch.zeros(0, OUTPUT_SIZE),
    )
    assert got["rows"][0].shape == (0, OUTPUT_SIZE)
    assert got["gradients"].keys() == reference.weights.keys()
    assert all((gradient == 0).all() for gradient in got["gradients"].values())


def test_two_tensor_parallel_ranks_give_the_rows_of_one(
    run_ranks: RunRanks, reference: TowerReference
) -> None:
    results = run_ranks(
        lone_module.run_tower,
        2,
        SETTINGS,
        OUTPUT_SIZE,
        reference.weights,
        [(reference.patches, GRIDS)],
        None,
        lone_module.TowerOptions(tp=2),
    )
    for result in results:
        torch.testing.assert_close(result["rows"][0], reference.rows, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallel_ranks_each_give_their_part_of_the_rows_of_one(
    run_ranks: RunRanks, reference: TowerReference, tp: int
) -> None:
    none = (torch.zeros(0, PATCH_NUMBERS), torch.zeros(0, 3, dtype=torch.int64))
    calls = [(reference.patches, GRIDS), none]
    options = TowerOptions(tp=tp, sp=True)
    results = run_ranks(
        lone_module.run_tower, tp, SETTINGS, OUTPUT_SIZE, reference.weights, calls, None, options
    )
    num_rows = len(reference.rows)
    part = -(-num_rows // tp)
    assert num_rows % tp, "the last part must be padded"
    assert all(result["rows"][0].shape == (part, OUTPUT_SIZE) for result in results)
    rows = torch.cat([result["rows"][0] for result in results])[:num_rows]
    torch.testing.assert_close(rows, reference.rows, rtol=0, atol=TOLERANCE)
    assert all(result["rows"][1].shape == (0, OUTPUT_SIZE) for result in results)


def test_fresh_weights_are_the_same_function_on_one_rank_and_on_two(run_ranks: RunRanks) -> None:
    call = (patches_of(GRIDS), GRIDS)
    settings = SETTINGS | {"init_std": 0.05}
    (one,) = run_ranks(lone_module.run_tower, 1, settings, OUTPUT_SIZE, None, [call])
    tp2 = lone_module.TowerOptions(tp=2)
    two = run_ranks(lone_module.run_tower, 2, settings, OUTPUT_SIZE, None, [call], None, tp2)
    for result in two:
        torch.testing.assert_close(result["rows"], one["rows"], rtol=0, atol=TOLERANCE)
