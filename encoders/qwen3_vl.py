"""Vision tower of the Qwen3-VL kind with its patch mergers: the first encoder with levels.

Pre-norm blocks with LayerNorm and a plain GELU MLP, a learned grid of positions resampled to each
image, 2-D rotary positions, full attention inside a frame. Besides the embeddings it emits one
level of rows per entry of `deepstack_visual_indexes` (DeepStack, arXiv:2406.04334): the hidden
states after that block, merged by a separate merger. All images of a microbatch run as one packed
sequence.

In a pipeline the hidden states after those blocks travel with the others to the last stage, which
holds all mergers. So rows leave the encoder in one place, for about the traffic that rows would
take: the merge² hidden states that make a row are together about as wide as the row.

Letters: P patches of all images, C = 3·temporal·patch² numbers per patch, D tower hidden,
M = merge² patches per row, N = P/M rows, L levels, H language hidden.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from data.media.images import ImageProcessor
from data.media.videos import VIDEO, TimedVideoProcessor
from encoders._hf import block_norms, both, qwen_tower_sizes
from encoders._patches import (
    PackedPatches,
    PatchRope,
    PatchTower,
    check_heads,
    frame_pairs,
    mlp_products,
    patch_counts,
)
from encoders._tower import TowerSettings, build_tower, check_grid
from mimo.bounds import LayerIndex, Means, Patches, Pixels, RotaryBase, Side, Stds
from mimo.engines import megatron as engine
from mimo.families.flops import Product
from mimo.families.hf_config import Config, expect
from mimo.families.hf_preprocessing import Processors
from mimo.families.keymap import Weight, fused_qkv, plain

if TYPE_CHECKING:
    from mimo.engines.megatron import TransformerConfig


__all__ = [
    "PROJECTOR",
    "Settings",
    "build",
    "check_grid",
    "num_levels",
    "settings_from_hf",
    "weights_in_hf",
]

PROJECTOR = ("blocks.final_layernorm.", "merger.", "level_mergers.")
"""Prefixes of the projectors' weight names; all other weights are the tower's.

The final norm of our stack is the merger's norm.
"""


class Settings(TowerSettings):
    """Recipe keys under ``encoders.<name>.model``. Sizes are numbers of elements or pixels."""

    deepstack_visual_indexes: Annotated[tuple[LayerIndex, ...], Field(strict=False)] = ()
    """Blocks, counted from 0, whose hidden states become levels."""
    num_grid_per_side: Side = 48
    """Learned positions per side; the whole grid is stretched over every image."""
    patch_size: Side = 16
    """Side of a patch in pixels."""
    merge_size: Patches = 2
    """Patches along each side that become one row."""
    temporal_patch_size: Patches = 2
    """Frames that become one patch."""
    min_pixels: Pixels = 256 * 256
    """Smaller images are enlarged to so many pixels."""
    max_pixels: Pixels = 4096 * 4096
    """Larger images are shrunk to so many pixels."""
    video_min_pixels: Pixels | None = None
    """Smaller videos, all frames together, are enlarged to so many pixels; null as for images."""
    video_max_pixels: Pixels | None = None
    """Larger videos, all frames together, are shrunk to so many pixels; null as for images."""
    image_mean: Means = (0.5, 0.5, 0.5)
    """Mean of each channel, subtracted from pixels in 0..1."""
    image_std: Stds = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, by which pixels are divided."""
    jpeg_draft: bool = False
    """Decode JPEGs that shrink to a half or less at a smaller size: faster, but changes pixels."""
    rotary_base: RotaryBase = 10_000.0
    """Base of rotary positions."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Settings:
        check_heads(self.hidden_size, self.num_attention_heads)
        indexes = self.deepstack_visual_indexes
        ascending = all(a < b for a, b in itertools.pairwise(indexes))
        if not ascending or any(not 0 <= index < self.num_layers for index in indexes):
            raise ValueError(
                f"deepstack_visual_indexes {list(indexes)} must be ascending blocks between 0 and "
                f"num_layers - 1, which is {self.num_layers - 1}"
            )
        for media in ("image", VIDEO):
            self.processor(media)  # raises ValueError for pixel limits that nothing can meet
        return self

    def scaled_down(self, chunks: int, tp: int) -> Settings:
        """A tiny copy with the same character, for ``chunks`` pipeline chunks and ``tp`` ranks.

        Merge size, frames per patch, rotary base and epsilon stay; images have 1 to 16 rows. Up to
        three levels stay, after the last blocks: a tiny language model has no more layers, and
        with fewer levels its second stage would need none.
        """
        patch_size, heads = min(self.patch_size, 4), math.lcm(2, tp)
        row = (patch_size * self.merge_size) ** 2  # pixels
        levels = min(len(self.deepstack_visual_indexes), 3)
        layers = chunks * max(1, -(-levels // chunks))
        return self.model_copy(
            update={
                "num_layers": layers,
                "hidden_size": 8 * heads,
                "ffn_hidden_size": math.lcm(24, tp),
                "num_attention_heads": heads,
                "deepstack_visual_indexes": tuple(range(layers - levels, layers)),
                "num_grid_per_side": 5,
                "patch_size": patch_size,
                "min_pixels": row,
                "max_pixels": 16 * row,
                "video_min_pixels": None,
                "video_max_pixels": None,
                "init_std": 0.2,
            }
        )

    def processor(self, media: str = "image") -> ImageProcessor:
        """How an image or a video becomes patches, and how many rows it encodes to."""
        images = ImageProcessor(
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=self.temporal_patch_size,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            mean=self.image_mean,
            std=self.image_std,
            tower_width=self.hidden_size,
            jpeg_draft=self.jpeg_draft,
        )
        if media != VIDEO:
            return images
        return TimedVideoProcessor.like(
            images,
            self.video_min_pixels or self.min_pixels,
            self.video_max_pixels or self.max_pixels,
        )

    def products(self, output_size: int) -> list[Product]:
        """All matrices and attention, in the order of a forward."""
        patch = 3 * self.temporal_patch_size * self.patch_size**2
        merged = self.hidden_size * self.merge_size**2
        found = [
            Product("patch_embed.weight", "patch", (self.hidden_size, patch)),
            Product("pos_embed.weight", "patch"),
            *self.stack_products("patch", gated=False),
            *mlp_products("merger", merged, output_size),
        ]
        for number in range(num_levels(self)):
            found.append(Product(f"level_mergers.{number}.norm.weight", "row"))
            found += mlp_products(f"level_mergers.{number}.mlp", merged, output_size)
        return found

    def counts(self, grids: np.ndarray) -> dict[str, float]:
        """Patches, rows, and pairs of patches of a frame."""
        return {"attention pair": frame_pairs(grids), **patch_counts(grids, self.merge_size)}


def num_levels(settings: Settings) -> int:
    """Feature levels besides the embeddings."""
    return len(settings.deepstack_visual_indexes)


class GridPositions(nn.Module):
    """A square grid of learned positions, stretched bilinearly over each image, corner to corner.

    Source: transformers `get_vision_interpolation_indices_and_weights` with aligned corners.
    """

    def __init__(self, side: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.side = side
        self.weight = nn.Parameter(torch.empty(side * side, hidden_size, dtype=dtype))

    def corners(self, places: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """The four positions around each patch, int64, and their shares, fp32: both (4, P).

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
        """Both (4, P), of `corners` -> (P, D)."""
        corners = nn.functional.embedding(index, self.weight)
        return (corners * share[..., None]).sum(0).to(self.weight.dtype)


