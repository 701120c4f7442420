"""Gemma-3's preprocessing: every image becomes a square of one size, with one number of rows.

Letters: `P` patch size in pixels, `M` merge size in patches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
from PIL import Image

from data.media.image_files import to_rgb
from data.media.images import StillImages, cut_patches, normalisation_table
from data.media.pan_and_scan import Box, PanAndScan, crops_text
from data.media.processor import Grid, Part, PartPlan, encoding_cost


@dataclass(frozen=True)
class SquareImageProcessor(StillImages):
    """Resize to ``image_size`` x ``image_size`` pixels, normalise, cut into patches.

    The aspect ratio is not kept. Source: transformers `Gemma3ImageProcessorPil`.
    patch_size: P, pixels. merge_size: M, patches per side that become one row.
    mean, std: per RGB channel, for values in 0..1.
    tower_width: hidden size of the tower that encodes the patches; only `cost` depends on it.
    pan_and_scan: when crops of an image become further items; None for never.

    Raises ValueError when built with sizes that cannot work.
    """

    image_size: int
    patch_size: int
    merge_size: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    tower_width: int = 1152
    pan_and_scan: PanAndScan | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(float(value) for value in self.mean))
        object.__setattr__(self, "std", tuple(float(value) for value in self.std))
        if min(self.patch_size, self.merge_size, self.tower_width) < 1:
            raise ValueError(
                f"image processor: patch_size {self.patch_size}, merge_size {self.merge_size} and "
                f"tower_width {self.tower_width} need to be at least 1"
            )
        if self.image_size < self.row_pixels or self.image_size % self.row_pixels:
            raise ValueError(
                f"image processor: image_size {self.image_size} needs to be a multiple of "
                f"patch_size · merge_size, {self.row_pixels}"
            )
        if min(self.std) <= 0:
            raise ValueError(f"image processor: std {self.std} needs values above 0")

    @property
    def row_pixels(self) -> int:
        """Side of a square in the resized image that makes one row: P·M pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Values of one patch: 3·P·P."""
        return 3 * self.patch_size**2

    def grid(self, width: int, height: int) -> Grid:
        """(1, h, w) in patches, the same for every image.

        Raises ValueError for an empty image.
        """
        if width < 1 or height < 1:
            raise ValueError(
                f"image of {width} x {height} pixels: both sides need to be at least 1"
            )
        side = self.image_size // self.patch_size
        return 1, side, side

    def row_grid(self, width: int, height: int) -> Grid:
        """(1, h, w) in rows: the grid after merging. Raises as `grid`."""
        t, h, w = self.grid(width, height)
        return t, h // self.merge_size, w // self.merge_size

    def num_tokens(self, width: int, height: int) -> int:
        """Rows, and so placeholder tokens, of an image. Raises as `grid`."""
        _, h, w = self.row_grid(width, height)
        return h * w

    def cost(self, width: int, height: int) -> int:
        """Relative work to encode an image, see `encoding_cost`. Raises as `grid`."""
        _, h, w = self.grid(width, height)
        return encoding_cost(h * w, self.tower_width)

    def plan(self, part: Part) -> PartPlan:
        """The image, and an item for each of its crops. Raises as `grid` and for several frames."""
        whole = super().plan(part)
        return replace(whole, text=crops_text(len(self._crops(part))))

    def item_patches(self, files: Sequence[Image.Image], part: Part, item: int) -> np.ndarray:
        """float32 (h·w, 3·P·P) of the image, or of a crop of it."""
        if item == 0:
            return self.patches(files[0])
        return self.patches(to_rgb(files[0]).crop(self._crops(part)[item - 1]))

    def _crops(self, part: Part) -> list[Box]:
        if self.pan_and_scan is None:
            return []
        return self.pan_and_scan.crops(*part.size)

    def patches(self, image: Image.Image) -> np.ndarray:
        """float32 (h·w, 3·P·P): normalised patches, M² of a row adjacent, see `cut_patches`."""
        size = (self.image_size, self.image_size)
        resized = to_rgb(image).resize(size, Image.Resampling.BILINEAR)
        table = normalisation_table(self.mean, self.std)
        pixels = np.asarray(resized)[None]
        return cut_patches(pixels, table, self.patch_size, self.merge_size, frames_per_patch=1)

    def fingerprint(self) -> str:
        """Hex digest that changes whenever sizes, row counts or pixel values may change."""
        return hashlib.sha256(repr(("gemma3-2", astuple(self))).encode()).hexdigest()[:16]
