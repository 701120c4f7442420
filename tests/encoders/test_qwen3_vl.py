"""The Qwen3-VL tower computes what transformers' computes: embeddings and every level.

fp32 on a CPU, random weights in every parameter. Rows differ by at most 1e-5 (they are of order
one), gradients by 1e-5 of their largest element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from encoders import qwen3_vl
from tests import lone_module
from tests.conftest import RunRanks
from tests.lone_module import Weights, noise
from tests.tower_reference import TOLERANCE, TowerReference

SETTINGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 48,
    "ffn_hidden_size": 56,
    "num_attention_heads": 4,
    "num_grid_per_side": 5,
    # One in each half, for two pipeline stages, and the last block: its level has no final norm.
    "deepstack_visual_indexes": (1, 2, 3),
}
NUM_LEVELS = 3
OUTPUT_SIZE = 40
PATCH_NUMBERS = 3 * 2 * 16 * 16
MERGE = 2
# Square, one row each way, wide, the smallest possible, two frames, and one size twice.
GRIDS = torch.tensor([[1, 6, 6], [1, 2, 10], [1, 14, 2], [1, 2, 2], [2, 4, 6], [1, 6, 6]])


def to_ours(hf: Weights) -> Weights:
    """Weights or gradients of transformers' tower under our names and in our layout."""
    heads = SETTINGS["num_attention_heads"]
    ours = {
        "patch_embed.weight": hf["patch_embed.proj.weight"].flatten(1),
        "patch_embed.bias": hf["patch_embed.proj.bias"],
        "pos_embed.weight": hf["pos_embed.weight"],
    }
    for kind in ("weight", "bias"):
        for n in range(SETTINGS["num_layers"]):
            there, here = f"blocks.{n}", f"blocks.layers.{n}"
            ours[f"{here}.input_layernorm.{kind}"] = hf[f"{there}.norm1.{kind}"]
            ours[f"{here}.pre_mlp_layernorm.{kind}"] = hf[f"{there}.norm2.{kind}"]
            qkv = hf[f"{there}.attn.qkv.{kind}"].chunk(3)
            attention = f"{here}.self_attention"
            ours[f"{attention}.linear_qkv.{kind}"] = lone_module.interleave_qkv(qkv, heads)
            ours[f"{attention}.linear_proj.{kind}"] = hf[f"{there}.attn.proj.{kind}"]
            for linear in ("linear_fc1", "linear_fc2"):
                ours[f"{here}.mlp.{linear}.{kind}"] = hf[f"{there}.mlp.{linear}.{kind}"]
        ours[f"blocks.final_layernorm.{kind}"] = hf[f"merger.norm.{kind}"]
        for n in range(NUM_LEVELS):
            there, here = f"deepstack_merger_list.{n}", f"level_mergers.{n}"
            ours[f"{here}.norm.{kind}"] = hf[f"{there}.norm.{kind}"]
            for linear in ("linear_fc1", "linear_fc2"):
                ours[f"{here}.mlp.{linear}.{kind}"] = hf[f"{there}.{linear}.{kind}"]
        for linear in ("linear_fc1", "linear_fc2"):
            ours[f"merger.{linear}.{kind}"] = hf[f"merger.{linear}.{kind}"]
    return {name: tensor.detach().contiguous() for name, tensor in ours.items()}


@pytest.fixture(scope="module")
def reference() -> TowerReference:
    config = Qwen3VLVisionConfig(
        depth=SETTINGS["num_layers"],
        hidden_size=SETTINGS["hidden_size"],
        intermediate_size=SETTINGS["ffn_hidden_size"],
        num_heads=SETTINGS["num_attention_heads"],
        spatial_merge_size=MERGE,
        out_hidden_size=OUTPUT_SIZE,
        num_position_embeddings=SETTINGS["num_grid_per_side"] ** 2,
        deepstack_visual_indexes=list(SETTINGS["deepstack_visual_indexes"]),
    )
    model = Qwen3VLVisionModel(config)
    lone_module.randomize(model, seed=0)

    def forward(patches: Tensor) -> Tensor:
        output = model(patches, grid_thw=GRIDS)
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)

    patches = noise(1, int(GRIDS.prod(1).sum()), PATCH_NUMBERS)
    return TowerReference.of(model, forward, patches, to_ours)


