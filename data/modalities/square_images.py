"""Gemma-3's preprocessing: every image becomes a square of one size, with one number of rows.

Letters: `P` patch size in pixels, `M` merge size in patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from PIL import Image

from data.modalities.image_files import to_rgb
from data.modalities.images import StillImages, normalisation_table
from data.modalities.processor import Part, PartPlan, Size, WireForm
from data.text.item_text import ITEM_SLOT

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels, as Pillow crops


@dataclass(frozen=True)
class PanAndScan:
    """When a long image is shown whole and again in crops, and in how many.

    Source: transformers `Gemma3ImageProcessorPil.pan_and_scan`. min_crop_size: pixels of the
    shorter side of a crop; smaller ones are not made. max_num_crops: side by side along the image's
    longer side. min_ratio: of the longer side to the shorter one, below which an image is not
    cropped.
    """

    min_crop_size: int = 256
    max_num_crops: int = 4
    min_ratio: float = 1.2

    def crops(self, width: int, height: int) -> list[Box]:
        """The crops of an image of this many pixels, from its start on; none if it is not long.

        Raises ValueError for an image too small for the crops that the settings ask for.
        """
        long, short = max(width, height), min(width, height)
        if long / short < self.min_ratio:
            return []
        wanted = min(math.floor(long / self.min_crop_size), math.floor(long / short + 0.5))
        count = min(self.max_num_crops, max(2, wanted))
        step = math.ceil(long / count)
        if min(step, short) < self.min_crop_size:
            return []
        starts = [step * number for number in range(count)]
        if starts[-1] >= long:
            raise ValueError(
                f"image of {width} x {height} pixels: {count} crops of {step} pixels leave "
                "nothing for the last one; raise pan_and_scan_min_crop_size"
            )
        spans = [(start, min(start + step, long)) for start in starts]
        if width >= height:
            return [(start, 0, end, height) for start, end in spans]
        return [(0, start, width, end) for start, end in spans]


@dataclass(frozen=True)
class SquareImageProcessor(StillImages):
    """Resize to ``image_size`` x ``image_size`` pixels, cut into patches, normalise.

    The aspect ratio is not kept. Source: transformers `Gemma3ImageProcessorPil`.
    image_size: a multiple of P·M. pan_and_scan: when crops of an image become further items; None
    for never. jpeg_draft: of images without crops.
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
    RESAMPLING: ClassVar[Image.Resampling] = Image.Resampling.BILINEAR

    @property
    def wire(self) -> WireForm:
        """3·P·P bytes of a patch, and as many values."""
        return WireForm(3 * self.patch_size**2, normalisation_table, self.mean, self.std)

    def resized(self, width: int, height: int) -> Size:
        """The square."""
        return self.image_size, self.image_size

    def shown_size(self, size: Size) -> Size | None:
        """The square, unless there are crops."""
        return None if self._crops(size) else self.resized(*size)

    def plan(self, part: Part) -> PartPlan:
        """The image, and an item for each of its crops. Raises ValueError for several frames.

        Source of the text: transformers `Gemma3Processor.replace_image_token`.
        """
        whole, crops = super().plan(part), " ".join([ITEM_SLOT] * len(self._crops(part.size)))
        if not crops:
            return whole
        text = f"Here is the original image {ITEM_SLOT} and here are some crops to help you see"
        return replace(whole, text=f"{text} better {crops}")

    def item_patches(self, files: Sequence[Image.Image], part: Part, item: int) -> np.ndarray:
        """uint8 (h·w, 3·P·P) of the image, or of a crop of it."""
        if item == 0:
            return self.patches(files[0])
        return self.patches(to_rgb(files[0]).crop(self._crops(part.size)[item - 1]))

    def _crops(self, size: Size) -> list[Box]:
        return [] if self.pan_and_scan is None else self.pan_and_scan.crops(*size)
