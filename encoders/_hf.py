"""What the towers share in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from PIL import Image

from mimo.hf.config import Config, Processors, expect, pixel_limits
from mimo.hf.keymap import Weight, plain


def both(ours: str, theirs: str, rows: int, *columns: int) -> Iterator[Weight]:
    """A linear's weight (rows, columns) and bias (rows,); without columns a norm's."""
    for kind in ("weight", "bias"):
        shape = (rows, *columns) if kind == "weight" else (rows,)
        yield plain(f"{ours}.{kind}", f"{theirs}.{kind}", *shape)


def block_norms(ours: str, theirs: str, names: Mapping[str, str], size: int) -> Iterator[Weight]:
    """The norms of a block. names: ours by theirs."""
    for norm, own in names.items():
        yield from both(f"{ours}.{own}", f"{theirs}.{norm}", size)


def check_processor(processor: Config, resample: int, kind: str = "image") -> None:
    """Raise ValueError for a processor that leaves out a step of ours.

    resample: pillow's number of the interpolation. kind: of processor.
    """
    steps = ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize")
    where = f"the {kind} processor's configuration"
    expect(
        processor, where, resample=resample, rescale_factor=1 / 255, **dict.fromkeys(steps, True)
    )


def qwen_tower_sizes(config: Config, processors: Processors) -> dict[str, Any]:
    """The settings that the towers of all Qwen-VL models have. Raises ValueError."""
    vision = config["vision_config"]
    expect(vision, "vision_config", in_channels=3)
    expect(vision, "vision_config", out_hidden_size=config["text_config"]["hidden_size"])
    images, videos = processors.image, processors.video
    check_processor(images, Image.Resampling.BICUBIC)
    check_processor(videos, Image.Resampling.BICUBIC, "video")
    # Frames are cut and normalised as images are.
    same = ("image_mean", "image_std", "patch_size", "merge_size", "temporal_patch_size")
    expect(
        videos,
        "the video processor's configuration",
        cap_pixels_per_frame=False,
        **{key: images[key] for key in same if images.get(key) is not None},
    )
    return {
        "num_layers": vision["depth"],
        "hidden_size": vision["hidden_size"],
        "ffn_hidden_size": vision["intermediate_size"],
        "num_attention_heads": vision["num_heads"],
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "rotary_base": float(vision["rope_parameters"]["rope_theta"]),
        "init_std": vision["initializer_range"],
        **pixel_limits(processors.image),
        **pixel_limits(processors.video, prefix="video_"),
        **normalisation(processors.image),
    }


def normalisation(processor: Config) -> dict[str, list[float]]:
    """Means and deviations of the channels, as far as the processor's file says them."""
    keys = ("image_mean", "image_std")
    return {key: list(processor[key]) for key in keys if processor.get(key)}
