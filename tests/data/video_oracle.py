"""Patches that transformers' video processors make of frames."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image


def video_patches(
    family: str, frames: Sequence[Image.Image], **options: Any
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """(patches float32 (t·h·w, C), grid in patches) of "qwen2_vl" or "qwen3_vl"."""
    name = {"qwen2_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[family]
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
