"""What the index, the readers and the training loop ask of an encoder's item processor.

A content part takes one or more files and becomes one or more items: an image is one item of one
file, an image with crops several items of one file, a video one item of many files or an item per
few of them. All items of a part are of one size.

Letters: `P` patches of one item, `C` numbers per patch, `t, h, w` a grid of frames, rows, columns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image

from data.text.item_text import ITEM_SLOT
from data.text.messages import DEFAULT_FPS

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Part:
    """What is known of a content part before its files are decoded.

    width, height: pixels of each file. frames: files. fps: frames per second.
    """

    width: int
    height: int
    frames: int = 1
    fps: float = DEFAULT_FPS


@dataclass(frozen=True)
class PartPlan:
    """The items that a part becomes.

    grid: (t, h, w) in patches of each item. row_grid: (t, h, w) in rows of each.
    cost: relative work to encode one of them.
    text: what stands for the part in the chat, `{item}` once per item.
    time_step: positions from one frame of an item to the next, where positions have a time.
    """

    grid: Grid
    row_grid: Grid
    cost: int
    text: str = ITEM_SLOT
    time_step: float = 1.0

    @property
    def num_items(self) -> int:
        """Items of the part."""
        return self.text.count(ITEM_SLOT)

    @property
    def num_rows(self) -> int:
        """Rows, and so placeholder tokens, of each item."""
        return math.prod(self.row_grid)


class ItemProcessor(Protocol):
    """Turns the files of a content part into the patches of its items.

    Sizes and numbers follow from the `Part` alone. Methods raise ValueError for a part that cannot
    be taken.
    """

    @property
    def patch_dim(self) -> int:
        """C."""
        ...

    @property
    def row_pixels(self) -> int:
        """Side in pixels of a square that makes one row."""
        ...

    def plan(self, part: Part) -> PartPlan:
        """The items of a part."""
        ...

    def item_files(self, part: Part, item: int) -> range:
        """Which files of the part the item-th of its items is made of."""
        ...

    def item_patches(self, images: Sequence[Image.Image], part: Part, item: int) -> np.ndarray:
        """float32 (P, C), P = t·h·w, of one item; images: decoded, those of `item_files`."""
        ...

    def fingerprint(self) -> str:
        """Hex digest that changes whenever sizes, row counts or pixel values may change."""
        ...


class StillImages(ABC):
    """An `ItemProcessor` of parts that are one image and become one item."""

    @abstractmethod
    def grid(self, width: int, height: int) -> Grid:
        """(1, h, w) in patches of an image of so many pixels."""

    @abstractmethod
    def row_grid(self, width: int, height: int) -> Grid:
        """(1, h, w) in rows."""

    @abstractmethod
    def cost(self, width: int, height: int) -> int:
        """Relative work to encode the image."""

    @abstractmethod
    def patches(self, image: Image.Image) -> np.ndarray:
        """float32 (P, C)."""

    def plan(self, part: Part) -> PartPlan:
        """One item. Raises ValueError for several frames, and as `grid`."""
        if part.frames != 1:
            raise ValueError(f"a part of {part.frames} frames, but its encoder takes still images")
        size = part.width, part.height
        return PartPlan(self.grid(*size), self.row_grid(*size), self.cost(*size))

    def item_files(self, part: Part, item: int) -> range:
        """The only one."""
        return range(1)

    def item_patches(self, images: Sequence[Image.Image], part: Part, item: int) -> np.ndarray:
        """float32 (P, C) of the image."""
        return self.patches(images[0])
