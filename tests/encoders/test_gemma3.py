"""The Gemma-3 tower computes what transformers' SigLIP with Gemma-3's projector computes.

fp32 on a CPU, random weights in every parameter. Rows differ by at most 1e-5 (they are of order
one), gradients by 1e-5 of their largest element.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from encoders import gemma3
from tests import lone_module
from tests.conftest import RunRanks
from tests.lone_module import Weights, noise
from tests.tower_reference import TOLERANCE, TowerReference

SETTINGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 48,
    "ffn_hidden_size": 56,
    "num_attention_heads": 4,
    "image_size": 48,
    "patch_size": 8,
    "mm_tokens_per_image": 9,
}
SIDE, MERGE, ROWS = 6, 2, 9
OUTPUT_SIZE = 40
PATCH_NUMBERS = 3 * 8 * 8
NUM_IMAGES = 3
GRIDS = torch.tensor([[1, SIDE, SIDE]] * NUM_IMAGES)


def vision_config() -> SiglipVisionConfig:
    return SiglipVisionConfig(
        hidden_size=SETTINGS["hidden_size"],
        intermediate_size=SETTINGS["ffn_hidden_size"],
        num_hidden_layers=SETTINGS["num_layers"],
        num_attention_heads=SETTINGS["num_attention_heads"],
        image_size=SETTINGS["image_size"],
        patch_size=SETTINGS["patch_size"],
        vision_use_head=False,
    )


class TowerWithProjector(nn.Module):
    """transformers' tower and projector, under the names that they have in the whole model."""

    def __init__(self) -> None:
        super().__init__()
        config = Gemma3Config(
            text_config={"hidden_size": OUTPUT_SIZE, "num_attention_heads": 4},
            vision_config=vision_config().to_dict(),
            mm_tokens_per_image=ROWS,
        )
        self.vision_tower = SiglipVisionModel(vision_config())
        self.multi_modal_projector = Gemma3MultiModalProjector(config)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels (I, 3, height, width) -> rows (N, H)."""
        hidden = self.vision_tower(pixel_values=pixels).last_hidden_state
        return self.multi_modal_projector(hidden).flatten(0, 1)


def randomize(model: nn.Module, seed: int) -> None:
    """As `lone_module.randomize`, with the projector's norm around 0."""
    lone_module.randomize(model, seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("mm_soft_emb_norm.weight"):
                param.sub_(1)  # its factor is 1 + weight


def to_pixels(patches: Tensor) -> Tensor:
    """(P, C), the patches of one row adjacent -> (I, 3, height, width)."""
    rows, size = SIDE // MERGE, SETTINGS["patch_size"]
    cut = patches.view(-1, rows, rows, MERGE, MERGE, 3, size, size)
    ordered = cut.permute(0, 5, 1, 3, 6, 2, 4, 7)
    return ordered.reshape(-1, 3, SETTINGS["image_size"], SETTINGS["image_size"])


def to_ours(hf: Weights) -> Weights:
    """Weights or gradients of transformers' modules under our names and in our layout."""
    tower, projector = "vision_tower", "multi_modal_projector"
    ours = {
        "patch_embed.weight": hf[f"{tower}.embeddings.patch_embedding.weight"].flatten(1),
        "patch_embed.bias": hf[f"{tower}.embeddings.patch_embedding.bias"],
        "pos_embed.weight": hf[f"{tower}.embeddings.position_embedding.weight"],
        "projector.norm.weight": hf[f"{projector}.mm_soft_emb_norm.weight"],
        "projector.linear.weight": hf[f"{projector}.mm_input_projection_weight"].T,
    }
    for kind in ("weight", "bias"):
        ours[f"blocks.final_layernorm.{kind}"] = hf[f"{tower}.post_layernorm.{kind}"]
        for n in range(SETTINGS["num_layers"]):
            there, here = f"{tower}.encoder.layers.{n}", f"blocks.layers.{n}"
            ours[f"{here}.input_layernorm.{kind}"] = hf[f"{there}.layer_norm1.{kind}"]
            ours[f"{here}.pre_mlp_layernorm.{kind}"] = hf[f"{there}.layer_norm2.{kind}"]
            qkv = [hf[f"{there}.self_attn.{which}_proj.{kind}"] for which in "qkv"]
            attention = f"{here}.self_attention"
            ours[f"{attention}.linear_qkv.{kind}"] = lone_module.interleave_qkv(
                qkv, SETTINGS["num_attention_heads"]
            )
            ours[f"{attention}.linear_proj.{kind}"] = hf[f"{there}.self_attn.out_proj.{kind}"]
            ours[f"{here}.mlp.linear_fc1.{kind}"] = hf[f"{there}.mlp.fc1.{kind}"]
            ours[f"{here}.mlp.linear_fc2.{kind}"] = hf[f"{there}.mlp.fc2.{kind}"]
    return {name: tensor.detach().contiguous() for name, tensor in ours.items()}


@pytest.fixture(scope="module")
def reference() -> TowerReference:
    model = TowerWithProjector()
    randomize(model, seed=0)
    patches = noise(1, NUM_IMAGES * SIDE**2, PATCH_NUMBERS)
    return TowerReference.of(model, lambda own: model(to_pixels(own)), patches, to_ours)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (1, {"recompute": "full"}), (2, {"tp": 2}), (2, {"pp": 2})],
    ids=["one rank", "recompute", "tp2", "pp2"],
)
def test_rows_and_every_gradient_equal_those_of_transformers(
    run_ranks: RunRanks, reference: TowerReference, ranks: int, options: dict[str, Any]
) -> None:
    results = run_ranks(
        lone_module.run_tower,
        ranks,
        SETTINGS,
        OUTPUT_SIZE,
        reference.weights,
        [(reference.patches, GRIDS)],
        reference.row_gradients,
        lone_module.TowerOptions(family="gemma3", **options),
    )
    last_stage = results[-options.get("tp", 1) :]
    assert all(len(result["rows"]) == 1 for result in last_stage)
    reference.check_rows([result["rows"][0] for result in last_stage])
    reference.check_gradients(results)


def test_sequence_parallel_ranks_have_their_part_of_the_rows(
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
        lone_module.TowerOptions(family="gemma3", tp=2, sp=True),
    )
    assert all(result["rows_per_item"] == [(ROWS,) * NUM_IMAGES] for result in results)
    rows = torch.cat([result["rows"][0] for result in results])
    # 27 rows on two ranks: one blank row at the end.
    assert len(rows) == len(reference.rows) + 1
    torch.testing.assert_close(rows[:-1], reference.rows, rtol=0, atol=TOLERANCE)


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
        lone_module.TowerOptions(family="gemma3"),
    )
    assert got["rows"][0].shape == (0, OUTPUT_SIZE)
    gradients = lone_module.join_gradients([got])
    assert gradients.keys() == reference.weights.keys()
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.parametrize(("key", "value"), [("mm_tokens_per_image", 8), ("image_size", 56)])
def test_rows_that_no_square_image_has_are_refused(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=r"mm_tokens_per_image .* must be a square number"):
        gemma3.Settings.model_validate({**SETTINGS, key: value})
