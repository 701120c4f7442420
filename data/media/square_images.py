"""Gemma-3's preprocessing: every image becomes a square of one size, with one number of rows.

Letters: `P` patch size in pixels, `M` merge size in patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from PIL import Image

from data.media.image_files import to_rgb
from data.media.images import StillImages, cut_patches, normalisation_table
from data.media.pan_and_scan import Box, PanAndScan, crops_text
from data.media.processor import Grid, Part, PartPlan, Size, WireForm


@dataclass(frozen=True)
class SquareImageProcessor(StillImages):
    """Resize to ``image_size`` x ``image_size`` pixels, cut into patches, normalise.

    The aspect ratio is not kept. Source: transformers `Gemma3ImageProcessorPil`.
    patch_size: P, pixels. merge_size: M, patches per side that become one row.
    mean, std: per RGB channel, for values in 0..1.
    tower_width: hidden size of the tower that encodes the patches; only `cost` depends on it.
    pan_and_scan: when crops of an image become further items; None for never.
    jpeg_draft: as in `ImageFiles`; of images without crops.

    Raises ValueError when built with sizes that cannot work.
    """

    image_size: int
    patch_size: int
    merge_size: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    tower_width: int = 1152
    pan_and_scan: PanAndScan | None = None
    jpeg_draft: bool = False

    KIND: ClassVar[str] = "gemma3-2"

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
    def wire(self) -> WireForm:
        """3·P·P bytes of a patch, and as many values."""
        return WireForm(3 * self.patch_size**2, normalisation_table, self.mean, self.std)

    def shown_size(self, size: Size) -> Size | None:
        """The square, unless there are crops."""
        return None if self._crops(Part(size)) else (self.image_size, self.image_size)

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

    def plan(self, part: Part) -> PartPlan:
        """The image, and an item for each of its crops. Raises as `grid` and for several frames."""
        whole = super().plan(part)
        return replace(whole, text=crops_text(len(self._crops(part))))

    def item_patches(self, files: Sequence[Image.Image], part: Part, item: int) -> np.ndarray:
        """uint8 (h·w, 3·P·P) of the image, or of a crop of it."""
        if item == 0:
            return self.patches(files[0])
        return self.patches(to_rgb(files[0]).crop(self._crops(part)[item - 1]))

    def _crops(self, part: Part) -> list[Box]:
        if self.pan_and_scan is None:
            return []
        return self.pan_and_scan.crops(*part.size)

    def patches(self, image: Image.Image) -> np.ndarray:
        """uint8 (h·w, 3·P·P): patches, the M² of a row adjacent, see `cut_patches`."""
        size = (self.image_size, self.image_size)
        resized = to_rgb(image).resize(size, Image.Resampling.BILINEAR)
        return cut_patches(np.asarray(resized)[None], self.patch_size, self.merge_size)
