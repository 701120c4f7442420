"""Image files: decoding untrusted bytes safely, and what all media of image files share."""

from __future__ import annotations

import base64
import hashlib
import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import astuple, fields
from typing import Any, BinaryIO, ClassVar

import numpy as np
from PIL import Image

from data.media.processor import Size

# A broken EXIF block is neither a reason to lose an image nor one to say so for each of them.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")

# Only formats that people train on: fewer decoders, fewer ways for a hostile file to hurt.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp", "gif", "bmp")
MAX_PIXELS_DECODED = 64 * 1024 * 1024

_SIZES = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1))  # columns and lines of rows, of a random file

_JPEG_SCAN, _MAX_SCANS = b"\xff\xda", 500
# An image's size before a draft, among what Pillow knows of it. No file brings a text of this name:
# in a PNG names end at a zero byte.
_FULL_SIZE = "\0full size"

_PNG_SIGNATURE = 8  # bytes
_PNG_TEXTS = (b"iTXt", b"tEXt", b"zTXt")
_PNG_KEYWORD = 80  # bytes, including the zero at its end
# Of the texts that Pillow's `getexif` reads: EXIF in hexadecimal, and XMP.
_KEYWORDS_WITH_ORIENTATION = (b"exif", b"Raw profile type exif", b"XML:com.adobe.xmp", b"xmp")
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


def image_size(
    file: BinaryIO | bytes, max_pixels_decoded: int = MAX_PIXELS_DECODED
) -> tuple[int, int]:
    """(width, height) in pixels from the header alone, with the EXIF orientation applied.

    Raises ValueError when the header cannot be read, or promises more than `max_pixels_decoded`.
    """
    image = _open_lazily(file, max_pixels_decoded)
    size = image.size
    if _has_late_metadata(image):
        _load(image)
    return _turned(image, size)


def open_image(
    data: bytes,
    max_pixels_decoded: int = MAX_PIXELS_DECODED,
    shown_size: Callable[[Size], Size | None] | None = None,
) -> Image.Image:
    """Decode an image completely, with its EXIF orientation applied; of several frames, the first.

    Its size equals `image_size(data)`. The size is checked before any pixel is decoded, so a
    decompression bomb costs nothing.
    shown_size: from that size to the one at which the image is needed. A JPEG is then decoded at a
    half, quarter or eighth of its size if that is enough; `full_size` still gives its own.

    Raises ValueError for a corrupt, truncated or too large file, or an unknown format.
    """
    image = _open_lazily(data, max_pixels_decoded)
    # Each pass over a JPEG may take ten bytes and goes over all pixels; the mark is never data.
    if image.format in ("JPEG", "MPO") and data.count(_JPEG_SCAN) > _MAX_SCANS:
        raise ValueError(f"the JPEG has more than {_MAX_SCANS} scans; save it again")
    if shown_size is not None and image.format in ("JPEG", "MPO"):
        _draft(image, shown_size)
    _load(image)
    method = _ORIENTATION_METHOD.get(_orientation(image))
    return image if method is None else image.transpose(method)


def full_size(image: Image.Image) -> Size:
    """(width, height) in pixels of the file that `open_image` has decoded."""
    return image.info.get(_FULL_SIZE, image.size)


def _draft(image: Image.Image, shown_size: Callable[[Size], Size | None]) -> None:
    """Have a lazily opened JPEG decoded no larger than it needs to be."""
    full = _turned(image, image.size)
    if (shown := shown_size(full)) is not None:
        image.draft(None, _turned(image, shown))
        image.info[_FULL_SIZE] = full


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except Exception as error:  # decoders raise many types on hostile input
        raise ValueError(
            f"the image cannot be decoded ({type(error).__name__}: {error}): the file is corrupt "
            "or truncated; replace it or remove the sample"
        ) from error


