"""Square images are what transformers' Gemma-3 processor makes of them, value for value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from data.modalities.images import SquareImageProcessor
from data.modalities.processor import Part

SMALL = SquareImageProcessor(image_size=56, patch_size=14, merge_size=2)
PUBLISHED = SquareImageProcessor(image_size=896, patch_size=14, merge_size=4)
IMAGENET = SquareImageProcessor(
    image_size=64, patch_size=8, merge_size=4, mean=(0.48, 0.45, 0.40), std=(0.26, 0.26, 0.27)
)


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def to_patches(pixels: np.ndarray, processor: SquareImageProcessor) -> np.ndarray:
    """(3, height, width) -> (h·w, 3·P·P), the patches of one row adjacent."""
    size, merge = processor.patch_size, processor.merge_size
    side = pixels.shape[1] // size
    found = []
    for row in range(0, side, merge):
        for column in range(0, side, merge):
            for y in range(row, row + merge):
                for x in range(column, column + merge):
                    patch = pixels[:, y * size : (y + 1) * size, x * size : (x + 1) * size]
                    found.append(patch.reshape(-1))
    return np.stack(found)


@pytest.mark.parametrize("size", [(56, 56), (123, 45), (31, 300), (1, 1), (1000, 900)])
@pytest.mark.parametrize("processor", [SMALL, PUBLISHED, IMAGENET])
def test_patches_equal_transformers(size: tuple[int, int], processor: SquareImageProcessor) -> None:
    image = noise(*size)
    side = processor.image_size
    options: dict[str, Any] = {
        "size": {"height": side, "width": side},
        "image_mean": list(processor.mean),
        "image_std": list(processor.std),
    }
    (expected,) = Gemma3ImageProcessorPil(**options)([image], return_tensors="np")["pixel_values"]
    patches = processor.patches(image)
    assert patches.dtype == np.uint8
    values = processor.wire.values(patches)
    np.testing.assert_array_equal(values, to_patches(expected, processor))
    assert len(patches) == np.prod(processor.plan(Part(size)).grid)


def test_every_image_has_the_same_number_of_rows() -> None:
    plan = PUBLISHED.plan(Part((3, 4000)))
    assert plan == PUBLISHED.plan(Part((500, 5)))
    assert (plan.grid, plan.row_grid, plan.num_rows) == ((1, 64, 64), (1, 16, 16), 256)
    assert plan.cost == 4096 * (4096 + 6 * 1152)
    assert PUBLISHED.wire.patch_dim == 588


def test_fingerprint_changes_with_every_setting() -> None:
    others = [
        SquareImageProcessor(image_size=112, patch_size=14, merge_size=2),
        SquareImageProcessor(image_size=56, patch_size=7, merge_size=2),
        SquareImageProcessor(image_size=56, patch_size=14, merge_size=4),
        SquareImageProcessor(image_size=56, patch_size=14, merge_size=2, std=(1.0, 1.0, 1.0)),
    ]
    assert len({one.fingerprint() for one in [SMALL, *others]}) == 5
