"""Settings, packing and embedding of towers of patches.

A processor emits the merge² neighbours that make a row one after another.

Letters: I images, P patches of all images, M = merge² patches per row, N = P/M rows, D head size of
the tower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from encoders._tower import PackedItems, Tower
from mimo.config.bounds import Means, Side, Stds
from mimo.engines import megatron as engine
from mimo.families.contracts import EncoderSettings
from mimo.families.hf_config import Config, expect


class PatchSettings(EncoderSettings):
    """Recipe keys of all towers of flat patches."""

    changeable_keys: ClassVar = EncoderSettings.changeable_keys | {
        *("image_mean", "image_std", "jpeg_draft")
    }

    patch_size: Side = 14
    """Side of a patch in pixels."""
    image_mean: Means = (0.5, 0.5, 0.5)
    """Mean of each channel, subtracted from pixels in 0..1."""
    image_std: Stds = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, by which pixels are divided."""
    jpeg_draft: bool = False
    """Decode JPEGs that shrink to a half or less at a smaller size: faster, but changes pixels."""

    def counts(self, grids: np.ndarray) -> dict[str, float]:
        """Count patches, rows, and ordered pairs of patches in a frame."""
        merge = cast("Any", self).merge_size  # every family has it, as a key or a property
        patches = float(np.prod(grids, axis=1).sum())
        pairs = float((grids[:, 0] * (grids[:, 1] * grids[:, 2]) ** 2).sum())
        return {"attention pair": pairs, "patch": patches, "row": patches / merge**2}


def check_processor(processor: Config, resample: int, kind: str, name: str) -> None:
    """Raise ValueError unless a processor has class ``name`` and takes all our steps.

    resample: pillow's number for the interpolation. kind: "image" or "video".
    """
    steps = ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize")
    values = {f"{kind}_processor_type": name, "resample": resample, "rescale_factor": 1 / 255}
    where = f"the {kind} processor's configuration"
    expect(processor, where, **values, **dict.fromkeys(steps, True))


def patch_places(grids: Tensor, merge: int) -> Tensor:
    """Return row and column of each patch, (P, 2) int64, of grids (I, 3) int64 in patches."""
    places = []
    for t, h, w in grids.tolist():
        block = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1)
        block = block.reshape(h // merge, merge, w // merge, merge, 2).transpose(1, 2)
        places.append(block.reshape(-1, 2).repeat(t, 1))
    return torch.cat(places)


@dataclass(frozen=True)
class WindowOrder:
    """Rows sorted by window, a square cut from a frame, smaller at its far edges.

    Frames stay in order. Source: transformers `get_vision_window_index`.
    rows: (N,) int64, the number in item order of each row in window order. back: the inverse.
    lengths: patches of each window.
    """

    rows: Tensor
    back: Tensor
    lengths: tuple[int, ...]
    merge: int

    @classmethod
    def of(cls, places: Tensor, frames: Sequence[int], merge: int, side: int) -> WindowOrder:
        """Sort images of these places (P, 2) and frames. side: rows along a window's edge."""
        corners = places[:: merge**2] // (merge * side)  # each row's window in its frame, (N, 2)
        rows_of_frames = torch.tensor(frames) // merge**2
        frame = torch.arange(len(frames)).repeat_interleave(rows_of_frames)
        base = int(corners.max()) + 1
        window = (frame * base + corners[:, 0]) * base + corners[:, 1]
        rows = window.argsort(stable=True)
        counts = window[rows].unique_consecutive(return_counts=True)[1]
        return cls(rows, rows.argsort(), tuple((counts * merge**2).tolist()), merge)

    def sort(self, values: Tensor) -> Tensor:
        """Bring values (P, ...) of patches from item order to window order.

        Values of the blank patches at the end may be missing: blank patches stay last.
        """
        of_rows = values.unflatten(0, (-1, self.merge**2))
        return of_rows[self.rows[: len(of_rows)]].flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class PackedPatches(PackedItems):
    """The images of one forward, blank ones at the end; each frame is a segment.

    places: (P, 2) int64, row and column of each patch, in the order of the layers. order: of the
    rows inside the layers; None if it is that of the images.
    """

    places: Tensor
    order: WindowOrder | None = None


class PatchTower(Tower[PackedPatches]):
    """A tower of flat patches: each is a token, and attends to those of its frame.

    patch_dim: C, numbers of a patch. bias: of their embedding. positions: makes the module of
    learned positions, if there are any; its arguments are the ``lookups`` of `pack`.
    window_layers: layers, counted from 0, that attend inside ``segments.windows``.
    """

    def __init__(
        self,
        settings: EncoderSettings,
        ctx: engine.ModuleContext,
        merge_size: int,
        patch_dim: int,
        bias: bool = True,
        positions: Callable[[], nn.Module] | None = None,
        level_blocks: tuple[int, ...] = (),
        window_layers: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(settings, ctx, merge_size**2, level_blocks)
        self.merge_size = merge_size
        self.patch_embed, self.pos_embed = None, None
        if ctx.is_first_stage:
            # A convolution whose stride is its kernel is a linear map of each patch.
            self.patch_embed = nn.Linear(patch_dim, settings.hidden_size, bias, dtype=ctx.dtype)
            self.part.sum_gradients(self.patch_embed)
            if positions is not None:
                self.pos_embed = positions()
                self.part.sum_gradients(self.pos_embed)
        self.blocks = engine.build_stack(self.config, ctx, window_layers)

    def blank_grid(self, num_rows: int) -> tuple[int, int, int]:
        return (1, self.merge_size, self.merge_size * num_rows)

    def pack(self, grids: Tensor) -> PackedPatches:
        """Pack frames without padding, with the place of every patch in its image."""
        places = patch_places(grids, self.merge_size)
        frames = (grids[:, 1] * grids[:, 2]).repeat_interleave(grids[:, 0]).tolist()
        segments = engine.PackedSegments.from_lengths(frames, places.device)
        return PackedPatches(segments=segments, places=places)

    def embed(self, patches: Tensor, packed: PackedPatches) -> Tensor:
        assert self.patch_embed is not None, "the first stage embeds"
        if packed.order is not None:
            patches = packed.order.sort(patches)
        hidden = self.patch_embed(self.part.take(patches, len(packed.places)))
        return hidden if self.pos_embed is None else hidden + self.pos_embed(*packed.lookups)


class PatchRope(nn.Module):
    """Two-dimensional rotary frequencies: half of a head's channels rotate with a patch's row,
    half with its column.
    """

    def __init__(self, head_size: int, base: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_size // 2, 2, dtype=torch.float32) / (head_size // 2)
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", base**-exponent, persistent=False)

    def forward(self, places: Tensor) -> Tensor:
        """places (P, 2) int64 -> (P, 1, 1, D) fp32."""
        freqs = (places.float()[:, :, None] * self.inv_freq).flatten(1)  # (P, D / 2)
        return torch.cat((freqs, freqs), dim=-1)[:, None, None, :]
