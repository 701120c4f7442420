"""What transformers' video processors make of given frames, with or without torchvision.

They import torchvision, for two of its functions. Where it is not installed these stand in, written
after torchvision 0.29 `transforms.v2.functional`; with both, the values were the same bit for bit.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image


class _InterpolationMode(enum.Enum):
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def _resize(
    image: torch.Tensor, size: tuple[int, int], interpolation: Any, antialias: bool
) -> torch.Tensor:
    """Of a uint8 tensor (..., 3, height, width), on a CPU."""
    assert image.dtype == torch.uint8
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    resized = torch.nn.functional.interpolate(
        flat, size=size, mode=interpolation.value, align_corners=False, antialias=antialias
    )
    return resized.reshape(*image.shape[:-2], *size)


def _normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool) -> torch.Tensor:
    mean, std = (torch.as_tensor(x, dtype=torch.float32).view(-1, 1, 1) for x in (mean, std))
    return (image - mean) / std


@contextmanager
def _torchvision() -> Iterator[None]:
    """torchvision, or what stands in for it, where transformers looks for it."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    from PIL.Image import Resampling
    from transformers import image_processing_backends, video_processing_utils

    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    functional = ModuleType(f"{names[-1]}.functional")
    stand_in: dict[str, Any] = {"resize": _resize, "normalize": _normalize}
    stand_in |= {"grayscale_to_rgb": lambda image: image, "InterpolationMode": _InterpolationMode}
    for name, value in stand_in.items():
        setattr(functional, name, value)
    modules = {name: ModuleType(name) for name in names} | {functional.__name__: functional}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    patched = {
        (image_processing_backends, "tvF"): functional,
        (image_processing_backends, "pil_torch_interpolation_mapping"): {
            Resampling.BICUBIC: _InterpolationMode.BICUBIC
        },
        (video_processing_utils, "tvF"): functional,
    }
    sys.modules.update(modules)
    for (module, name), value in patched.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        for module, name in patched:
            delattr(module, name)


def video_patches(
    family: str, frames: Sequence[Image.Image], **options: Any
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """(patches float32 (t·h·w, C), grid in patches) of "qwen2_vl" or "qwen3_vl"."""
    name = {"qwen2_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[family]
    with _torchvision():
        home = f"transformers.models.{family}.video_processing_{family}"
        processor = getattr(importlib.import_module(home), name)(**options)
        out = processor(
            videos=[np.stack([np.asarray(frame) for frame in frames])],
            do_sample_frames=False,
            cap_pixels_per_frame=False,
            return_tensors="pt",
        )
    t, h, w = out["video_grid_thw"][0].tolist()
    return out["pixel_values_videos"].numpy(), (t, h, w)
