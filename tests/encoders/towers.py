"""Small vision towers of every family, with what transformers computes with the same weights.

Random weights in every parameter. Letters: P patches, C numbers per patch, I images, N rows.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from tests import lone_module
from tests.lone_module import Weights, noise
from tests.tower_reference import TowerReference

OUTPUT_SIZE = 40
MERGE = 2
_SIZES: dict[str, Any] = {"hidden_size": 48, "ffn_hidden_size": 56, "num_attention_heads": 4}
# Square, one row each way, wide, the smallest possible, two frames, and one size twice.
_GRIDS = torch.tensor([[1, 6, 6], [1, 2, 10], [1, 14, 2], [1, 2, 2], [2, 4, 6], [1, 6, 6]])
# Windows are cut at both edges, at one, an image is smaller than a window, or has several frames.
_WINDOW_GRIDS = torch.tensor(
    [[1, 6, 10], [1, 2, 10], [1, 14, 2], [1, 2, 2], [2, 6, 6], [1, 8, 4], [1, 6, 10]]
)


@dataclass(frozen=True)
class Tower:
    """One family's tower and the images that it is called with.

    build: the model of transformers. forward: that model, patches (P, C), grids (I, 3) -> rows.
    prefix: of its weights' names in the whole model.
    """

    family: str
    settings: dict[str, Any]
    patch_numbers: int
    grids: Tensor
    build: Callable[[Tower], nn.Module]
    forward: Callable[[nn.Module, Tensor, Tensor], Tensor]
    levels: int = 0
    prefix: str = "model.visual."
    reference: Callable[[], TowerReference] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference", functools.cache(self._compute))

    @property
    def width(self) -> int:
        """Numbers in a row: the embedding, then the levels."""
        return (1 + self.levels) * OUTPUT_SIZE

    @property
    def rows_per_image(self) -> tuple[int, ...]:
        return tuple((self.grids.prod(1) // MERGE**2).tolist())

    def draw_patches(self) -> Tensor:
        return noise(1, int(self.grids.prod(1).sum()), self.patch_numbers)

    def _compute(self) -> TowerReference:
        model = self.build(self)
        randomize(model, seed=0)
        return TowerReference.of(
            model,
            lambda patches: self.forward(model, patches, self.grids),
            self.draw_patches(),
            self.to_ours,
        )

    def to_ours(self, hf: Weights, output_size: int = OUTPUT_SIZE) -> Weights:
        """Its weights or gradients under our names, by the family's key map."""
        family: Any = importlib.import_module(f"encoders.{self.family}")
        settings = family.Settings(**self.settings)
        named = {f"{self.prefix}{name}": tensor.detach() for name, tensor in hf.items()}
        return {w.name: w.pack(named) for w in family.weights_in_hf(settings, output_size)}


