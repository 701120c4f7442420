"""Videos as the Qwen families take them: frames of one size, a few of them per temporal patch.

Frames are resized and normalised as in transformers' video processors, which work on tensors, so
values differ in the last digit from those of the same frames taken as images.

Letters: `P` patch size in pixels, `M` merge size in patches, `T` temporal patch size in frames, `t,
h, w` the grid of one item in patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image

from data.modalities.image_files import to_rgb
from data.modalities.images import ImageProcessor, cut_patches
from data.modalities.processor import Part, PartPlan, Size, WireForm
from data.text.messages import ITEM_SLOT

VIDEO = "video"
"""The modality that Qwen's encoders take as videos; they take all others as images."""


@dataclass(frozen=True)
class VideoProcessor(ImageProcessor):
    """Qwen2-VL and Qwen2.5-VL: a video is one item, its last frame repeated to fill a patch.

    Source: transformers `Qwen2VLVideoProcessor`, without sampling of frames. min_pixels,
    max_pixels: bounds on the pixels of each resized frame. tokens_per_second: positions per second
    of video.
    """

    tokens_per_second: float = 2.0

    KIND: ClassVar[str] = "qwen2_vl-video-1"

    @classmethod
    def like(cls, images: ImageProcessor, **limits: float) -> Self:
        """Return a processor that cuts and normalises like ``images``, within other limits."""
        fields: dict[str, Any] = vars(images) | {"jpeg_draft": False} | limits
        return cls(**fields)

    @property
    def wire(self) -> WireForm:
        """3·T·P·P bytes of a patch, and as many values."""
        width = 3 * self.temporal_patch_size * self.patch_size**2
        return WireForm(width, frame_normalisation_table, self.mean, self.std)

    def frame_size(self, part: Part) -> Size:
        """Size of the part's resized frames. Raises ValueError as `resized` does."""
        return self.resized(*part.size)

    def plan(self, part: Part) -> PartPlan:
        t = -(-part.frames // self.temporal_patch_size)
        # In float32 as in transformers, because positions are then cut to whole numbers.
        seconds = np.float32(self.temporal_patch_size / part.fps)
        step = np.float32(self.tokens_per_second) * seconds
        return self._plan(self.frame_size(part), t, time_step=float(step))

    def item_patches(self, files: Sequence[Image.Image], part: Part, item: int) -> np.ndarray:
        """uint8 (t·h·w, 3·T·P·P): patches in Qwen's order, see `cut_patches`."""
        frames = np.stack([np.asarray(to_rgb(image)) for image in files])
        resized = resize_frames(frames, *self.frame_size(part))
        return cut_patches(resized, self.patch_size, self.merge_size, self.temporal_patch_size)


@dataclass(frozen=True)
class TimedVideoProcessor(VideoProcessor):
    """Qwen3-VL: every T frames are one item, with their time before it.

    Source: transformers `Qwen3VLVideoProcessor` and `Qwen3VLProcessor.replace_video_token`. A video
    of fewer than T frames, which transformers refuses, is resized as one of T frames.
    min_pixels, max_pixels: bounds on the pixels of all resized frames of a video together.
    """

    KIND: ClassVar[str] = "qwen3_vl-video-1"

    def frame_size(self, part: Part) -> Size:
        block, size = self.row_pixels, self.temporal_patch_size
        width, height = part.size
        if min(width, height) < block:
            scale = max(block / height, block / width)
            width, height = int(width * scale), int(height * scale)
        frames = max(part.frames, size)
        return self._bounded(width, height, frames, round(frames / size) * size)

    def plan(self, part: Part) -> PartPlan:
        count = -(-part.frames // self.temporal_patch_size)
        files = [self.item_files(part, item) for item in range(count)]
        # A patch that is filled with copies of the last frame ends at that frame.
        times = [(numbers[0] / part.fps + numbers[-1] / part.fps) / 2 for numbers in files]
        text = "".join(f"<{time:.1f} seconds>{ITEM_SLOT}" for time in times)
        return self._plan(self.frame_size(part), text=text)

    def item_files(self, part: Part, item: int) -> range:
        first = item * self.temporal_patch_size
        return range(first, min(first + self.temporal_patch_size, part.frames))


def resize_frames(frames: np.ndarray, width: int, height: int) -> np.ndarray:
    """Resize uint8 (F, any height, any width, 3), as torchvision does with antialiasing."""
    import torch  # late: it costs seconds to import

    if frames.shape[1:3] == (height, width):
        return frames
    # A view: torch resizes bytes much faster if they lie pixel by pixel.
    channels_first = torch.from_numpy(frames).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        channels_first, size=(height, width), mode="bicubic", align_corners=False, antialias=True
    )
    return resized.permute(0, 2, 3, 1).numpy()


def frame_normalisation_table(mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """float32 (3, 256): the normalised value of each byte, rounded as in a video processor.

    It scales mean and deviation to bytes, where an image processor scales the bytes to 0..1.
    """
    scaled = np.arange(256, dtype=np.float32)
    means, stds = (np.array(x, np.float32)[:, None] * np.float32(255) for x in (mean, std))
    return (scaled - means) / stds