def _open_lazily(file: BinaryIO | bytes, max_pixels_decoded: int) -> Image.Image:
    try:
        image = Image.open(
            io.BytesIO(file) if isinstance(file, bytes) else file, formats=IMAGE_FORMATS
        )
    except Exception as error:  # includes Pillow's own bomb error, a plain Exception
        raise ValueError(
            f"the image header cannot be read ({type(error).__name__}: {error}): need one of "
            f"{', '.join(IMAGE_FORMATS)}; replace the file or remove the sample"
        ) from error
    width, height = image.size
    if width < 1 or height < 1 or width * height > max_pixels_decoded:
        raise ValueError(
            f"the image is {width} x {height} pixels, between 1 and {max_pixels_decoded} are "
            "allowed; scale it down before writing the shard"
        )
    return image


def _has_late_metadata(image: Image.Image) -> bool:
    """Whether a lazily opened PNG may give its orientation after its pixels, as some writers do.

    Pillow sees that only after decoding all pixels, so other texts there do not count.
    """
    file = getattr(image, "fp", None)
    if image.format != "PNG" or file is None:
        return False
    position = file.tell()  # decoding continues from here
    file.seek(_PNG_SIGNATURE)
    pixels_seen = False
    found = False
    while len(header := file.read(8)) == 8 and header[4:] != b"IEND":
        kind, length, start = header[4:], int.from_bytes(header[:4], "big"), file.tell()
        pixels_seen = pixels_seen or kind == b"IDAT"
        if pixels_seen and kind in _PNG_TEXTS:
            keyword = file.read(min(length, _PNG_KEYWORD)).split(b"\0", 1)[0]
            found = found or keyword in _KEYWORDS_WITH_ORIENTATION
        found = found or (pixels_seen and kind == b"eXIf")
        file.seek(start + length + 4)  # data and checksum
    file.seek(position)
    return found


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


def thumbnail_url(picture: np.ndarray, side: int) -> str:
    """A `data:` URL of a uint8 (height, width, 3) picture that is shrunk into a square."""
    image, buffer = Image.fromarray(picture), io.BytesIO()
    image.thumbnail((side, side))
    image.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


class ImageFiles(ABC):
    """The side of a `Media` that faces files, for dataclasses. Sizes are (width, height) in pixels.

    jpeg_draft: whether a JPEG that will shrink to a half or less is decoded at a smaller size,
    which is faster and changes its pixels.
    """

    KIND: ClassVar[str]
    jpeg_draft: bool

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Those of the formats that are decoded."""
        return IMAGE_SUFFIXES

    @property
    @abstractmethod
    def row_pixels(self) -> int:
        """Side of a square in the resized image that makes one row."""

    @abstractmethod
    def shown_size(self, size: Size) -> Size | None:
        """The size at which a file of this size becomes patches; None if there are several."""

    def probe(self, file: BinaryIO) -> Size:
        """Size, from the header. Raises as `image_size`."""
        return image_size(file)

    def decode(self, data: bytes) -> Image.Image:
        """In RGB. Raises ValueError as `open_image`, and for a mode that cannot become RGB."""
        image = open_image(data, shown_size=self.shown_size if self.jpeg_draft else None)
        try:
            return to_rgb(image)
        except OSError as error:
            raise ValueError(f"the image cannot become RGB ({error})") from error

    def size_of(self, decoded: Image.Image) -> Size:
        """Width and height of its file."""
        return full_size(decoded)

    def size_text(self, size: Size) -> str:
        """Words for a size."""
        width, height = size
        return f"{width} x {height} pixels"

    def picture(self, decoded: Image.Image) -> np.ndarray:
        """The image itself."""
        return np.asarray(decoded)

    def random_file(self, rng: np.random.Generator) -> bytes:
        """A PNG of noise: 1 to 4 rows, one to three side by side."""
        columns, lines = _SIZES[int(rng.integers(len(_SIZES)))]
        shape = lines * self.row_pixels, columns * self.row_pixels
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(buffer, "PNG")
        return buffer.getvalue()

    def fingerprint(self) -> str:
        """Hex digest that changes whenever sizes or row counts may change."""
        own: Any = self
        pairs = zip(fields(own), astuple(own), strict=True)
        settings = tuple(value for field, value in pairs if field.name != "jpeg_draft")
        return hashlib.sha256(repr((self.KIND, settings)).encode()).hexdigest()[:16]