def randomize(model: nn.Module, seed: int) -> None:
    """As `lone_module.randomize`, with those norm weights around 0 that are factors less one."""
    lone_module.randomize(model, seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            owner = model.get_submodule(name.rpartition(".")[0])
            if type(owner).__name__ == "Gemma3RMSNorm":
                param.sub_(1)


# ----------------------------------------------------------------------------- Qwen2.5-VL


def qwen2_5_vl_vision_config(settings: dict[str, Any]) -> Qwen2_5_VLVisionConfig:
    every_layer = range(settings["num_layers"])
    return Qwen2_5_VLVisionConfig(
        depth=settings["num_layers"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["ffn_hidden_size"],
        num_heads=settings["num_attention_heads"],
        patch_size=settings["patch_size"],
        spatial_merge_size=MERGE,
        out_hidden_size=OUTPUT_SIZE,
        window_size=settings.get("window_size", 56),
        fullatt_block_indexes=list(settings.get("full_attention_layers", every_layer)),
    )


def _qwen2_5_vl(settings: dict[str, Any], grids: Tensor) -> Tower:
    return Tower(
        "qwen_vl",
        _SIZES | {"patch_size": 14} | settings,
        3 * 2 * 14 * 14,
        grids,
        lambda tower: Qwen2_5_VisionTransformerPretrainedModel(
            qwen2_5_vl_vision_config(tower.settings)
        ),
        lambda model, patches, grids: model(patches, grid_thw=grids).pooler_output,
    )


# ------------------------------------------------------------------------------- Qwen3-VL


def qwen3_vl_vision_config(settings: dict[str, Any]) -> Qwen3VLVisionConfig:
    return Qwen3VLVisionConfig(
        depth=settings["num_layers"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["ffn_hidden_size"],
        num_heads=settings["num_attention_heads"],
        spatial_merge_size=MERGE,
        out_hidden_size=OUTPUT_SIZE,
        num_position_embeddings=settings["num_grid_per_side"] ** 2,
        deepstack_visual_indexes=list(settings["deepstack_visual_indexes"]),
    )


def _qwen3_rows(model: nn.Module, patches: Tensor, grids: Tensor) -> Tensor:
    output = model(patches, grid_thw=grids)
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)


# -------------------------------------------------------------------------------- Gemma-3


def siglip_config(settings: dict[str, Any]) -> SiglipVisionConfig:
    return SiglipVisionConfig(
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["ffn_hidden_size"],
        num_hidden_layers=settings["num_layers"],
        num_attention_heads=settings["num_attention_heads"],
        image_size=settings["image_size"],
        patch_size=settings["patch_size"],
        vision_use_head=False,
    )


class _SiglipWithProjector(nn.Module):
    """transformers' tower and projector, under the names that they have in the whole model."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        vision = siglip_config(tower.settings)
        config = Gemma3Config(
            text_config={"hidden_size": OUTPUT_SIZE, "num_attention_heads": 4},
            vision_config=vision.to_dict(),
            mm_tokens_per_image=tower.settings["mm_tokens_per_image"],
        )
        self.vision_tower = SiglipVisionModel(vision)
        self.multi_modal_projector = Gemma3MultiModalProjector(config)

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        hidden = self.vision_tower(pixel_values=gemma3_pixels(patches)).last_hidden_state
        return self.multi_modal_projector(hidden).flatten(0, 1)


def gemma3_pixels(patches: Tensor) -> Tensor:
    """(P, C), the patches of one row adjacent -> (I, 3, height, width)."""
    edge, patch = GEMMA3.settings["image_size"], GEMMA3.settings["patch_size"]
    rows = edge // patch // MERGE
    cut = patches.view(-1, rows, rows, MERGE, MERGE, 3, patch, patch)
    return cut.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, edge, edge)


QWEN2_5_VL = _qwen2_5_vl({"num_layers": 3}, _GRIDS)
# Two layers of each kind, one of each in every half; windows of 2 × 2 rows.
QWEN2_5_VL_WINDOWS = _qwen2_5_vl(
    {"num_layers": 4, "window_size": 56, "full_attention_layers": (1, 2)}, _WINDOW_GRIDS
)
QWEN3_VL = Tower(
    "qwen3_vl",
    # Levels: one in each half, for two pipeline stages, and the last block has no final norm.
    _SIZES | {"num_layers": 4, "num_grid_per_side": 5, "deepstack_visual_indexes": (1, 2, 3)},
    3 * 2 * 16 * 16,
    _GRIDS,
    lambda tower: Qwen3VLVisionModel(qwen3_vl_vision_config(tower.settings)),
    _qwen3_rows,
    levels=3,
)
GEMMA3 = Tower(
    "gemma3",
    _SIZES | {"num_layers": 4, "image_size": 48, "patch_size": 8, "mm_tokens_per_image": 9},
    3 * 8 * 8,
    torch.tensor([[1, 6, 6]] * 3),
    _SiglipWithProjector,
    lambda model, patches, grids: model(patches, grids),
    prefix="model.",
)
TOWERS = {
    "qwen2.5-vl": QWEN2_5_VL,
    "qwen2.5-vl windows": QWEN2_5_VL_WINDOWS,
    "qwen3-vl": QWEN3_VL,
    "gemma3": GEMMA3,
}
