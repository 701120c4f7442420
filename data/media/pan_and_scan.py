"""Gemma-3's pan-and-scan: a long image is shown whole and again in crops.

Source: transformers `Gemma3ImageProcessorPil.pan_and_scan` and
`Gemma3Processor.replace_image_token`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from data.text.item_text import ITEM_SLOT

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels, as Pillow crops


@dataclass(frozen=True)
class PanAndScan:
    """When an image is cropped, and how often.

    min_crop_size: pixels of the shorter side of a crop; smaller ones are not made.
    max_num_crops: crops of one image, side by side along its longer side.
    min_ratio: of the longer side to the shorter one, below which an image is not cropped.

    Raises ValueError when built with sizes that cannot work.
    """

    min_crop_size: int = 256
    max_num_crops: int = 4
    min_ratio: float = 1.2

    def __post_init__(self) -> None:
        if min(self.min_crop_size, self.max_num_crops) < 1 or not self.min_ratio >= 1:
            raise ValueError(
                f"pan-and-scan: min_crop_size {self.min_crop_size}, max_num_crops "
                f"{self.max_num_crops} and min_ratio {self.min_ratio} need to be at least 1"
            )

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
        ends = [min(start + step, long) for start in starts]
        spans = list(zip(starts, ends, strict=True))
        if width >= height:
            return [(start, 0, end, height) for start, end in spans]
        return [(0, start, width, end) for start, end in spans]


def crops_text(num_crops: int) -> str:
    """The text that stands for an image and its crops in the chat."""
    if not num_crops:
        return ITEM_SLOT
    crops = " ".join([ITEM_SLOT] * num_crops)
    return (
        f"Here is the original image {ITEM_SLOT} and here are some crops to help you see better "
        f"{crops}"
    )
