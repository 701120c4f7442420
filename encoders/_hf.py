"""What the towers share in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from PIL import Image

from mimo.families.hf_config import Config, expect
from mimo.families.hf_preprocessing import Processors, check_agreement, normalisation, pixel_limits
from mimo.families.hf_rope import rope_settings
from mimo.families.keymap import Weight, plain


def both(ours: str, theirs: str, rows: int, *columns: int) -> Iterator[Weight]:
    """A linear's weight (rows, columns) and bias (rows,); without columns a norm's."""
    for kind in ("weight", "bias"):
        shape = (rows, *columns) if kind == "weight" else (rows,)
        yield plain(f"{ours}.{kind}", f"{theirs}.{kind}", *shape)


def block_norms(ours: str, theirs: str, names: Mapping[str, str], size: int) -> Iterator[Weight]:
    """The norms of a block. names: from theirs to ours."""
    for norm, own in names.items():
        yield from both(f"{ours}.{own}", f"{theirs}.{norm}", size)


def check_processor(processor: Config, resample: int, kind: str, name: str) -> None:
    """Raise ValueError unless a processor is of the right class and takes all our steps.

    resample: pillow's number for the interpolation. kind: "image" or "video". name: its class.
    """
    steps = ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize")
    values = {f"{kind}_processor_type": name, "resample": resample, "rescale_factor": 1 / 255}
    expect(
        processor,
        f"the {kind} processor's configuration",
        **values,
        **dict.fromkeys(steps, True),
    )


def qwen_tower_sizes(
    config: Config, processors: Processors, videos: Config, video_processor: str
) -> dict[str, Any]:
    """The settings that the towers of all Qwen-VL models share. Raises ValueError.

    videos: defaults of the family's video processor, for settings that its file leaves out.
    video_processor: its class.
    """
    vision = config["vision_config"]
    expect(vision, "vision_config", in_channels=3)
    expect(vision, "vision_config", out_hidden_size=config["text_config"]["hidden_size"])
    images = processors.image
    check_processor(images, Image.Resampling.BICUBIC, "image", "Qwen2VLImageProcessor")
    sizes = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
    }
    tokens = {key: config[key] for key in ("image_token_id", "video_token_id")}
    check_agreement(processors, **sizes, **tokens)
    return {
        "num_layers": vision["depth"],
        "hidden_size": vision["hidden_size"],
        "ffn_hidden_size": vision["intermediate_size"],
        "num_attention_heads": vision["num_heads"],
        **sizes,
        "rotary_base": _axial_base(vision),
        "init_std": vision["initializer_range"],
        **pixel_limits(images),
        **_video_limits(processors, videos, video_processor, sizes),
        **normalisation(images),
    }


def _axial_base(vision: Config) -> float:
    return rope_settings(vision["rope_parameters"], "vision_config.rope_parameters", "axial").base


def _video_limits(
    processors: Processors, defaults: Config, kind: str, sizes: Config
) -> dict[str, int]:
    """Pixel limits of videos; none if they equal those of images or no file gives any."""
    if not processors.video:
        return {}
    where = "the video processor's configuration"
    given = {key: value for key, value in processors.video.items() if value is not None}
    videos = {**defaults, **given}
    check_processor(videos, Image.Resampling.BICUBIC, "video", kind)
    expect(videos, where, cap_pixels_per_frame=False, **sizes)
    if processors.image:
        # Frames are cut and normalised as images are.
        expect(normalisation(videos), where, **normalisation(processors.image))
    if processors.share_a_file and pixel_limits(videos) == pixel_limits(processors.image):
        return {}  # a recipe that changes one then changes both, as in that file
    return pixel_limits(videos, prefix="video_")
