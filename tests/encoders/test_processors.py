"""What the settings of an encoder make of its media."""

from __future__ import annotations

from typing import Any

import pytest

from data.modalities.images import ImageProcessor, PanAndScan, SquareImageProcessor
from data.modalities.processor import Part
from data.modalities.videos import TimedVideoProcessor, VideoProcessor
from encoders import gemma3, qwen3_vl, qwen_vl

SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 2,
}


def test_qwen2_5_takes_videos_with_limits_of_their_own_and_other_media_as_images() -> None:
    settings = qwen_vl.Settings(
        **SIZES, video_min_pixels=3136, video_max_pixels=50_000, tokens_per_second=4.0
    )
    video, images = settings.processor("video"), settings.processor("image")
    assert isinstance(video, VideoProcessor)
    assert (video.min_pixels, video.max_pixels, video.tokens_per_second) == (3136, 50_000, 4.0)
    assert type(images) is type(settings.processor("scan")) is ImageProcessor
    assert images.max_pixels == settings.max_pixels
    assert video.wire.patch_dim == images.wire.patch_dim
    assert video.tower_width == images.tower_width
    assert video.plan(Part((56, 56), 4, fps=1.0)).time_step == 8.0


def test_qwen3_takes_videos_as_timed_frames_normalised_as_its_images() -> None:
    settings = qwen3_vl.Settings(**SIZES, image_mean=(0.4, 0.4, 0.4), image_std=(0.2, 0.2, 0.2))
    video, images = settings.processor("video"), settings.processor()
    assert isinstance(video, TimedVideoProcessor)
    assert (video.mean, video.std) == (images.mean, images.std) == ((0.4,) * 3, (0.2,) * 3)
    assert (video.min_pixels, video.max_pixels) == (images.min_pixels, images.max_pixels)
    assert type(images) is ImageProcessor
    assert video.wire.patch_dim == images.wire.patch_dim


@pytest.mark.parametrize("family", [qwen_vl, qwen3_vl])
def test_limits_that_no_video_can_meet_are_refused(family: Any) -> None:
    with pytest.raises(ValueError, match=r"max_pixels is 900, needs to be at least min_pixels"):
        family.Settings(**SIZES, video_min_pixels=800, video_max_pixels=900, merge_size=3)


def test_gemma3_crops_images_where_it_is_told_to() -> None:
    sizes = {**SIZES, "image_size": 56, "mm_tokens_per_image": 4}
    keys = {"min_crop_size": 30, "max_num_crops": 3, "min_ratio_to_activate": 1.5}
    told = {f"pan_and_scan_{key}": value for key, value in keys.items()}
    plain = gemma3.Settings(**sizes, **told).processor()
    crops = gemma3.Settings(**sizes, **told, pan_and_scan=True).processor()
    assert isinstance(plain, SquareImageProcessor)
    assert plain.pan_and_scan is None
    assert crops.pan_and_scan == PanAndScan(min_crop_size=30, max_num_crops=3, min_ratio=1.5)
    assert [one.plan(Part((200, 40))).num_items for one in (plain, crops)] == [1, 4]
