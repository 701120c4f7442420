"""Image files: decoding untrusted bytes safely."""

import base64
import io
import warnings
from collections.abc import Callable
from typing import BinaryIO

import numpy as np
from PIL import Image

from data.modalities.processor import Size

# A broken EXIF block is neither a reason to lose an image nor one to say so for each of them.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")

# Only formats that people train on: fewer decoders, fewer ways for a hostile file to hurt.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp", "gif", "bmp")
MAX_PIXELS_DECODED = 64 * 1024 * 1024

_JPEG_SCAN, _MAX_SCANS = b"\xff\xda", 500
# An image's size before a draft, among what Pillow knows of it. No file brings a text of this name:
# in a PNG names end at a zero byte.
_FULL_SIZE = "\0full size"

_EXIF_ORIENTATION = 274
_ORIENTATION_METHOD = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def image_size(file: BinaryIO | bytes) -> Size:
    """(width, height) from the header alone, with the EXIF orientation applied.

    Raises ValueError when the header cannot be read, or promises too many pixels.
    """
    image = _open_lazily(file)
    return _turned(image, image.size)


def open_image(data: bytes, shown_size: Callable[[Size], Size | None] | None = None) -> Image.Image:
    """Decode an image completely, with its EXIF orientation applied; of several frames, the first.

    Its size equals `image_size(data)`. shown_size: from that size to the one at which the image is
    needed. A JPEG is then decoded at a half, quarter or eighth of its size if that is enough;
    `full_size` still gives its own. Raises ValueError for a corrupt, truncated or too large file.
    """
    image = _open_lazily(data)
    is_jpeg = image.format in ("JPEG", "MPO")
    # Each pass over a JPEG may take ten bytes and goes over all pixels; the mark is never data.
    if is_jpeg and data.count(_JPEG_SCAN) > _MAX_SCANS:
        raise ValueError(f"the JPEG has more than {_MAX_SCANS} scans; save it again")
    if is_jpeg and shown_size is not None:
        full = _turned(image, image.size)
        if (shown := shown_size(full)) is not None:
            image.draft(None, _turned(image, shown))
            image.info[_FULL_SIZE] = full
    method = _ORIENTATION_METHOD.get(_orientation(image))
    try:
        image.load()
    except Exception as error:  # decoders raise many types on hostile input
        raise ValueError(
            f"the image cannot be decoded ({type(error).__name__}: {error}): the file is corrupt "
            "or truncated; replace it or remove the sample"
        ) from error
    return image if method is None else image.transpose(method)


def full_size(image: Image.Image) -> Size:
    """(width, height) in pixels of the file that `open_image` has decoded."""
    return image.info.get(_FULL_SIZE, image.size)


def _open_lazily(file: BinaryIO | bytes) -> Image.Image:
    file = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        image = Image.open(file, formats=IMAGE_FORMATS)
    except Exception as error:  # includes Pillow's own bomb error, a plain Exception
        raise ValueError(
            f"the image header cannot be read ({type(error).__name__}: {error}): need one of "
            f"{', '.join(IMAGE_FORMATS)}; replace the file or remove the sample"
        ) from error
    width, height = image.size
    if width < 1 or height < 1 or width * height > MAX_PIXELS_DECODED:
        raise ValueError(
            f"the image is {width} x {height} pixels, between 1 and {MAX_PIXELS_DECODED} are "
            "allowed; scale it down before writing the shard"
        )
    return image


def _turned(image: Image.Image, size: Size) -> Size:
    """The size after the EXIF orientation is applied, or before it."""
    return (size[1], size[0]) if _orientation(image) >= 5 else size


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8, from EXIF or XMP as Pillow reads them; 1 where absent or nonsense."""
    try:
        # Not image.getexif(): for a PNG it decodes the whole image to look for a late chunk.
        value = Image.Image.getexif(image).get(_EXIF_ORIENTATION, 1)
    except Exception:  # a broken EXIF block is no reason to lose the image
        return 1
    return value if isinstance(value, int) and value in range(1, 9) else 1


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode in RGB; transparency is laid over white, as transformers does."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(background, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it


def png_bytes(pixels: np.ndarray) -> bytes:
    """A PNG of uint8 (height, width, 3), or (height, width) in grey."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def thumbnail_url(picture: np.ndarray, side: int) -> str:
    """A `data:` URL of a uint8 (height, width, 3) picture that is shrunk into a square."""
    image, buffer = Image.fromarray(picture), io.BytesIO()
    image.thumbnail((side, side))
    image.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
