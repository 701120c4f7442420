"""Vision tower of the Qwen-VL kind with its patch merger.

The blocks of Qwen2.5-VL's tower (RMSNorm, biased SwiGLU, 2-D rotary positions). Layers attend
within whole frames; with `window_size`, most attend within windows of a frame, whose rows are then
sorted by window from the first layer on.

Letters: P patches of all images, C = 3·temporal·patch² numbers per patch, D tower hidden,
M = merge² patches per row, N = P/M rows, H language hidden.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from data.modalities.images import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, ImageProcessor
from data.modalities.videos import VIDEO, VideoProcessor
from encoders._patches import PackedPatches, WindowOrder
from encoders._qwen import ROOT, QwenSettings, QwenTower, settings_of_all
from encoders._tower import both, build_tower, mlp_products
from mimo.config.bounds import LayerIndex, Means, Pixels, Rate, Side, Stds
from mimo.engines import megatron as engine
from mimo.families.flops import Product
from mimo.families.hf_config import Config, Processors, expect
from mimo.families.keymap import Weight, fused_qkv, plain, stacked

PROJECTOR = ("blocks.final_layernorm.", "merger.")
"""Prefixes of the projector's weight names. The final norm of our stack is the merger's."""


class Settings(QwenSettings):
    """Recipe keys under ``encoders.<name>.model``. Sizes are numbers of elements or pixels."""

    window_size: Side | None = None
    """Pixels along the edge of a window; without one every layer attends to whole frames."""
    full_attention_layers: Annotated[tuple[LayerIndex, ...], Field(strict=False)] = ()
    """Layers, counted from 0, that attend to whole frames in spite of windows."""
    min_pixels: Pixels = 56 * 56
    max_pixels: Pixels = 28 * 28 * 1280
    image_mean: Means = OPENAI_CLIP_MEAN
    image_std: Stds = OPENAI_CLIP_STD
    video_min_pixels: Pixels | None = None
    """Smaller frames of a video are enlarged to this many pixels; null as for images."""
    video_max_pixels: Pixels | None = None
    """Larger frames of a video are shrunk to this many pixels; null as for images."""
    tokens_per_second: Rate = 2.0
    """Steps of position per second of a video."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Settings:
        self._check_sizes()
        full, row = self.full_attention_layers, self.patch_size * self.merge_size
        if full and self.window_size is None:
            raise ValueError(
                f"full_attention_layers {list(full)} need window_size: without it every layer "
                f"attends to whole frames"
            )
        if self.window_size is not None and self.window_size % row:
            raise ValueError(
                f"window_size {self.window_size} must be a multiple of patch_size · merge_size, "
                f"which is {row}: windows consist of whole rows"
            )
        self.check_layers("full_attention_layers", full)
        return self

    @property
    def window_layers(self) -> frozenset[int]:
        if self.window_size is None:
            return frozenset()
        return frozenset(range(self.num_layers)) - frozenset(self.full_attention_layers)

    def layer_kinds(self) -> tuple[str, ...]:
        windows = self.window_layers
        return tuple("window" if i in windows else "full" for i in range(self.num_layers))

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        """Scale down to images of 1 to 16 rows, and windows of 2 × 2 rows."""
        kinds = len(set(self.layer_kinds()))
        sizes = super()._scaled_sizes(kinds * chunks, tp)
        if self.window_size is not None:
            sizes["window_size"] = 2 * sizes["patch_size"] * self.merge_size
            sizes["min_pixels"] *= 3
        full = range(kinds - 1, kinds * chunks, kinds) if self.full_attention_layers else ()
        return sizes | {"full_attention_layers": tuple(full), "init_std": 0.1}

    def processor(self, modality: str = "image") -> ImageProcessor:
        # The cost grows with the square of a frame's size only in layers with full attention. The
        # fewer there are, the more the linear cost weighs, as in a wider tower.
        full = max(1, self.num_layers - len(self.window_layers))
        images = self._images(self.hidden_size * self.num_layers // full)
        if modality != VIDEO:
            return images
        return VideoProcessor.like(
            images,
            min_pixels=self.video_min_pixels or self.min_pixels,
            max_pixels=self.video_max_pixels or self.max_pixels,
            tokens_per_second=self.tokens_per_second,
        )

    def products(self, output_size: int) -> list[Product]:
        return [
            Product("patch_embed.weight", "patch", (self.hidden_size, self.patch_dim)),
            *self.stack_products("patch", gated=True),
            *mlp_products("merger", self.merged_size, output_size),
        ]

    def counts(self, grids: np.ndarray) -> dict[str, float]:
        """Count patches, rows, and pairs of patches of a frame and of a window."""
        numbers = super().counts(grids)
        numbers["full pair"] = numbers.pop("attention pair")
        if self.window_size is not None:
            side = self.window_size // (self.patch_size * self.merge_size)
            whole, rest = np.divmod(grids[:, 1:] // self.merge_size, side)
            squares = (whole * side**2 + rest**2).prod(axis=1)
            numbers["window pair"] = float((grids[:, 0] * squares).sum() * self.merge_size**4)
        return numbers


class QwenVLTower(QwenTower):
    """Patches of many images -> rows of the language model's size."""

    def __init__(self, settings: Settings, ctx: engine.ModuleContext, output_size: int) -> None:
        windows = settings.window_layers
        super().__init__(settings, ctx, output_size, bias=False, window_layers=windows)
        self.tp_group = ctx.groups.tp
        self.side = None  # of a window, in rows
        if settings.window_size is not None:
            self.side = settings.window_size // (settings.patch_size * settings.merge_size)

    def pack(self, grids: Tensor) -> PackedPatches:
        """Sort the rows of a frame by window, if there are windows."""
        packed = super().pack(grids)
        if self.side is None:
            return packed
        places, segments = packed.places, packed.segments
        order = WindowOrder.of(places, segments.lengths, self.merge_size, self.side)
        segments.windows = engine.PackedSegments.from_lengths(order.lengths, places.device)
        return replace(packed, places=order.sort(places), order=order)

    def project(self, hidden: list[Tensor], packed: PackedPatches) -> Tensor:
        """Merge hidden states (P', 1, D) to rows (N', H), in item order.

        Under sequence parallelism, rows sorted by window are on other ranks than rows in item
        order: all ranks gather them, and the backward returns each row's gradient.
        """
        rows, order = super().project(hidden, packed), packed.order
        if order is None:
            return rows
        if self.part.count > 1:
            rows = engine.gather_sequence(rows, group=self.tp_group)
        return rows[self.part.take(order.back, len(order.back))]


build = partial(build_tower, QwenVLTower)


# The default of the class, for a folder's file that leaves it out.
_VIDEO_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}


def settings_from_hf(config: Config, processors: Processors) -> dict[str, Any]:
    """Return recipe keys for Qwen2.5-VL's configuration. Raises ValueError."""
    vision = config["vision_config"]
    expect(vision, "vision_config", hidden_act="silu")
    return {
        **settings_of_all(config, processors, "Qwen2VLVideoProcessor", _VIDEO_SIZE),
        "window_size": vision["window_size"],
        "full_attention_layers": list(vision["fullatt_block_indexes"]),
        "tokens_per_second": float(vision["tokens_per_second"]),
    }


def weights_in_hf(settings: Settings, output_size: int) -> list[Weight]:
    """Return every parameter of the whole tower, as runs of Qwen2.5-VL's tensors."""
    size, ffn, merged = settings.hidden_size, settings.ffn_hidden_size, settings.merged_size
    heads, patch = settings.num_attention_heads, settings.patch_size
    weights = [
        plain(
            "patch_embed.weight",
            f"{ROOT}.patch_embed.proj.weight",
            *(size, 3, settings.temporal_patch_size, patch, patch),
        ),
        plain("blocks.final_layernorm.weight", f"{ROOT}.merger.ln_q.weight", size),
        *both("merger.linear_fc1", f"{ROOT}.merger.mlp.0", merged, merged),
        *both("merger.linear_fc2", f"{ROOT}.merger.mlp.2", output_size, merged),
    ]
    for n in range(settings.num_layers):
        layer, source = f"blocks.layers.{n}", f"{ROOT}.blocks.{n}"
        weights += [
            plain(f"{layer}.input_layernorm.weight", f"{source}.norm1.weight", size),
            plain(f"{layer}.pre_mlp_layernorm.weight", f"{source}.norm2.weight", size),
            *both(f"{layer}.self_attention.linear_proj", f"{source}.attn.proj", size, size),
            *both(f"{layer}.mlp.linear_fc2", f"{source}.mlp.down_proj", size, ffn),
        ]
        for kind, columns in (("weight", (size,)), ("bias", ())):
            qkv, theirs = f"{layer}.self_attention.linear_qkv.{kind}", f"{source}.attn.qkv.{kind}"
            weights.append(fused_qkv(qkv, theirs, heads, size // heads, *columns))
            gate_up = [f"{source}.mlp.{which}_proj.{kind}" for which in ("gate", "up")]
            weights.append(stacked(f"{layer}.mlp.linear_fc1.{kind}", gate_up, ffn, *columns))
    return weights
