"""Odd files become what transformers makes of them, or are refused by the name of their sample.

What transformers makes of them: its loader applies the EXIF orientation and takes the first frame;
its processors, given such an image, lay transparency over white and convert to RGB.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from data.modalities.image_files import image_size, open_image
from data.modalities.images import ImageProcessor, SquareImageProcessor
from data.modalities.processor import Part
from tests.data.damaged import chunk

QWEN = ImageProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * 64)
GEMMA = SquareImageProcessor(image_size=56, patch_size=14, merge_size=1)
_RNG = np.random.default_rng(0)


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.fromarray(_RNG.integers(0, 256, (height, width, 4), dtype=np.uint8)).convert(mode)


def saved(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def animated(file_format: str, mode: str = "RGB", **options: Any) -> bytes:
    frames = [noise(40, 30, mode) for _ in range(3)]
    return saved(frames[0], file_format, save_all=True, append_images=frames[1:], **options)


def sixteen_bit() -> bytes:
    values = _RNG.integers(0, 1 << 16, (30, 40), dtype=np.uint16)
    return saved(Image.fromarray(values))


def sixteen_bit_colour() -> bytes:
    """Pillow does not write these."""
    rows = _RNG.integers(0, 256, (10, 20 * 6), dtype=np.uint8)
    pixels = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", 20, 10, 16, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[274] = orientation
    return tags


def xmp(orientation: int) -> str:
    return f'<x:xmpmeta tiff:Orientation="{orientation}"></x:xmpmeta>'


def xmp_info(orientation: int) -> PngInfo:
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", xmp(orientation))
    return info


def behind_the_pixels(kind: bytes, data: bytes) -> bytes:
    whole, end = saved(noise(40, 30)), chunk(b"IEND", b"")
    return whole.removesuffix(end) + chunk(kind, data) + end


ODD: dict[str, Callable[[], bytes]] = {
    "1 pixel wide": lambda: saved(noise(1, 30)),
    "1 pixel high": lambda: saved(noise(150, 1)),
    "a single pixel": lambda: saved(noise(1, 1)),
    "10,000 pixels wide": lambda: saved(noise(10_000, 60)),
    "10,000 pixels high": lambda: saved(noise(55, 10_000, "L")),
    "CMYK JPEG": lambda: saved(noise(40, 30).convert("CMYK"), "JPEG"),
    "grey JPEG": lambda: saved(noise(40, 30, "L"), "JPEG"),
    "grey": lambda: saved(noise(40, 30, "L")),
    "grey with alpha": lambda: saved(noise(40, 30, "LA")),
    "16-bit grey": sixteen_bit,
    "16-bit colour": sixteen_bit_colour,
    "black and white": lambda: saved(noise(40, 30, "1")),
    "palette": lambda: saved(noise(40, 30).quantize(16)),
    "palette, one colour transparent": lambda: saved(noise(40, 30).quantize(16), transparency=3),
    "palette, an alpha per colour": lambda: saved(
        noise(40, 30).quantize(4), transparency=bytes([0, 90, 200, 255])
    ),
    "grey, one value transparent": lambda: saved(noise(40, 30, "L"), transparency=7),
    "colour, one value transparent": lambda: saved(noise(40, 30), transparency=(1, 2, 3)),
    "alpha": lambda: saved(noise(40, 30, "RGBA")),
    "alpha WebP": lambda: saved(noise(40, 30, "RGBA"), "WEBP", lossless=True),
    "BMP": lambda: saved(noise(40, 30), "BMP"),
    "GIF with transparency": lambda: saved(noise(40, 30).quantize(16), "GIF", transparency=3),
    "animated GIF": lambda: animated("GIF"),
    "animated WebP": lambda: animated("WEBP", "RGBA", duration=40),
    "animated PNG": lambda: animated("PNG"),
    "animated PNG with another still": lambda: animated("PNG", default_image=True),
    "orientation in XMP": lambda: saved(noise(40, 30), pnginfo=xmp_info(6)),
    "orientation in XMP, JPEG": lambda: saved(noise(40, 30), "JPEG", xmp=xmp(8).encode()),
    "a note behind the pixels": lambda: behind_the_pixels(b"tEXt", b"Comment\0none"),
    "a broken EXIF block": lambda: saved(noise(40, 30), "JPEG", exif=b"Exif\0\0nonsense"),
} | {
    f"EXIF orientation {number}, {kind}": lambda n=number, k=kind: saved(
        noise(40, 30), k, exif=exif(n)
    )
    for number in range(2, 9)
    for kind in ("JPEG", "PNG", "WEBP")
}


def loaded_by_transformers(data: bytes) -> Image.Image:
    """As its `load_image`, but without dropping what transparency there is."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def qwen(image: Image.Image) -> np.ndarray:
    processor = Qwen2VLImageProcessorPil(min_pixels=QWEN.min_pixels, max_pixels=QWEN.max_pixels)
    return processor([image], return_tensors="np")["pixel_values"]


def gemma(image: Image.Image) -> np.ndarray:
    """(16, 588): the patches of the square image, row by row."""
    options: dict[str, Any] = {"size": {"height": 56, "width": 56}}
    (pixels,) = Gemma3ImageProcessorPil(**options)([image], return_tensors="np")["pixel_values"]
    return pixels.reshape(3, 4, 14, 4, 14).transpose(1, 3, 0, 2, 4).reshape(16, 588)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {name: make() for name, make in ODD.items()}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_becomes_what_transformers_makes_of_it(files: dict[str, bytes], name: str):
    image = open_image(files[name])
    reference = loaded_by_transformers(files[name])
    assert image.size == reference.size == image_size(files[name])
    np.testing.assert_array_equal(QWEN.wire.values(QWEN.patches(image)), qwen(reference))
    np.testing.assert_array_equal(GEMMA.wire.values(GEMMA.patches(image)), gemma(reference))


def test_transformers_refuses_the_same_aspect_ratio():
    with pytest.raises(ValueError, match="aspect ratio must be smaller than 200"):
        qwen(Image.new("RGB", (1, 201)))
    assert len(qwen(Image.new("RGB", (1, 200)))) == QWEN.plan(Part((1, 200))).num_rows * 4
