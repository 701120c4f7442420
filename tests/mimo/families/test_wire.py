"""What becomes of bytes on the device equals, to the last bit, the patches that were once sent.

Those were made on the host: normalised in fp32, repeated over frames, then cast to the dtype in
which a tower computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from data.modalities.audio import AudioClips, wav_bytes
from data.modalities.images import ImageProcessor, SquareImageProcessor, normalisation_table
from data.modalities.processor import Part, WireForm
from data.modalities.videos import (
    TimedVideoProcessor,
    VideoProcessor,
    frame_normalisation_table,
    resize_frames,
)
from mimo.families.wire import WirePatches

MEDIA: dict[str, Any] = {
    "image": ImageProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * 20),
    "one frame": ImageProcessor(8, 3, temporal_patch_size=1, max_pixels=9_000, mean=(0.1, 0.5, 1)),
    "square": SquareImageProcessor(image_size=56, patch_size=14, merge_size=2, std=(0.5, 0.3, 1)),
    "video": VideoProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * 20),
    "timed video": TimedVideoProcessor(min_pixels=4 * 28 * 28, max_pixels=40 * 28 * 28),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SIZES = [(28, 28), (31, 57), (101, 40)]


def frames(count: int, width: int, height: int) -> list[Image.Image]:
    """Every byte is among the pixels of the first."""
    pixels = np.random.default_rng(count).integers(0, 256, (count, height, width, 3), np.uint8)
    pixels[0].reshape(-1, 3)[:256] = np.arange(256, dtype=np.uint8)[:, None]
    return [Image.fromarray(one) for one in pixels]


def float_patches(media: Any, images: Sequence[Image.Image], part: Part) -> np.ndarray:
    """float32 (P, C): what an item of these files once was."""
    pixels = np.stack([np.asarray(image) for image in images])
    table = normalisation_table(media.mean, media.std)
    depth = getattr(media, "temporal_patch_size", 1)
    if isinstance(media, VideoProcessor):
        pixels = resize_frames(pixels, *media.frame_size(part))
        table = frame_normalisation_table(media.mean, media.std)
    elif isinstance(media, SquareImageProcessor):
        side = (media.image_size, media.image_size)
        pixels = np.asarray(images[0].resize(side, Image.Resampling.BILINEAR))[None]
    else:
        size = media.resized(*part.size)
        pixels = np.asarray(images[0].resize(size, Image.Resampling.BICUBIC))[None]
    size, merge = media.patch_size, media.merge_size
    pixels = np.concatenate([pixels, np.repeat(pixels[-1:], -len(pixels) % depth, axis=0)])
    values = np.stack([table[channel][pixels[..., channel]] for channel in range(3)], axis=1)
    t, h, w = len(pixels) // depth, pixels.shape[1] // size, pixels.shape[2] // size
    cut = values.reshape(t, depth, 3, h // merge, merge, size, w // merge, merge, size)
    return cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, 3 * depth * size**2)


class Calls(TorchDispatchMode):
    """Writes down what a device would be given to do, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def items_of(name: str, size: tuple[int, int]) -> list[tuple[WireForm, np.ndarray, np.ndarray]]:
    """The form, what is sent, and the values of each item of a file, or of a clip of five."""
    media = MEDIA[name]
    part = Part(size, 5 if "video" in name else 1)
    images = frames(part.frames, *size)
    found = []
    for item in range(media.plan(part).num_items):
        own = [images[file] for file in media.item_files(part, item)]
        values = float_patches(media, own, part)
        found.append((media.wire, media.item_patches(own, part, item), values))
    return found


def on_device(items: Sequence[tuple[WireForm, np.ndarray, np.ndarray]]) -> WirePatches:
    pairs = [(form, torch.from_numpy(sent)) for form, sent, _ in items]
    return WirePatches.of(pairs, torch.cat, torch.clone)


def assert_same_bits(got: Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    """fp64 holds the other dtypes exactly."""
    assert got.dtype is dtype
    assert torch.equal(got.double(), torch.from_numpy(expected).to(dtype).double())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MEDIA)
def test_values_of_bytes_equal_those_that_were_once_sent(name: str, size: tuple[int, int]) -> None:
    items = items_of(name, size)
    values = np.concatenate([expected for _, _, expected in items])
    assert len(np.unique(values)) >= 256, "not all bytes are looked up"
    for form, sent, expected in items:
        assert sent.nbytes * 4 * form.repeats == expected.nbytes
        np.testing.assert_array_equal(form.values(sent), expected)
    for dtype in DTYPES:
        assert_same_bits(on_device(items).values(dtype), values, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_items_of_several_forms_keep_their_order(dtype: torch.dtype) -> None:
    order = [("video", (60, 40)), ("image", (57, 31)), ("image", (28, 28)), ("video", (28, 28))]
    items = [item for name, size in [*order, *order[::-1]] for item in items_of(name, size)]
    patches = on_device(items)
    assert len(patches.parts) == 2, "one part for each form, not for each item"
    expected = np.concatenate([values for _, _, values in items])
    assert_same_bits(patches.values(dtype), expected, dtype)


def test_sounds_are_sent_as_values() -> None:
    clips = AudioClips(num_mel_bins=20)
    sound = clips.decode(wav_bytes(np.arange(3200, dtype=np.int16)))
    values = clips.item_patches([sound], Part(sound.size), 0)
    item = (clips.wire, values, values)
    assert values.dtype == np.float32
    for dtype in DTYPES:
        assert_same_bits(on_device([item]).values(dtype), values, dtype)


def test_a_lane_without_items_has_no_values_of_the_right_width() -> None:
    for media in (*MEDIA.values(), AudioClips()):
        nothing = np.zeros((0, media.wire.width), media.wire.dtype)
        values = on_device([(media.wire, nothing, nothing)]).values(torch.bfloat16)
        assert values.shape == (0, media.wire.patch_dim)
        assert values.dtype is torch.bfloat16


def test_what_stands_for_a_lane_without_items_takes_no_part_beside_items() -> None:
    (clip,) = items_of("video", (28, 28))
    form = MEDIA["image"].wire
    nothing = np.zeros((0, form.width), np.uint8)
    patches = on_device([(form, nothing, nothing), clip])
    assert patches.order is None
    assert_same_bits(patches.values(torch.float32), clip[2], torch.float32)


def test_the_device_is_given_as_much_work_for_many_items_as_for_few() -> None:
    pair = [*items_of("image", (57, 31)), *items_of("video", (28, 28))]
    calls: list[list[str]] = []
    for items in (pair, pair * 5):
        patches = on_device(items)
        with Calls() as seen:
            patches.values(torch.bfloat16)
        calls.append(seen.names)
    few, many = calls
    assert few == many
    assert not {"aten._local_scalar_dense", "aten.nonzero"} & {*many}, "the host would wait"