class LevelMerger(nn.Module):
    """Hidden states after a block -> rows: M patches side by side, a norm over all, an MLP."""

    def __init__(
        self,
        config: TransformerConfig,
        ctx: engine.ModuleContext,
        merged: int,
        output_size: int,
        eps: float,
    ) -> None:
        super().__init__()
        self.norm = engine.LayerNorm(config, merged, eps)
        self.mlp = engine.ParallelMLP(
            config, ctx.groups, merged, merged, output_size, nn.functional.gelu
        )
        self.merged = merged

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (P, 1, D) -> (N, H)."""
        return self.mlp(self.norm(hidden.reshape(-1, self.merged)))


class Qwen3VLTower(PatchTower):
    """Patches of many images -> embeddings and levels of the language model's size."""

    def __init__(
        self,
        settings: Settings,
        config: TransformerConfig,
        ctx: engine.ModuleContext,
        output_size: int,
    ) -> None:
        super().__init__(config, ctx, settings.merge_size, settings.deepstack_visual_indexes)
        self.settings = settings
        size, dtype = settings.hidden_size, ctx.dtype
        self.merged = size * settings.merge_size**2
        in_size = 3 * settings.temporal_patch_size * settings.patch_size**2
        self.patch_embed, self.pos_embed = None, None
        if ctx.is_first_stage:
            # A convolution whose stride is its kernel is a linear map of each patch.
            self.patch_embed = nn.Linear(in_size, size, bias=True, dtype=dtype)
            self.pos_embed = GridPositions(settings.num_grid_per_side, size, dtype)
            self.part.sum_gradients(self.patch_embed)
            self.part.sum_gradients(self.pos_embed)
        # The merger normalises single patches: that is the final norm of the stack.
        self.blocks = engine.build_stack(config, ctx, causal=False, final_norm=True)
        self.merger, self.level_mergers = None, None
        if ctx.is_last_stage:
            self.merger = engine.ParallelMLP(
                config, ctx.groups, self.merged, self.merged, output_size, nn.functional.gelu
            )
            self.level_mergers = nn.ModuleList(
                LevelMerger(config, ctx, self.merged, output_size, settings.norm_eps)
                for _ in settings.deepstack_visual_indexes
            )
        head_size = size // settings.num_attention_heads
        self.rope = PatchRope(head_size, settings.rotary_base)

    def pack(self, grids: Tensor) -> PackedPatches:
        """On the first stage with the learned positions around each of this rank's patches."""
        packed = super().pack(grids)
        if self.pos_embed is None:
            return packed
        sizes = grids[:, 1:].repeat_interleave(grids.prod(1), dim=0)  # (P, 2)
        own = (self.part.own(values, len(values)) for values in (packed.places, sizes))
        return replace(packed, lookups=self.pos_embed.corners(*own))

    def embed(self, patches: Tensor, packed: PackedPatches) -> Tensor:
        """patches (P, C) -> (P', D), with their learned positions added."""
        assert self.patch_embed is not None
        assert self.pos_embed is not None
        own = self.part.own(patches, packed.num_patches)
        return self.patch_embed(own) + self.pos_embed(*packed.lookups)

    def stack_inputs(self, packed: PackedPatches) -> dict[str, Any]:
        """Frames, and the patches' rotary positions."""
        return {**super().stack_inputs(packed), "rotary_pos_emb": self.rope(packed.places)}

    def project(self, hidden: list[Tensor], packed: PackedPatches) -> Tensor:
        """Hidden states (P', 1, D) -> rows (N', (1 + L)·H): embeddings, then each level."""
        assert self.merger is not None
        assert self.level_mergers is not None
        last, *behind = hidden
        rows = [self.merger(last.reshape(-1, self.merged))]
        rows += [merger(own) for merger, own in zip(self.level_mergers, behind, strict=True)]
        return torch.cat(rows, dim=-1)