def run(
    run_ranks: RunRanks,
    ranks: int,
    reference: TowerReference,
    calls: Sequence[tuple[Tensor, Tensor]],
    row_gradients: Tensor | None,
    **options: Any,
) -> list[dict[str, Any]]:
    return run_ranks(
        lone_module.run_tower,
        ranks,
        SETTINGS,
        OUTPUT_SIZE,
        reference.weights,
        calls,
        row_gradients,
        lone_module.TowerOptions(family="qwen3_vl", **options),
    )


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (1, {"recompute": "full"}),
        (1, {"recompute": "selective"}),
        (2, {"tp": 2}),
        (2, {"tp": 2, "sp": True}),
        (2, {"pp": 2}),
        (4, {"tp": 2, "sp": True, "pp": 2}),
        (4, {"tp": 2, "pp": 2, "recompute": "full"}),
    ],
    ids=["one rank", "recompute", "selective", "tp2", "sp", "pp2", "sp pp2", "tp2 pp2 recompute"],
)
def test_rows_levels_and_every_gradient_equal_those_of_transformers(
    run_ranks: RunRanks, reference: TowerReference, ranks: int, options: dict[str, Any]
) -> None:
    calls = [(reference.patches, GRIDS)]
    results = run(run_ranks, ranks, reference, calls, reference.row_gradients, **options)
    last_stage = results[-options.get("tp", 1) :]
    rows_per_item = tuple((GRIDS.prod(1) // MERGE**2).tolist())
    assert all(result["rows_per_item"] == [rows_per_item] for result in last_stage)
    found = [result["rows"][0] for result in last_stage]
    if options.get("sp"):
        found = [torch.cat(found)[: len(reference.rows)]]
    reference.check_rows(found)
    reference.check_gradients(results)


def test_no_images_give_no_rows_and_a_zero_gradient_to_every_parameter(
    run_ranks: RunRanks, reference: TowerReference
) -> None:
    none = (torch.zeros(0, PATCH_NUMBERS), torch.zeros(0, 3, dtype=torch.int64))
    width = (1 + NUM_LEVELS) * OUTPUT_SIZE
    (got,) = run(run_ranks, 1, reference, [none], torch.zeros(0, width))
    assert got["rows"][0].shape == (0, width)
    gradients = lone_module.join_gradients([got])
    assert gradients.keys() == reference.weights.keys()
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_fresh_weights_are_the_same_function_on_one_rank_and_on_others(run_ranks: RunRanks) -> None:
    call = (noise(1, int(GRIDS.prod(1).sum()), PATCH_NUMBERS), GRIDS)
    settings = SETTINGS | {"init_std": 0.05}

    def fresh(ranks: int, **options: Any) -> Tensor:
        results = run_ranks(
            lone_module.run_tower,
            ranks,
            settings,
            OUTPUT_SIZE,
            None,
            [call],
            None,
            lone_module.TowerOptions(family="qwen3_vl", **options),
        )
        return results[-1]["rows"][0]

    one = fresh(1)
    for options in ({"tp": 2}, {"pp": 2}):
        torch.testing.assert_close(fresh(2, **options), one, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("indexes", [(2, 1), (1, 1), (4,)])
def test_levels_of_blocks_that_are_not_there_or_out_of_order_are_refused(
    indexes: tuple[int, ...],
) -> None:
    with pytest.raises(ValueError, match=r"deepstack_visual_indexes .* num_layers - 1, which is 3"):
        qwen3_vl.Settings.model_validate({**SETTINGS, "deepstack_visual_indexes": indexes})


@pytest.mark.parametrize(("levels", "kept"), [(0, 0), (2, 2), (5, 3)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_scaled_down_tower_keeps_up_to_three_levels_and_divides_over_its_stages(
    levels: int, kept: int, stages: int
) -> None:
    whole = qwen3_vl.Settings.model_validate(
        {**SETTINGS, "num_layers": 12, "deepstack_visual_indexes": tuple(range(levels))}
    )
    tiny = whole.scaled_down(stages, tp=2)
    assert tiny.num_levels == kept
    assert not list(tiny.grid_problems(tp=2, chunks=stages))
    assert qwen3_vl.Settings.model_validate(tiny.model_dump()) == tiny
