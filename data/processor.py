"""What the index, the readers and the training loop ask of an encoder's item processor.

Letters: `P` patches of one item, `C` numbers per patch, `t, h, w` a grid of frames, rows, columns.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from PIL import Image


class ItemProcessor(Protocol):
    """Turns items of one media into patches; sizes follow from width and height in pixels alone.

    Methods raise ValueError for an item that it cannot take.
    """

    @property
    def patch_dim(self) -> int:
        """C."""
        ...

    @property
    def row_pixels(self) -> int:
        """Side in pixels of a square that makes one row."""
        ...

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """(t, h, w) in patches."""
        ...

    def row_grid(self, width: int, height: int) -> tuple[int, int, int]:
        """(t, h, w) in rows."""
        ...

    def num_tokens(self, width: int, height: int) -> int:
        """Rows, and so placeholder tokens."""
        ...

    def cost(self, width: int, height: int) -> int:
        """Relative work to encode the item."""
        ...

    def patches(self, image: Image.Image) -> np.ndarray:
        """float32 (P, C), P = t·h·w."""
        ...

    def fingerprint(self) -> str:
        """Hex digest that changes whenever sizes, row counts or pixel values may change."""
        ...
