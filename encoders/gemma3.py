"""Vision tower of the Gemma-3 kind: SigLIP, average pooling and a projection matrix.

Pre-norm blocks with LayerNorm, biases and a tanh GELU MLP, a learned position per patch of the
fixed square image, full attention inside an image. The patches of a pooled block are adjacent.
Source: transformers `SiglipVisionModel` without its head and `Gemma3MultiModalProjector`.

Letters: P patches of all images, C = 3·patch² numbers per patch, D tower hidden, M = merge²
patches per row, N = P/M rows, H language hidden.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from PIL import Image
from pydantic import model_validator
from torch import Tensor, nn

from data.modalities.images import PanAndScan, SquareImageProcessor
from encoders._patches import PackedPatches, PatchSettings, PatchTower, check_processor
from encoders._tower import both, build_tower, gelu_stack
from mimo.config.bounds import Crops, Rows, Side, SideRatio
from mimo.engines import megatron as engine
from mimo.families.flops import Product
from mimo.families.hf_config import (
    WHOLE,
    Config,
    Processors,
    agree,
    check_agreement,
    expect,
    normalisation,
)
from mimo.families.keymap import Weight, grouped_qkv, plain

PROJECTOR = ("projector.",)
"""Prefixes of the projector's weight names."""

_CROPS = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")


class Settings(PatchSettings):
    """Recipe keys under ``encoders.<name>.model``. Sizes are numbers of elements or pixels."""

    changeable_keys: ClassVar = PatchSettings.changeable_keys | {
        "pan_and_scan",
        *(f"pan_and_scan_{key}" for key in _CROPS),
    }

    image_size: Side = 896
    """Side of the square that every image becomes."""
    mm_tokens_per_image: Rows = 256
    """Rows of every image, a square number."""
    pan_and_scan: bool = False
    """Show a long image whole and again in crops, each with its embeddings."""
    pan_and_scan_min_crop_size: Side = 256
    """Pixels of the shorter side of a crop."""
    pan_and_scan_max_num_crops: Crops = 4
    """Largest number of crops along the longer side."""
    pan_and_scan_min_ratio_to_activate: SideRatio = 1.2
    """Ratio of an image's longer side to its shorter one, below which it is not cropped."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Settings:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of num_attention_heads, "
                f"{self.num_attention_heads}"
            )
        side = math.isqrt(self.mm_tokens_per_image)
        if side**2 != self.mm_tokens_per_image or self.image_size % (self.patch_size * side):
            raise ValueError(
                f"mm_tokens_per_image {self.mm_tokens_per_image} must be a square number, and "
                f"image_size {self.image_size} a multiple of patch_size · its root, "
                f"{self.patch_size * side}"
            )
        return self

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def merge_size(self) -> int:
        return self.patches_per_side // math.isqrt(self.mm_tokens_per_image)

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        """Scale down to images of four rows, of one patch each if rows have one, else of four."""
        patch_size = min(self.patch_size, 4)
        return super()._scaled_sizes(chunks, tp) | {
            "image_size": 2 * patch_size * min(self.merge_size, 2),
            "patch_size": patch_size,
            "mm_tokens_per_image": 4,
            "pan_and_scan": False,  # crops are items like any other
            "init_std": 0.3,
        }

    def processor(self, modality: str = "image") -> SquareImageProcessor:
        """Return the processor of images; every modality is taken as images."""
        crops = PanAndScan(
            min_crop_size=self.pan_and_scan_min_crop_size,
            max_num_crops=self.pan_and_scan_max_num_crops,
            min_ratio=self.pan_and_scan_min_ratio_to_activate,
        )
        return SquareImageProcessor(
            image_size=self.image_size,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            mean=self.image_mean,
            std=self.image_std,
            tower_width=self.hidden_size,
            jpeg_draft=self.jpeg_draft,
            pan_and_scan=crops if self.pan_and_scan else None,
        )

    def products(self, output_size: int) -> list[Product]:
        return [
            Product("patch_embed.weight", "patch", (self.hidden_size, 3 * self.patch_size**2)),
            Product("pos_embed.weight", "patch"),
            *self.stack_products("patch", gated=False),
            Product("projector.norm.weight", "row"),
            Product("projector.linear.weight", "row", (output_size, self.hidden_size)),
        ]


class Gemma3Tower(PatchTower):
    """Patches of many images -> rows of the language model's size."""

    stack = staticmethod(gelu_stack)

    def __init__(self, settings: Settings, ctx: engine.ModuleContext, output_size: int) -> None:
        positions, size = settings.patches_per_side**2, settings.hidden_size
        super().__init__(
            settings,
            ctx,
            settings.merge_size,
            patch_dim=3 * settings.patch_size**2,
            positions=lambda: nn.Embedding(positions, size, dtype=ctx.dtype),
        )
        self.settings = settings
        self.projector = None
        if ctx.is_last_stage:
            norm = engine.ZeroCenteredRMSNorm(self.config, size, settings.norm_eps)
            linear = nn.Linear(size, output_size, bias=False, dtype=self.config.params_dtype)
            self.projector = nn.ModuleDict({"norm": norm, "linear": linear})
            self.part.sum_gradients(self.projector)

    def pack(self, grids: Tensor) -> PackedPatches:
        """Add the learned positions of this rank's patches, on the first stage."""
        packed = super().pack(grids)
        if self.pos_embed is None:
            return packed
        side, places = self.settings.patches_per_side, packed.places
        # Blank patches lie outside the image; any position will do for them.
        index = (places[:, 0] * side + places[:, 1]).clamp(max=side**2 - 1)
        return replace(packed, lookups=(self.part.take(index, len(index)),))

    def project(self, hidden: list[Tensor], packed: PackedPatches) -> Tensor:
        """Pool the patches of a row, (P', 1, D) to (N', D), normalize and project to (N', H)."""
        assert self.projector is not None, "the last stage projects"
        blocks = hidden[0].reshape(-1, self.tokens_per_row, hidden[0].shape[-1])
        return self.projector["linear"](self.projector["norm"](blocks.mean(1)))


