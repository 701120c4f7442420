"""Images that a generator learns to make: their sizes, values and order."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data.modalities.images import TargetImages
from data.modalities.processor import Part, encoding_cost


def targets(side: int = 2, max_pixels: int = 1024, queries: int = 3) -> TargetImages:
    return TargetImages(side, max_pixels, queries, tower_width=8)


def decoded(media: TargetImages, pixels: np.ndarray) -> Image.Image:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return media.decode(buffer.getvalue())


def test_a_token_has_the_values_of_its_square_by_channel_line_and_column() -> None:
    media = targets()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    part = Part((6, 4))
    patches = media.item_patches([decoded(media, pixels)], part, 0)
    assert (patches.dtype, patches.shape, media.wire.width) == (np.uint8, (6, 12), 12)
    values = media.wire.values(patches)
    assert values.dtype == np.float32
    assert media.plan(part).grid == (1, 2, 3)
    for line in range(2):
        for column in range(3):
            square = pixels[2 * line : 2 * line + 2, 2 * column : 2 * column + 2]
            expected = square.transpose(2, 0, 1).reshape(-1) / 127.5 - 1
            np.testing.assert_allclose(values[3 * line + column], expected, atol=1e-6)


def test_grey_and_transparent_images_become_rgb() -> None:
    media = targets()
    for pixels in (np.full((2, 2), 51, np.uint8), np.full((2, 2, 4), (51, 51, 51, 255), np.uint8)):
        values = media.wire.values(media.item_patches([decoded(media, pixels)], Part((2, 2)), 0))
        np.testing.assert_allclose(values, np.full((1, 12), -0.6), atol=1e-6)


def test_a_larger_image_is_made_smaller_before_it_is_cut() -> None:
    media = targets(16, 32 * 32)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    image = decoded(media, pixels)
    values = media.wire.values(media.item_patches([image], Part((64, 64)), 0))
    resized = np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC)) / 127.5 - 1
    whole = values.reshape(2, 2, 3, 16, 16).transpose(0, 3, 1, 4, 2).reshape(32, 32, 3)
    np.testing.assert_allclose(whole, resized, atol=1e-6)


@pytest.mark.parametrize(
    ("side", "max_pixels", "size", "expected"),
    [
        (2, 1024, (8, 8), (8, 8)),
        (16, 1 << 20, (1000, 500), (992, 496)),  # of 62.5 and 31.25 squares
        (16, 1 << 20, (3, 100), (16, 96)),
        (16, 1 << 20, (2048, 1024), (1456, 720)),
        (16, 1 << 20, (1025, 1023), (1024, 1024)),
        (16, 40 * 40, (40, 40), (32, 32)),  # not 48 x 48, which are more pixels
        (16, 256, (800, 8), (160, 16)),
    ],
)
def test_sizes_are_whole_squares_and_keep_the_aspect(
    side: int, max_pixels: int, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert targets(side, max_pixels).resized(*size) == expected


@given(
    side=st.integers(1, 32),
    squares=st.integers(1, 64),
    size=st.tuples(st.integers(1, 300), st.integers(1, 300)),
)
def test_any_size_becomes_whole_squares_within_the_pixels(
    side: int, squares: int, size: tuple[int, int]
) -> None:
    media = targets(side, squares * side**2)
    if max(size) > 200 * min(size):
        with pytest.raises(ValueError, match="aspect ratio"):
            media.resized(*size)
        return
    width, height = media.resized(*size)
    assert width % side == height % side == 0 < min(width, height)
    assert width * height <= media.max_pixels or min(width, height) == side
    plan = media.plan(Part(size))
    assert plan.grid == (1, height // side, width // side)
    assert plan.cost == encoding_cost(plan.num_patches, 8)
    assert (plan.is_output, plan.num_rows, plan.num_items) == (True, 3, 1)


def test_settings_change_the_fingerprint_and_one_token_has_to_fit() -> None:
    others = [targets(), targets(4), targets(2, 1028), targets(queries=0)]
    assert len({media.fingerprint() for media in others}) == len(others)
    with pytest.raises(ValueError, match=r"got 255, needs at least the 256 pixels .*\(16 x 16\)"):
        targets(16, 255)
