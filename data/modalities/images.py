"""Still images as patches: Qwen's by area, Gemma-3's as squares, and targets of generators."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, BinaryIO, ClassVar

import numpy as np
from PIL import Image

from data.modalities.image_files import (
    IMAGE_SUFFIXES,
    full_size,
    image_size,
    open_image,
    png_bytes,
    to_rgb,
)
from data.modalities.processor import Part, PartPlan, Size, Triple, WireForm, encoding_cost
from data.text.messages import ITEM_SLOT

MAX_ASPECT_RATIO = 200

OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_RANDOM_ROWS = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1))  # columns and lines of a random file


class StillImages(ABC):
    """A `Media` of parts that are one image and become one item, for dataclasses.

    Sizes are (width, height) in pixels. patch_size: P, pixels. merge_size: M, patches per side that
    become one row. mean, std: per RGB channel, for values in 0..1. tower_width: hidden size of the
    tower; only the cost depends on it. jpeg_draft: whether a JPEG that will shrink to a half or
    less is decoded at a smaller size, which is faster and changes its pixels.
    """

    KIND: ClassVar[str]
    RESAMPLING: ClassVar[Image.Resampling]
    suffixes = IMAGE_SUFFIXES
    patch_size: int
    merge_size: int
    mean: Triple
    std: Triple
    tower_width: int
    jpeg_draft: bool

    @property
    def wire(self) -> WireForm:
        """3·P·P bytes of a patch, and as many values."""
        return WireForm(3 * self.patch_size**2, normalisation_table, self.mean, self.std)

    @property
    def row_pixels(self) -> int:
        """Side of a square in the resized image that makes one row: P·M pixels."""
        return self.patch_size * self.merge_size

    @abstractmethod
    def resized(self, width: int, height: int) -> Size:
        """The size at which an image becomes patches: multiples of P·M. May raise ValueError."""

    def probe(self, file: BinaryIO) -> Size:
        return image_size(file)

    def decode(self, data: bytes) -> Image.Image:
        image = open_image(data, self.shown_size if self.jpeg_draft else None)
        try:
            return to_rgb(image)
        except OSError as error:
            raise ValueError(f"the image cannot become RGB ({error})") from error

    def shown_size(self, size: Size) -> Size | None:
        """The size at which a file of this size becomes patches; None if there are several."""
        return self.resized(*size)

    def size_of(self, decoded: Image.Image) -> Size:
        return full_size(decoded)

    def size_text(self, size: Size) -> str:
        return f"{size[0]} x {size[1]} pixels"

    def picture(self, decoded: Image.Image) -> np.ndarray:
        return np.asarray(decoded)

    def random_file(self, rng: np.random.Generator) -> bytes:
        columns, lines = _RANDOM_ROWS[int(rng.integers(len(_RANDOM_ROWS)))]
        shape = lines * self.row_pixels, columns * self.row_pixels
        return png_bytes(rng.integers(0, 256, shape, dtype=np.uint8))

    def plan(self, part: Part) -> PartPlan:
        """One item. Raises ValueError for several frames, and as `resized`."""
        if part.frames != 1:
            raise ValueError(f"a part of {part.frames} frames, but need a still image")
        return self._plan(self.resized(*part.size))

    def _plan(
        self, size: Size, t: int = 1, text: str = ITEM_SLOT, time_step: float = 1.0
    ) -> PartPlan:
        """Items of t patches of frames that are resized to ``size``."""
        w, h = (side // self.patch_size for side in size)
        return PartPlan(
            grid=(t, h, w),
            row_grid=(t, h // self.merge_size, w // self.merge_size),
            cost=t * encoding_cost(h * w, self.tower_width),  # attention stays inside a frame
            text=text,
            time_step=time_step,
        )

    def item_files(self, part: Part, item: int) -> range:
        return range(part.frames)

    def item_patches(self, files: Sequence[Image.Image], part: Part, item: int) -> np.ndarray:
        """uint8 (h·w, 3·P·P) of the image."""
        return self.patches(files[0])

    def patches(self, image: Image.Image) -> np.ndarray:
        """uint8 (h·w, 3·P·P): patches, the M² of a row adjacent, see `cut_patches`."""
        resized = to_rgb(image).resize(self.resized(*self.size_of(image)), self.RESAMPLING)
        return cut_patches(np.asarray(resized)[None], self.patch_size, self.merge_size)

    def fingerprint(self) -> str:
        processor: Any = self
        pairs = zip(fields(processor), astuple(processor), strict=True)
        settings = tuple(value for field, value in pairs if field.name != "jpeg_draft")
        return hashlib.sha256(repr((self.KIND, settings)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ImageProcessor(StillImages):
    """Qwen2-VL preprocessing: resize to whole merge blocks, cut into patches, normalise.

    temporal_patch_size: T, frames per patch; a still image is repeated T times. min_pixels,
    max_pixels: bounds on the pixels of the resized image. Raises ValueError for bounds that nothing
    can meet.
    """

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, float, float] = OPENAI_CLIP_MEAN
    std: tuple[float, float, float] = OPENAI_CLIP_STD
    tower_width: int = 1280
    jpeg_draft: bool = False

    KIND: ClassVar[str] = "qwen2_vl-1"
    RESAMPLING: ClassVar[Image.Resampling] = Image.Resampling.BICUBIC

    def __post_init__(self) -> None:
        block = self.row_pixels
        if self.max_pixels < max(self.min_pixels, block * block):
            raise ValueError(
                f"image processor: max_pixels is {self.max_pixels}, needs to be at least "
                f"min_pixels ({self.min_pixels}) and one merge block ({block} x {block} = "
                f"{block * block})"
            )

    @property
    def wire(self) -> WireForm:
        """3·P·P bytes of a patch, for 3·T·P·P values."""
        width, frames = 3 * self.patch_size**2, self.temporal_patch_size
        return WireForm(width, normalisation_table, self.mean, self.std, frames)

    def resized(self, width: int, height: int) -> Size:
        """The size at which an image becomes patches, within the pixel bounds.

        A very long image may end above `max_pixels`, because a side is never shorter than one merge
        block. Raises ValueError for an aspect ratio above 200.
        """
        return self._bounded(width, height, 1, 1)

    def _bounded(self, width: int, height: int, frames: int, whole: int) -> Size:
        """The size of ``frames`` frames, if ``whole`` of them together are to meet the bounds."""
        check_aspect_ratio(width, height)
        block, pixels = self.row_pixels, frames * height * width
        new_width, new_height = round(width / block) * block, round(height / block) * block
        if whole * new_width * new_height > self.max_pixels:
            shrink = math.sqrt(pixels / self.max_pixels)
            new_width = max(block, math.floor(width / shrink / block) * block)
            new_height = max(block, math.floor(height / shrink / block) * block)
        elif whole * new_width * new_height < self.min_pixels:
            grow = math.sqrt(self.min_pixels / pixels)
            new_width = math.ceil(width * grow / block) * block
            new_height = math.ceil(height * grow / block) * block
        return new_width, new_height


def check_aspect_ratio(width: int, height: int) -> None:
    """Raise ValueError for an aspect ratio above 200."""
    long, short = max(width, height), min(width, height)
    if long > MAX_ASPECT_RATIO * short:
        raise ValueError(
            f"image of {width} x {height} pixels has an aspect ratio of {long / short:.0f}, at "
            f"most {MAX_ASPECT_RATIO} is allowed; crop or split it"
        )


def cut_patches(frames: np.ndarray, size: int, merge: int, frames_per_patch: int = 1) -> np.ndarray:
    """uint8 (t·h·w, 3·T·P·P): patches of frames whose sides are multiples of P·M pixels.

    frames: uint8 (t·T or fewer, height, width, 3), RGB; the last one is repeated to fill a patch.
    size, merge, frames_per_patch: P, M, T. The M x M patches of one merge block are adjacent, so M²
    consecutive patches make one row. Inside a patch the order is channel, frame, y, x.
    """
    depth = frames_per_patch
    if missing := -len(frames) % depth:
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    count, height, width, _ = frames.shape
    t, h, w = count // depth, height // size, width // size
    # (t, T, h/M, M, P, w/M, M, P, 3) -> (t, h/M, w/M, M, M, 3, T, P, P)
    blocks = frames.reshape(t, depth, h // merge, merge, size, w // merge, merge, size, 3)
    return blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, 3 * depth * size**2)


def normalisation_table(mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """float32 (3, 256): the normalised value of each byte, rounded as transformers does."""
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    means, stds = (np.array(x, dtype=np.float32)[:, None] for x in (mean, std))
    return (scaled - means) / stds


Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels, as Pillow crops


@dataclass(frozen=True)
class PanAndScan:
    """Rules for long images, which are shown whole and again in crops.

    Source: transformers `Gemma3ImageProcessorPil.pan_and_scan`. min_crop_size: pixels of the
    shorter side of a crop; smaller ones are not made. max_num_crops: side by side along the image's
    longer side. min_ratio: of the longer side to the shorter one, below which an image is not
    cropped.
    """

    min_crop_size: int = 256
    max_num_crops: int = 4
    min_ratio: float = 1.2

    def crops(self, width: int, height: int) -> list[Box]:
        """The crops of an image, from its start on; none if it is not long."""
        long, short = max(width, height), min(width, height)
        if long / short < self.min_ratio:
            return []
        wanted = min(math.floor(long / self.min_crop_size), math.floor(long / short + 0.5))
        count = min(self.max_num_crops, max(2, wanted))
        step = math.ceil(long / count)
        if min(step, short) < self.min_crop_size:
            return []
        spans = [(start, min(start + step, long)) for start in range(0, long, step)]
        if width >= height:
            return [(start, 0, end, height) for start, end in spans]
        return [(0, start, width, end) for start, end in spans]


@dataclass(frozen=True)
class SquareImageProcessor(StillImages):
    """Resize to ``image_size`` x ``image_size`` pixels, cut into patches, normalise.

    The aspect ratio is not kept. Source: transformers `Gemma3ImageProcessorPil`.
    image_size: a multiple of P·M. pan_and_scan: when crops of an image become further items; None
    for never. jpeg_draft: of images without crops.
    """

    image_size: int
    patch_size: int
    merge_size: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    tower_width: int = 1152
    pan_and_scan: PanAndScan | None = None
    jpeg_draft: bool = False

    KIND: ClassVar[str] = "gemma3-2"
    RESAMPLING: ClassVar[Image.Resampling] = Image.Resampling.BILINEAR

    def resized(self, width: int, height: int) -> Size:
        return self.image_size, self.image_size

    def shown_size(self, size: Size) -> Size | None:
        return None if self._crops(size) else self.resized(*size)

    def plan(self, part: Part) -> PartPlan:
        whole, crops = super().plan(part), " ".join([ITEM_SLOT] * len(self._crops(part.size)))
        if not crops:
            return whole
        # Source: transformers `Gemma3Processor.replace_image_token`.
        text = f"Here is the original image {ITEM_SLOT} and here are some crops to help you see"
        return replace(whole, text=f"{text} better {crops}")

    def item_patches(self, files: Sequence[Image.Image], part: Part, item: int) -> np.ndarray:
        """uint8 (h·w, 3·P·P) of the image, or of a crop of it."""
        if item == 0:
            return self.patches(files[0])
        return self.patches(to_rgb(files[0]).crop(self._crops(part.size)[item - 1]))

    def _crops(self, size: Size) -> list[Box]:
        return [] if self.pan_and_scan is None else self.pan_and_scan.crops(*size)


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