build = partial(build_tower, Gemma3Tower)


def settings_from_hf(config: Config, processors: Processors) -> dict[str, Any]:
    """Return recipe keys for Gemma-3's configuration. Raises ValueError."""
    vision = config["vision_config"]
    expect(
        vision,
        "vision_config",
        model_type="siglip_vision_model",
        hidden_act="gelu_pytorch_tanh",
        num_channels=3,
    )
    images = processors.image
    check_processor(images, Image.Resampling.BILINEAR, "image", "Gemma3ImageProcessor")
    size = images.get("size") or {}
    side, rows = vision["image_size"], config["mm_tokens_per_image"]
    agree(size, "the image processor's size", height=side, width=side)
    check_agreement(
        processors,
        patch_size=vision["patch_size"],
        image_token_id=config["image_token_index"],
        image_seq_length=rows,
    )
    stored = {key: images.get(key) for key in (f"pan_and_scan_{name}" for name in _CROPS)}
    crops = {key: value for key, value in stored.items() if value is not None}
    if images:
        # The processor's default is what it writes for an image.
        agree({"image_seq_length": 256, **processors.whole}, WHOLE, image_seq_length=rows)
    return {
        "num_layers": vision["num_hidden_layers"],
        "hidden_size": vision["hidden_size"],
        "ffn_hidden_size": vision["intermediate_size"],
        "num_attention_heads": vision["num_attention_heads"],
        "image_size": side,
        "patch_size": vision["patch_size"],
        "mm_tokens_per_image": rows,
        "norm_eps": vision["layer_norm_eps"],
        "init_std": config["initializer_range"],
        **normalisation(images),
        **({"pan_and_scan": True, **crops} if images.get("do_pan_and_scan") else {}),
    }


def weights_in_hf(settings: Settings, output_size: int) -> list[Weight]:
    """Return every parameter of the whole tower, as runs of Gemma-3's tensors."""
    size, ffn, patch = settings.hidden_size, settings.ffn_hidden_size, settings.patch_size
    heads, root = settings.num_attention_heads, "model.vision_tower"
    embeddings, projector = f"{root}.embeddings", "model.multi_modal_projector"
    weights = [
        *both("patch_embed", f"{embeddings}.patch_embedding", size, 3, patch, patch),
        plain(
            "pos_embed.weight",
            f"{embeddings}.position_embedding.weight",
            *(settings.patches_per_side**2, size),
        ),
        *both("blocks.final_layernorm", f"{root}.post_layernorm", size),
        plain("projector.norm.weight", f"{projector}.mm_soft_emb_norm.weight", size),
        plain(
            "projector.linear.weight",
            f"{projector}.mm_input_projection_weight",
            *(size, output_size),
            transposed=True,
        ),
    ]
    for n in range(settings.num_layers):
        layer, source = f"blocks.layers.{n}", f"{root}.encoder.layers.{n}"
        attention, theirs = f"{layer}.self_attention", f"{source}.self_attn"
        weights += [
            *both(f"{layer}.input_layernorm", f"{source}.layer_norm1", size),
            *both(f"{layer}.pre_mlp_layernorm", f"{source}.layer_norm2", size),
            *both(f"{attention}.linear_proj", f"{theirs}.out_proj", size, size),
            *both(f"{layer}.mlp.linear_fc1", f"{source}.mlp.fc1", ffn, size),
            *both(f"{layer}.mlp.linear_fc2", f"{source}.mlp.fc2", size, ffn),
        ]
        for kind, columns in (("weight", (size,)), ("bias", ())):
            keys = [f"{theirs}.{which}_proj.{kind}" for which in "qkv"]
            qkv = f"{attention}.linear_qkv.{kind}"
            weights.append(grouped_qkv(qkv, keys, heads, 1, size // heads, *columns))
    return weights
