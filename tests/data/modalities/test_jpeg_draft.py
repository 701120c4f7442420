"""A JPEG that shrinks a lot may be decoded at a smaller size; everything else stays as it is."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.index.reader import SampleReader
from data.modalities.images import ImageProcessor, PanAndScan, SquareImageProcessor
from data.modalities.processor import Part
from data.modalities.videos import VideoProcessor
from data.text.chat import ChatTokenizer
from tests.data.conftest import Ask, IndexOf

QWEN = ImageProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * 12)
GEMMA = SquareImageProcessor(image_size=56, patch_size=14, merge_size=2)
SIZES = [(800, 600), (601, 333), (113, 700)]


def photo(width: int, height: int, file_format: str = "JPEG", **options: Any) -> bytes:
    """Smooth, as photos are at the scale of a pixel."""
    coarse = np.random.default_rng(width).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def exif(orientation: int) -> dict[str, Any]:
    tags = Image.Exif()
    tags[274] = orientation
    return {"exif": tags}


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("media", [QWEN, GEMMA], ids=["qwen", "gemma"])
def test_sizes_stay_and_pixels_are_about_the_same(
    media: Any, size: tuple[int, int], orientation: int
) -> None:
    data = photo(*size, **exif(orientation))
    draft = replace(media, jpeg_draft=True)
    whole, small = media.decode(data), draft.decode(data)
    assert small.width * 2 <= whole.width + 1
    width, height = size
    expected = (height, width) if orientation == 6 else size
    assert draft.size_of(small) == media.size_of(whole) == whole.size == expected
    assert draft.probe(io.BytesIO(data)) == expected
    shown = draft.shown_size(expected)
    assert shown is not None
    assert small.width >= shown[0]
    assert small.height >= shown[1]
    part = Part(expected)
    assert draft.plan(part) == media.plan(part)
    fine, coarse = (
        own.item_patches([file], part, 0).astype(int)
        for own, file in ((media, whole), (draft, small))
    )
    assert fine.shape == coarse.shape
    assert 0 < np.abs(fine - coarse).mean() < 4, "of 255, where pixels are rounded up"
    assert draft.fingerprint() == media.fingerprint(), "an index says the same of both"


def test_an_image_that_shrinks_by_less_than_half_is_decoded_whole() -> None:
    data, draft = photo(100, 70), replace(GEMMA, jpeg_draft=True)
    np.testing.assert_array_equal(draft.decode(data), GEMMA.decode(data))


@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
def test_other_formats_are_decoded_whole(file_format: str) -> None:
    data = photo(300, 200, file_format, **exif(6))
    draft = replace(GEMMA, jpeg_draft=True)
    np.testing.assert_array_equal(draft.decode(data), GEMMA.decode(data))
    assert draft.size_of(draft.decode(data)) == (200, 300)


def test_an_image_with_crops_is_decoded_whole() -> None:
    crops = replace(GEMMA, pan_and_scan=PanAndScan(min_crop_size=32, min_ratio=1.5))
    draft = replace(crops, jpeg_draft=True)
    assert draft.decode(photo(300, 100)).size == (300, 100)
    assert draft.decode(photo(300, 290)).size == (75, 73)


def test_frames_of_videos_are_decoded_whole() -> None:
    clips = VideoProcessor.like(replace(QWEN, jpeg_draft=True), max_pixels=28 * 28 * 12)
    assert clips.decode(photo(800, 600)).size == (800, 600)


def test_a_reader_finds_the_size_that_the_index_says(
    chat: ChatTokenizer, index_of: IndexOf, ask: Ask
) -> None:
    members = {"a.json": ask(1), "a.0.jpg": photo(800, 600, **exif(6))}
    index = index_of(members, media={"image": QWEN})
    processors = {"image": replace(QWEN, jpeg_draft=True)}
    reader = SampleReader(index, chat, processors)
    assert reader.decoded(0, 0).size == (150, 200)
    assert len(reader.patches(0)) == np.prod(reader.plan(0).grid)
