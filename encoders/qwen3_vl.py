"""Vision tower of the Qwen3-VL kind with its patch mergers; it emits feature levels.

Qwen3.5 has the same tower without levels.

Pre-norm blocks with LayerNorm and a plain GELU MLP, a learned grid of positions resampled to each
image, 2-D rotary positions, full attention inside a frame. Besides the embeddings it emits one
level of rows per entry of `deepstack_visual_indexes` (DeepStack, arXiv:2406.04334): the hidden
states after that block, merged by a separate merger on the last stage.

Letters: P patches of all images, C = 3·temporal·patch² numbers per patch, D tower hidden,
M = merge² patches per row, N = P/M rows, L levels, H language hidden.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from data.modalities.images import ImageProcessor
from data.modalities.videos import VIDEO, TimedVideoProcessor
from encoders._patches import PackedPatches
from encoders._qwen import ROOT, QwenSettings, QwenTower, settings_of_all
from encoders._tower import both, build_tower, gelu_stack, mlp_products, row_mlp
from mimo.config.bounds import LayerIndex, Pixels, Side
from mimo.engines import megatron as engine
from mimo.families.flops import Product
from mimo.families.hf_config import Config, Processors, expect
from mimo.families.keymap import Weight, fused_qkv, plain

PROJECTOR = ("blocks.final_layernorm.", "merger.", "level_mergers.")
"""Prefixes of the projectors' weight names. The final norm of our stack is the merger's."""


class Settings(QwenSettings):
    """Recipe keys under ``encoders.<name>.model``. Sizes are numbers of elements or pixels."""

    deepstack_visual_indexes: Annotated[tuple[LayerIndex, ...], Field(strict=False)] = ()
    """Blocks, counted from 0, whose hidden states become levels."""
    num_grid_per_side: Side = 48
    """Learned positions per side; the whole grid is stretched over every image."""
    patch_size: Side = 16
    min_pixels: Pixels = 256 * 256
    max_pixels: Pixels = 4096 * 4096
    video_min_pixels: Pixels | None = None
    """Smaller videos, all frames together, are enlarged to this many pixels; null as for images."""
    video_max_pixels: Pixels | None = None
    """Larger videos, all frames together, are shrunk to this many pixels; null as for images."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Settings:
        self._check_sizes()
        self.check_layers("deepstack_visual_indexes", self.deepstack_visual_indexes)
        return self

    @property
    def num_levels(self) -> int:
        return len(self.deepstack_visual_indexes)

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        """Scale down to images of 1 to 16 rows.

        Up to three levels stay, after the last blocks: a tiny language model has no more layers,
        and with fewer levels its second stage would need none.
        """
        levels = min(self.num_levels, 3)
        layers = chunks * max(1, -(-levels // chunks))
        return super()._scaled_sizes(layers, tp) | {
            "deepstack_visual_indexes": tuple(range(layers - levels, layers)),
            "num_grid_per_side": 5,
            "init_std": 0.2,
        }

    def processor(self, modality: str = "image") -> ImageProcessor:
        images = self._images(self.hidden_size)
        if modality != VIDEO:
            return images
        return TimedVideoProcessor.like(
            images,
            min_pixels=self.video_min_pixels or self.min_pixels,
            max_pixels=self.video_max_pixels or self.max_pixels,
        )

    def products(self, output_size: int) -> list[Product]:
        products = [
            Product("patch_embed.weight", "patch", (self.hidden_size, self.patch_dim)),
            Product("pos_embed.weight", "patch"),
            *self.stack_products("patch", gated=False),
            *mlp_products("merger", self.merged_size, output_size),
        ]
        for number in range(self.num_levels):
            products.append(Product(f"level_mergers.{number}.norm.weight", "row"))
            name = f"level_mergers.{number}.mlp"
            products += mlp_products(name, self.merged_size, output_size)
        return products


class GridPositions(nn.Module):
    """A square grid of learned positions, stretched bilinearly over each image, corner to corner.

    Source: transformers `get_vision_interpolation_indices_and_weights` with aligned corners.
    """

    def __init__(self, side: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.side = side
        self.weight = nn.Parameter(torch.empty(side * side, hidden_size, dtype=dtype))

    def corners(self, places: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the four positions around each patch, int64, and their shares, fp32: both (4, P).

        places, sizes: (P, 2) int64, row and column of each patch, and its image's height and width.
        """
        exact = places.float() * (self.side - 1) / (sizes - 1).clamp(min=1)
        low = exact.floor()
        high_weight = exact - low
        taps = torch.stack((low, low + 1)).long().clamp(max=self.side - 1)  # (2, P, 2)
        weights = torch.stack((1 - high_weight, high_weight))
        # Every pair of a row's and a column's tap: (2, 2, P).
        index = taps[:, None, :, 0] * self.side + taps[None, :, :, 1]
        share = weights[:, None, :, 0] * weights[None, :, :, 1]
        return index.flatten(0, 1), share.flatten(0, 1)

    def forward(self, index: Tensor, share: Tensor) -> Tensor:
        """Look up positions (P, D). index, share: (4, P), from `corners`."""
        corners = nn.functional.embedding(index, self.weight)
        return (corners * share[..., None]).sum(0).to(self.weight.dtype)


class Qwen3VLTower(QwenTower):
    """Patches of many images -> embeddings and levels of the language model's size."""

    stack = staticmethod(gelu_stack)

    def __init__(self, settings: Settings, ctx: engine.ModuleContext, output_size: int) -> None:
        side, size, dtype = settings.num_grid_per_side, settings.hidden_size, ctx.dtype
        super().__init__(
            settings,
            ctx,
            output_size,
            positions=lambda: GridPositions(side, size, dtype),
            level_blocks=settings.deepstack_visual_indexes,
        )
        self.level_mergers = None
        if ctx.is_last_stage:
            self.level_mergers = nn.ModuleList()
            for _ in settings.deepstack_visual_indexes:
                norm = engine.LayerNorm(self.config, self.merged, settings.norm_eps)
                mlp = row_mlp(self.config, ctx, self.merged, output_size)
                self.level_mergers.append(nn.Sequential(OrderedDict(norm=norm, mlp=mlp)))

    def pack(self, grids: Tensor) -> PackedPatches:
        """Add the learned positions around each of this rank's patches, on the first stage."""
        packed = super().pack(grids)
        if not isinstance(self.pos_embed, GridPositions):  # a later stage
            return packed
        sizes = grids[:, 1:].repeat_interleave(grids.prod(1), dim=0)  # (P, 2)
        parts = (self.part.take(values, len(values)) for values in (packed.places, sizes))
        return replace(packed, lookups=self.pos_embed.corners(*parts))

    def project(self, hidden: list[Tensor], packed: PackedPatches) -> Tensor:
        """Merge hidden states (P', 1, D) to rows (N', (1 + L)·H): embeddings, then each level."""
        assert self.level_mergers is not None, "the last stage projects"
        rows = [super().project(hidden, packed)]
        for level, states in zip(self.level_mergers, hidden[1:], strict=True):
            rows.append(level(states.reshape(-1, self.merged)))
        return torch.cat(rows, dim=-1)


build = partial(build_tower, Qwen3VLTower)


# The default of the class, for a folder's file that leaves it out.
_VIDEO_SIZE = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}


def settings_from_hf(config: Config, processors: Processors) -> dict[str, Any]:
    """Return recipe keys for Qwen3-VL's configuration. Raises ValueError."""
    vision = config["vision_config"]
    expect(vision, "vision_config", hidden_act="gelu_pytorch_tanh")
    return {
        **settings_of_all(config, processors, "Qwen3VLVideoProcessor", _VIDEO_SIZE),
        "deepstack_visual_indexes": list(vision.get("deepstack_visual_indexes", ())),
        "num_grid_per_side": math.isqrt(vision["num_position_embeddings"]),
    }


def weights_in_hf(settings: Settings, output_size: int) -> list[Weight]:
    """Return every parameter of the whole tower, as runs of Qwen3-VL's tensors."""
    size, ffn, merged = settings.hidden_size, settings.ffn_hidden_size, settings.merged_size
    heads, patch = settings.num_attention_heads, settings.patch_size
    kernel = (3, settings.temporal_patch_size, patch, patch)
    weights = [
        *both("patch_embed", f"{ROOT}.patch_embed.proj", size, *kernel),
        plain("pos_embed.weight", f"{ROOT}.pos_embed.weight", settings.num_grid_per_side**2, size),
        *both("blocks.final_layernorm", f"{ROOT}.merger.norm", size),
        *both("merger.linear_fc1", f"{ROOT}.merger.linear_fc1", merged, merged),
        *both("merger.linear_fc2", f"{ROOT}.merger.linear_fc2", output_size, merged),
    ]
    for n in range(settings.num_levels):
        level, source = f"level_mergers.{n}", f"{ROOT}.deepstack_merger_list.{n}"
        weights += [
            *both(f"{level}.norm", f"{source}.norm", merged),
            *both(f"{level}.mlp.linear_fc1", f"{source}.linear_fc1", merged, merged),
            *both(f"{level}.mlp.linear_fc2", f"{source}.linear_fc2", output_size, merged),
        ]
    for n in range(settings.num_layers):
        layer, source = f"blocks.layers.{n}", f"{ROOT}.blocks.{n}"
        qkv = f"{layer}.self_attention.linear_qkv"
        weights += [
            *both(f"{layer}.input_layernorm", f"{source}.norm1", size),
            *both(f"{layer}.pre_mlp_layernorm", f"{source}.norm2", size),
            fused_qkv(f"{qkv}.weight", f"{source}.attn.qkv.weight", heads, size // heads, size),
            fused_qkv(f"{qkv}.bias", f"{source}.attn.qkv.bias", heads, size // heads),
            *both(f"{layer}.self_attention.linear_proj", f"{source}.attn.proj", size, size),
            *both(f"{layer}.mlp.linear_fc1", f"{source}.mlp.linear_fc1", ffn, size),
            *both(f"{layer}.mlp.linear_fc2", f"{source}.mlp.linear_fc2", size, ffn),
        ]
    return weights
