from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from data.modalities.image_files import open_image
from data.modalities.images import ImageProcessor, SquareImageProcessor
from data.modalities.processor import Part

HALF = (0.5, 0.5, 0.5)
SIZES = [(28, 28), (31, 57), (300, 7), (640, 481), (1, 1), (13, 200), (1000, 999), (56, 84)]


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def reference(image: Image.Image, processor: ImageProcessor) -> tuple[np.ndarray, tuple[int, ...]]:
    ours = Qwen2VLImageProcessorPil(
        min_pixels=processor.min_pixels,
        max_pixels=processor.max_pixels,
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
        temporal_patch_size=processor.temporal_patch_size,
        image_mean=list(processor.mean),
        image_std=list(processor.std),
    )
    out = ours(images=[image], return_tensors="np")
    return out["pixel_values"], tuple(int(x) for x in out["image_grid_thw"][0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "processor",
    [
        ImageProcessor(),
        ImageProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * 20),
        ImageProcessor(patch_size=16, merge_size=3, temporal_patch_size=1, max_pixels=200_000),
        ImageProcessor(
            patch_size=16, min_pixels=256 * 256, max_pixels=4096 * 4096, mean=HALF, std=HALF
        ),
    ],
    ids=["default", "small", "other-patches", "qwen3-vl"],
)
def test_patches_and_grid_equal_transformers(size: tuple[int, int], processor: ImageProcessor):
    image = noise(*size)
    expected, grid = reference(image, processor)
    patches = processor.patches(image)
    assert processor.plan(Part(size)).grid == grid
    assert patches.dtype == processor.wire.dtype == np.uint8
    assert patches.shape == (np.prod(grid), 3 * processor.patch_size**2)
    values = processor.wire.values(patches)
    assert values.dtype == np.float32
    assert values.shape == (len(patches), processor.wire.patch_dim)
    np.testing.assert_array_equal(values, expected)


def test_rows_are_patches_over_the_square_of_the_merge_size():
    processor = ImageProcessor(min_pixels=28 * 28)
    assert processor.resized(40, 44) == (28, 56)
    assert processor.plan(Part((40, 44))).grid == (1, 4, 2)
    sizes = [(28, 28), (40, 44), (56, 28), (56, 56)]
    assert [processor.plan(Part(size)).num_rows for size in sizes] == [1, 2, 2, 4]


def test_bounds_that_nothing_can_meet_are_refused():
    with pytest.raises(ValueError, match=r"max_pixels is 5, needs to be at least min_pixels"):
        ImageProcessor(max_pixels=5)


def test_the_fingerprint_depends_on_every_setting():
    default = ImageProcessor()
    others = [
        ImageProcessor(patch_size=16),
        ImageProcessor(min_pixels=1),
        ImageProcessor(mean=(0, 0, 0)),
    ]
    assert len({p.fingerprint() for p in [default, *others]}) == 4


@pytest.mark.parametrize("data", [b"", b"not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_bytes_that_are_no_image_are_refused(data: bytes):
    with pytest.raises(ValueError, match="header cannot be read"):
        open_image(data)


SMALL = SquareImageProcessor(image_size=56, patch_size=14, merge_size=2)
PUBLISHED = SquareImageProcessor(image_size=896, patch_size=14, merge_size=4)
IMAGENET = SquareImageProcessor(
    image_size=64, patch_size=8, merge_size=4, mean=(0.48, 0.45, 0.40), std=(0.26, 0.26, 0.27)
)


def to_patches(pixels: np.ndarray, processor: SquareImageProcessor) -> np.ndarray:
    """(3, height, width) -> (h·w, 3·P·P), the patches of one row adjacent."""
    size, merge = processor.patch_size, processor.merge_size
    side = pixels.shape[1] // size
    patches = []
    for row in range(0, side, merge):
        for column in range(0, side, merge):
            for y in range(row, row + merge):
                for x in range(column, column + merge):
                    patch = pixels[:, y * size : (y + 1) * size, x * size : (x + 1) * size]
                    patches.append(patch.reshape(-1))
    return np.stack(patches)


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
    assert len({processor.fingerprint() for processor in [SMALL, *others]}) == 5