def build(
    settings: Settings, ctx: engine.ModuleContext, output_size: int, seed: int
) -> Qwen3VLTower:
    """The tower with freshly drawn weights, the same in every layout."""
    return build_tower(
        lambda config: Qwen3VLTower(settings, config, ctx, output_size),
        settings.gelu_stack(),
        ctx,
        seed,
        settings.init_std,
    )


# Defaults of transformers' `Qwen3VLVideoProcessor`, for what a folder's file leaves out.
_VIDEO_PROCESSOR = "Qwen3VLVideoProcessor"
_VIDEOS: Config = {
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}


def settings_from_hf(config: Config, processors: Processors) -> dict[str, Any]:
    """Recipe keys under ``encoders.<name>.model`` for Qwen3-VL's configuration.

    Raises ValueError for anything that we do not compute.
    """
    vision = config["vision_config"]
    expect(vision, "vision_config", hidden_act="gelu_pytorch_tanh")
    return {
        **qwen_tower_sizes(config, processors, _VIDEOS, _VIDEO_PROCESSOR),
        "deepstack_visual_indexes": list(vision["deepstack_visual_indexes"]),
        "num_grid_per_side": math.isqrt(vision["num_position_embeddings"]),
    }


def weights_in_hf(settings: Settings, output_size: int) -> list[Weight]:
    """Every parameter of the whole tower, and what it is made of in Qwen3-VL's checkpoints."""
    size, ffn, merged = (
        settings.hidden_size,
        settings.ffn_hidden_size,
        settings.hidden_size * settings.merge_size**2,
    )
    heads, patch, root = settings.num_attention_heads, settings.patch_size, "model.visual"
    kernel = (3, settings.temporal_patch_size, patch, patch)
    found = [
        *both("patch_embed", f"{root}.patch_embed.proj", size, *kernel),
        plain("pos_embed.weight", f"{root}.pos_embed.weight", settings.num_grid_per_side**2, size),
        # The merger's norm is the final one of our stack.
        *both("blocks.final_layernorm", f"{root}.merger.norm", size),
        *both("merger.linear_fc1", f"{root}.merger.linear_fc1", merged, merged),
        *both("merger.linear_fc2", f"{root}.merger.linear_fc2", output_size, merged),
    ]
    for n in range(num_levels(settings)):
        here, there = f"level_mergers.{n}", f"{root}.deepstack_merger_list.{n}"
        found += [
            *both(f"{here}.norm", f"{there}.norm", merged),
            *both(f"{here}.mlp.linear_fc1", f"{there}.linear_fc1", merged, merged),
            *both(f"{here}.mlp.linear_fc2", f"{there}.linear_fc2", output_size, merged),
        ]
    norms = {"norm1": "input_layernorm", "norm2": "pre_mlp_layernorm"}
    for n in range(settings.num_layers):
        here, there = f"blocks.layers.{n}", f"{root}.blocks.{n}"
        attention = f"{here}.self_attention"
        found += [
            *block_norms(here, there, norms, size),
            *(
                fused_qkv(
                    f"{attention}.linear_qkv.{kind}",
                    f"{there}.attn.qkv.{kind}",
                    *(heads, size // heads, *columns),
                )
                for kind, columns in (("weight", (size,)), ("bias", ()))
            ),
            *both(f"{attention}.linear_proj", f"{there}.attn.proj", size, size),
            *both(f"{here}.mlp.linear_fc1", f"{there}.mlp.linear_fc1", ffn, size),
            *both(f"{here}.mlp.linear_fc2", f"{there}.mlp.linear_fc2", size, ffn),
        ]
    return found
