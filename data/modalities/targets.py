"""Target images of a generator, cut into one square per token."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from PIL import Image

from data.modalities.images import StillImages, check_aspect_ratio
from data.modalities.processor import Part, PartPlan, Size, Triple


@dataclass(frozen=True)
class TargetImages(StillImages):
    """Images as squares, line by line; each has values in -1..1 by channel, line and column.

    An item's grid counts tokens, and its rows are ``num_queries`` query positions. patch_size: side
    of a token's square in pixels. max_pixels: of a resized image. tower_width: hidden size of the
    generator. Raises ValueError for `max_pixels` below one square.
    """

    patch_size: int
    max_pixels: int
    num_queries: int
    tower_width: int
    merge_size: int = 1
    jpeg_draft: bool = False

    KIND: ClassVar[str] = "targets-1"
    RESAMPLING: ClassVar[Image.Resampling] = Image.Resampling.BICUBIC
    mean: ClassVar[Triple] = (0.5, 0.5, 0.5)
    std: ClassVar[Triple] = mean

    def __post_init__(self) -> None:
        if self.max_pixels < self.patch_size**2:
            raise ValueError(
                f"got {self.max_pixels}, needs at least the {self.patch_size**2} pixels of the "
                f"square of one token ({self.patch_size} x {self.patch_size})"
            )

    def resized(self, width: int, height: int) -> Size:
        """Return a size within `max_pixels`, in whole squares: at least one in each direction.

        A very long image may end above `max_pixels`. Raises ValueError for an aspect ratio above
        200.
        """
        check_aspect_ratio(width, height)
        square = self.patch_size * max(1.0, math.sqrt(width * height / self.max_pixels))
        columns, lines = (max(1, round(side / square)) for side in (width, height))
        if columns * lines * self.patch_size**2 > self.max_pixels:
            columns, lines = (max(1, math.floor(side / square)) for side in (width, height))
        return columns * self.patch_size, lines * self.patch_size

    def plan(self, part: Part) -> PartPlan:
        return replace(super().plan(part), row_grid=(1, 1, self.num_queries), is_output=True)
