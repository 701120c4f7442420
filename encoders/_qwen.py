"""Settings, merger and checkpoints that the towers of all Qwen-VL models share.

Letters: P patches of all images, C = 3·temporal·patch² numbers per patch, D tower hidden,
M = merge² patches per row, N = P/M rows, H language hidden.
"""

from __future__ import annotations

from typing import Any, ClassVar

from PIL import Image
from torch import Tensor

from data.modalities.images import ImageProcessor
from data.modalities.videos import VIDEO
from encoders._patches import PackedPatches, PatchRope, PatchSettings, PatchTower, check_processor
from encoders._tower import row_mlp
from mimo.config.bounds import Patches, Pixels, RotaryBase
from mimo.engines import megatron as engine
from mimo.families.hf_config import (
    Config,
    Processors,
    check_agreement,
    expect,
    normalisation,
    pixel_limits,
    rope_settings,
)

ROOT = "model.visual"
"""Prefix of the names of the tower's weights in checkpoints."""


class QwenSettings(PatchSettings):
    """Recipe keys of all Qwen-VL towers. Sizes are numbers of elements or pixels."""

    changeable_keys: ClassVar = PatchSettings.changeable_keys | {
        *("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels")
    }

    merge_size: Patches = 2
    """Patches along each side that become one embedding."""
    temporal_patch_size: Patches = 2
    """Frames that become one patch."""
    min_pixels: Pixels
    """Smaller images are enlarged to this many pixels."""
    max_pixels: Pixels
    """Larger images are shrunk to this many pixels."""
    rotary_base: RotaryBase = 10_000.0
    """Base of rotary positions."""

    def _check_sizes(self) -> None:
        if self.hidden_size % (4 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of 4 · num_attention_heads, "
                f"{4 * self.num_attention_heads}: rows and columns rotate half of each head's "
                f"channels, in pairs"
            )
        for modality in ("image", VIDEO):
            self.processor(modality)

    def check_layers(self, key: str, layers: tuple[int, ...]) -> None:
        """Raise ValueError unless these are ascending numbers of layers. key: the recipe's."""
        if list(layers) != sorted({*layers} & {*range(self.num_layers)}):
            raise ValueError(
                f"{key} {list(layers)} must be ascending layers between 0 and num_layers - 1, "
                f"which is {self.num_layers - 1}"
            )

    @property
    def patch_dim(self) -> int:
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """M·D, the size of the hidden states of a row."""
        return self.hidden_size * self.merge_size**2

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        patch_size = min(self.patch_size, 4)
        row = (patch_size * self.merge_size) ** 2  # pixels
        return super()._scaled_sizes(chunks, tp) | {
            "patch_size": patch_size,
            "min_pixels": row,
            "max_pixels": 16 * row,
            "video_min_pixels": None,
            "video_max_pixels": None,
        }

    def _images(self, tower_width: int) -> ImageProcessor:
        return ImageProcessor(
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=self.temporal_patch_size,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            mean=self.image_mean,
            std=self.image_std,
            tower_width=tower_width,
            jpeg_draft=self.jpeg_draft,
        )


class QwenTower(PatchTower):
    """Patches of many images -> rows of the language model's size. options: of `PatchTower`."""

    def __init__(
        self, settings: QwenSettings, ctx: engine.ModuleContext, output_size: int, **options: Any
    ) -> None:
        super().__init__(settings, ctx, settings.merge_size, settings.patch_dim, **options)
        self.merged = settings.merged_size
        # Its norm is the final norm of the stack.
        self.merger = None
        if ctx.is_last_stage:
            self.merger = row_mlp(self.config, ctx, self.merged, output_size)
        head_size = settings.hidden_size // settings.num_attention_heads
        self.rope = PatchRope(head_size, settings.rotary_base)

    def stack_inputs(self, packed: PackedPatches) -> dict[str, Any]:
        return {**super().stack_inputs(packed), "rotary_pos_emb": self.rope(packed.places)}

    def project(self, hidden: list[Tensor], packed: PackedPatches) -> Tensor:
        """Merge hidden states (P', 1, D) to rows (N', H)."""
        assert self.merger is not None, "the last stage projects"
        return self.merger(hidden[0].reshape(-1, self.merged))


def settings_of_all(
    config: Config, processors: Processors, video_processor: str, video_size: Config
) -> dict[str, Any]:
    """Return the settings that the towers of all Qwen-VL models share. Raises ValueError.

    video_processor: the class of the family's video processor. video_size: its default.
    """
    vision, width = config["vision_config"], config["text_config"]["hidden_size"]
    expect(vision, "vision_config", in_channels=3, out_hidden_size=width)
    images = processors.image
    check_processor(images, Image.Resampling.BICUBIC, "image", "Qwen2VLImageProcessor")
    sizes = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
    }
    tokens = {key: config[key] for key in ("image_token_id", "video_token_id")}
    check_agreement(processors, **sizes, **tokens)
    base, _ = rope_settings(vision["rope_parameters"], "vision_config.rope_parameters", "axial")
    return {
        "num_layers": vision["depth"],
        "hidden_size": vision["hidden_size"],
        "ffn_hidden_size": vision["intermediate_size"],
        "num_attention_heads": vision["num_heads"],
        **sizes,
        "rotary_base": base,
        "init_std": vision["initializer_range"],
        **pixel_limits(images),
        **_video_limits(processors, video_processor, video_size, sizes),
        **normalisation(images),
    }


def _video_limits(
    processors: Processors, kind: str, default_size: Config, sizes: Config
) -> dict[str, int]:
    """Return pixel limits of videos; none if they equal those of images or no file gives any."""
    if not processors.video:
        return {}
    where, videos = "the video processor's configuration", processors.video
    if videos.get("size") is None:
        videos = {**videos, "size": default_size}
    check_processor(videos, Image.Resampling.BICUBIC, "video", kind)
    expect(videos, where, cap_pixels_per_frame=False, **sizes)
    if processors.image:
        # Frames are cut and normalised as images are.
        expect(normalisation(videos), where, **normalisation(processors.image))
    share_a_file = processors.video is processors.files.get("preprocessor_config.json")
    if share_a_file and pixel_limits(videos) == pixel_limits(processors.image):
        return {}  # a recipe that changes one then changes both, as in that file
    return pixel_limits(videos, prefix="video_")
