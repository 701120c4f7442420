"""Images, one item each, and the Qwen2-VL preprocessing into patches.

Letters: `P` patch size in pixels, `M` merge size in patches, `T` temporal patch size in frames,
`t, h, w` the grid of one image in patches (`t` is 1 for a still image).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image

from data.media.image_files import ImageFiles, to_rgb
from data.media.processor import Grid, Part, PartPlan, Size, WireForm, encoding_cost

MAX_ASPECT_RATIO = 200

OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class StillImages(ImageFiles):
    """A `Media` of parts that are one image and become one item."""

    patch_size: int
    merge_size: int
    tower_width: int

    @property
    def row_pixels(self) -> int:
        """Side of a square in the resized image that makes one row: P·M pixels."""
        return self.patch_size * self.merge_size

    @abstractmethod
    def grid(self, width: int, height: int) -> Grid:
        """(1, h, w) in patches of an image of this many pixels."""

    def row_grid(self, width: int, height: int) -> Grid:
        """(1, h, w) in rows: the grid after merging. Raises as `grid`."""
        t, h, w = self.grid(width, height)
        return t, h // self.merge_size, w // self.merge_size

    def num_tokens(self, width: int, height: int) -> int:
        """Rows, and so placeholder tokens, of an image: t·h·w / M². Raises as `grid`."""
        return math.prod(self.row_grid(width, height))

    def cost(self, width: int, height: int) -> int:
        """Relative work to encode an image, see `encoding_cost`. Raises as `grid`."""
        return encoding_cost(math.prod(self.grid(width, height)), self.tower_width)

    @abstractmethod
    def patches(self, image: Image.Image) -> np.ndarray:
        """uint8 (P, W)."""

    def plan(self, part: Part) -> PartPlan:
        """One item. Raises ValueError for several frames, and as `grid`."""
        if part.frames != 1:
            raise ValueError(f"a part of {part.frames} frames, but its encoder takes still images")
        return PartPlan(self.grid(*part.size), self.row_grid(*part.size), self.cost(*part.size))

    def item_files(self, part: Part, item: int) -> range:
        """The only file."""
        return range(1)

    def item_patches(self, files: Sequence[Image.Image], part: Part, item: int) -> np.ndarray:
        """uint8 (P, W) of the image."""
        return self.patches(files[0])


@dataclass(frozen=True)
class ImageProcessor(StillImages):
    """Qwen2-VL preprocessing: resize to whole merge blocks, cut into patches, normalise.

    patch_size: P, pixels. merge_size: M, patches per side that become one row.
    temporal_patch_size: T, frames per patch; a still image is repeated T times.
    min_pixels, max_pixels: bounds on the pixels of the resized image.
    mean, std: per RGB channel, for values in 0..1.
    tower_width: hidden size of the tower that encodes the patches; only `cost` depends on it.
    jpeg_draft: as in `ImageFiles`.

    Raises ValueError when built with sizes that cannot work.
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

    def __post_init__(self) -> None:
        # Lists from YAML become tuples, so that equal settings have equal fingerprints.
        object.__setattr__(self, "mean", tuple(float(value) for value in self.mean))
        object.__setattr__(self, "std", tuple(float(value) for value in self.std))
        problems = [
            f"{name} is {getattr(self, name)}, needs to be at least 1"
            for name in (
                "patch_size",
                "merge_size",
                "temporal_patch_size",
                "min_pixels",
                "tower_width",
            )
            if getattr(self, name) < 1
        ]
        block = self.patch_size * self.merge_size
        if self.max_pixels < max(self.min_pixels, block * block):
            problems.append(
                f"max_pixels is {self.max_pixels}, needs to be at least min_pixels "
                f"({self.min_pixels}) and one merge block ({block} x {block} = {block * block})"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std, default=0.0) <= 0:
            problems.append(f"mean {self.mean} and std {self.std} need 3 values each, std above 0")
        if problems:
            raise ValueError("image processor: " + "; ".join(problems))

    @property
    def wire(self) -> WireForm:
        """3·P·P bytes of a patch, for 3·T·P·P values."""
        width, frames = 3 * self.patch_size**2, self.temporal_patch_size
        return WireForm(width, normalisation_table, self.mean, self.std, frames)

    def shown_size(self, size: Size) -> Size:
        """As `resized`."""
        return self.resized(*size)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in pixels after resizing: multiples of P·M, within the pixel bounds.

        The aspect ratio is kept as well as the multiples allow. A very long image may end above
        `max_pixels`, because a side is never shorter than one merge block.

        Raises ValueError for an empty image or an aspect ratio above 200.
        """
        if width < 1 or height < 1:
            raise ValueError(
                f"image of {width} x {height} pixels: both sides need to be at least 1"
            )
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ValueError(
                f"image of {width} x {height} pixels has an aspect ratio of "
                f"{max(width, height) / min(width, height):.0f}, at most {MAX_ASPECT_RATIO} is "
                "allowed; crop or split it"
            )
        block = self.patch_size * self.merge_size
        new_width, new_height = round(width / block) * block, round(height / block) * block
        if new_width * new_height > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            new_width = max(block, math.floor(width / shrink / block) * block)
            new_height = max(block, math.floor(height / shrink / block) * block)
        elif new_width * new_height < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_width = math.ceil(width * grow / block) * block
            new_height = math.ceil(height * grow / block) * block
        return new_width, new_height

    def grid(self, width: int, height: int) -> Grid:
        """(t, h, w) in patches of an image of `width` x `height` pixels; t is 1."""
        new_width, new_height = self.resized(width, height)
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def patches(self, image: Image.Image) -> np.ndarray:
        """uint8 (t·h·w, 3·P·P): patches in Qwen's order, see `cut_patches`."""
        resized = to_rgb(image).resize(self.resized(*self.size_of(image)), Image.Resampling.BICUBIC)
        return cut_patches(np.asarray(resized)[None], self.patch_size, self.merge_size)


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
