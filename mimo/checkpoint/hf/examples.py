"""Inputs for a tiny model of any image-text-to-text class, as its processor would give them.

Letters: L tokens of a sample, N rows, H width.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mimo.checkpoint.hf.shrink import FIRST_SPECIAL, MODALITIES, PATCH, PATCHES_A_SIDE

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Sample:
    """One sample: text with placeholders, and its items.

    input_ids: (L,) int64, placeholders included.
    items: by modality, the arguments of `get_<modality>_features` of
    each item, in the order of its placeholders, as the class's processor gives them for one item.
    The leading dimension is there: items of equal trailing shapes concatenate along dimension 0.
    """

    input_ids: Tensor
    items: dict[str, list[dict[str, Tensor]]]


def placeholder(config: PretrainedConfig, modality: str) -> int | None:
    """Return the id of a modality's placeholder in the text, or None."""
    for name in (f"{modality}_token_id", f"{modality}_token_index", f"{modality}_patch_id"):
        if isinstance(number := getattr(config, name, None), int):
            return number
    return None


def example_samples(whole: PreTrainedModel, seed: int = 0) -> list[Sample]:
    """Make three samples: two images, text alone, and one item of each modality.

    whole: a model with `get_<modality>_features`, as `build` returns it. Its towers run once
    per item, to count rows.
    """
    import torch

    config, base = whole.config, whole
    if hasattr(whole.base_model, "get_image_features"):
        base = whole.base_model
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(3, FIRST_SPECIAL - 50, (length,), generator=generator).tolist()

    def item(modality: str, number: int) -> tuple[list[int], dict[str, Tensor]]:
        features = getattr(base, f"get_{modality}_features")
        names = set(inspect.signature(features).parameters)
        if modality == "audio":
            arguments = _audio(config, names, generator)
        else:
            arguments = _visual(config, modality, names, number, generator)
        with torch.no_grad():
            output = features(**arguments, **({"return_dict": True} if "kwargs" in names else {}))
        rows = num_rows(features_of(output))
        before = [
            n for k in _STARTS if (n := getattr(config, k.format(modality), None)) is not None
        ]
        after = [n for k in _ENDS if (n := getattr(config, k.format(modality), None)) is not None]
        token: Any = placeholder(config, modality)
        if token is None or (modality == "video" and config.model_type in _IMAGE_TOKEN_IN_VIDEO):
            token = placeholder(config, "image")
        return [*before[:1], *[token] * rows, *after[:1]], arguments

    def sample(parts: list[str]) -> Sample:
        ids, items = text(4), {}
        for number, modality in enumerate(parts):
            tokens, arguments = item(modality, number)
            items.setdefault(modality, []).append(arguments)
            ids += tokens + text(3 + number)
        return Sample(torch.tensor(ids + text(3)), items)

    present = [m for m in MODALITIES if hasattr(base, f"get_{m}_features")]
    if config.model_type in _NO_VIDEO_BESIDE_IMAGES:
        present.remove("video")
    if getattr(config, "audio_config", None) is None and "audio" in present:
        present.remove("audio")
    visual = [m for m in present if m == "image"] or present[:1]
    return [sample(visual * 2), sample([]), sample(present)]


_STARTS = ("{}_start_token_id", "{}_bos_token_id", "vision_start_token_id", "image_start_token_id")
_ENDS = ("{}_end_token_id", "vision_end_token_id", "image_end_token_id")


_SQUARE_PATCHES = ("kimi_k25", "paddleocr_vl")  # their patches come as pictures
# These take all placeholders for images and for videos alike, so a batch may have only one kind.
# NemotronH's forward concatenates the video's features, which are one tensor, and fails.
_NO_VIDEO_BESIDE_IMAGES = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "molmo2", "nemotron_h_omni")
# These mark a video by the token at its end; its placeholders are those of images.
_IMAGE_TOKEN_IN_VIDEO = ("glm5_next",)


_BINS = ("num_mel_bins", "audio_embed_dim", "input_feat_size", "feature_size")


def features_of(output: Any) -> Any:
    """Return the features that the language half takes from `get_<modality>_features`.

    Llama 4 and Fuyu take `last_hidden_state`, the others `pooler_output`.
    """
    if getattr(output, "pooler_output", None) is not None:
        return output.pooler_output
    if getattr(output, "deepstack_features", None) is not None:  # Granite 4: (layer, features)
        return output.deepstack_features[0][1]
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output


def num_rows(features: Any) -> int:
    """Return the number of rows of a tower's output, in one tensor or in several."""
    if isinstance(features, (list, tuple)):
        return sum(num_rows(part) for part in features)
    return features.numel() // features.shape[-1]


def _visual(
    config: PretrainedConfig,
    modality: str,
    names: set[str],
    number: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Make the arguments of `get_image_features` or `get_video_features` of one item."""
    import torch

    vision = getattr(config, "vision_config", None) or config
    patch = getattr(vision, "patch_size", PATCH)
    patch = patch if isinstance(patch, int) else patch[0]
    side = getattr(vision, "image_size", None) or patch * PATCHES_A_SIDE
    height, width = (side, side) if isinstance(side, int) else side
    video = modality == "video"
    pixels = "pixel_values_videos" if "pixel_values_videos" in names else "pixel_values"

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def of(name: str) -> str | None:
        return name if name in names else None

    name = config.model_type
    patch_shape = (3, patch, patch) if name in _SQUARE_PATCHES else None
    if grid := of(f"{modality}_grid_thw"):
        t = getattr(vision, "temporal_merge_size", 1) if video else 1
        h = 2 * getattr(vision, "spatial_merge_size", 2)
        w = h * (1 + number % 2)
        if name == "inkling2":  # each row of the grid is a picture of its own
            side = vision.patch_size * vision.spatial_merge_size
            return {pixels: random(h * w, side, side, 3), grid: torch.tensor([[t, h, w]])}
        depth = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", 1)
        shape = patch_shape or (3 * depth * patch**2,)
        result = {pixels: random(t * h * w, *shape), grid: torch.tensor([[t, h, w]])}
        if video and name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"):
            result["video_second_per_grid"] = torch.tensor([1.0])  # the positions need it
        if sizes := of(f"{modality}_merge_sizes"):
            result[sizes] = torch.tensor([2])
        return result
    if "image_grid_hw" in names:
        h = 2 * getattr(vision, "spatial_merge_size", 2)
        w = h * (1 + number % 2)
        return {pixels: random(h * w, 3 * patch**2), "image_grid_hw": torch.tensor([[h, w]])}
    if positions := of(f"{modality}_position_ids"):
        pool = getattr(vision, "pooling_kernel_size", 1)
        if hasattr(vision, "model_patch_size"):  # pooled before they become patches
            patch, pool = vision.model_patch_size, 1
        h, w = 2 * pool, 2 * pool
        grid_xy = torch.stack([torch.arange(h * w) % w, torch.arange(h * w) // w], -1)
        frames = 2 if video else 1
        result = {
            pixels: random(frames, h * w, 3 * patch**2).sigmoid(),
            positions: grid_xy[None].repeat(frames, 1, 1),
        }
        if video:
            result["num_frames_per_video"] = torch.tensor([frames])
        return result
    if targets := of("target_sizes_videos" if video else "target_sizes"):
        h = 2 * getattr(vision, "spatial_merge_size", 2)
        w = h * (1 + number % 2)
        return {pixels: random(1, 3, patch, h * w * patch), targets: torch.tensor([[h, w]])}
    if "spatial_shapes" in names:
        h, w = PATCHES_A_SIDE, PATCHES_A_SIDE
        return {
            pixels: random(1, h * w, 3 * patch**2),
            "spatial_shapes": torch.tensor([[h, w]]),
            "pixel_attention_mask": torch.ones(1, h * w, dtype=torch.int64),
        }
    if "tile_fine_mask" in names:
        mask = torch.ones(1, 2, dtype=torch.bool)
        return {pixels: random(1, 2, 3, height, width), "pixel_attention_mask": mask}
    if "pixel_attention_mask" in names:
        return {
            pixels: random(1, 1, 3, height, width),
            "pixel_attention_mask": torch.ones(1, 1, height, width, dtype=torch.int64),
        }
    if "image_sizes" in names and getattr(config, "image_grid_pinpoints", None):
        # An overview and the two tiles of a picture twice as wide or twice as high as a tile.
        size = [[height, 2 * width], [2 * height, width]][number % 2]
        return {pixels: random(1, 3, 3, height, width), "image_sizes": torch.tensor([size])}
    if "image_sizes" in names and vision.model_type == "pixtral":
        width = 2 * width if number % 2 else width
        return {pixels: random(1, 3, height, width), "image_sizes": torch.tensor([[height, width]])}
    if "image_token_pooling" in names:
        # One crop; a row pools a square of four patches.
        crop, grid_side = torch.arange(PATCHES_A_SIDE**2), PATCHES_A_SIDE // 2
        squares = crop.view(grid_side, 2, grid_side, 2).transpose(1, 2).reshape(-1, 4)
        return {
            pixels: random(1, PATCHES_A_SIDE**2, 3 * patch**2),
            "image_token_pooling": squares,
            "image_grids": torch.tensor([[grid_side, grid_side, 0, 0]]),
        }
    if name == "inkling_mm_model":  # (tiles, 2, height, width, 3)
        return {pixels: random(2, 2, patch, patch, 3)}
    if name == "nemotron_h_omni":  # a video: its frames
        return {pixels: random(2, 3, height, width)}
    if name == "fuyu":
        return {pixels: random(1, PATCHES_A_SIDE, 3 * patch**2)}
    result = {pixels: random(1, *([2] if video else []), 3, height, width)}
    if high := of("high_res_pixel_values"):
        side = config.high_res_vision_config.image_size
        result[high] = random(1, 3, side, side)
    if of("qformer_input_ids"):
        result["qformer_input_ids"] = torch.randint(3, 500, (1, 4), generator=generator)
        result["qformer_attention_mask"] = torch.ones(1, 4, dtype=torch.int64)
    return result


def _audio(
    config: PretrainedConfig, names: set[str], generator: torch.Generator
) -> dict[str, Tensor]:
    """Make the arguments of `get_audio_features` of one item."""
    import torch

    audio = config.audio_config
    bins = next((n for k in _BINS if (n := getattr(audio, k, None))), 128)
    frames = 40
    if "audio_input_ids" in names:
        ids = torch.randint(0, audio.mel_vocab_size, (1, 4, audio.n_mel_bins), generator=generator)
        return {"audio_input_ids": ids, "audio_input_ids_mask": torch.ones(1, 4, dtype=torch.bool)}
    if "input_values" in names:
        length = 4 * audio.samples_per_token
        wave = torch.randn(1, length, generator=generator)
        return {"input_values": wave, "input_values_mask": torch.ones(1, length, dtype=torch.int64)}
    if "feature_attention_mask" in names:
        return {
            "input_features": torch.randn(1, bins, frames, generator=generator),
            "feature_attention_mask": torch.ones(1, frames, dtype=torch.int64),
        }
    return {
        "input_features": torch.randn(1, frames, bins, generator=generator),
        "input_features_mask": torch.ones(1, frames, dtype=torch.bool),
    }


def concatenate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate items as processors do for a batch: along dimension 0.

    Smaller items are padded, positions and indices with -1, others with 0. MiniCPM-V's patches are
    concatenated along the last dimension.
    """
    import torch
    from torch.nn.functional import pad

    batch: dict[str, Tensor] = {}
    for key in items[0]:
        tensors = [item[key] for item in items]
        if any(name.startswith("target_sizes") for name in items[0]) and key.startswith("pixel"):
            batch[key] = torch.cat(tensors, -1)
            continue
        largest = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
        fill = -1 if "position_ids" in key or "pooling" in key else 0
        padded = []
        for t in tensors:
            missing = [n for d in range(t.ndim - 1, 0, -1) for n in (0, largest[d] - t.shape[d])]
            padded.append(pad(t, missing, value=fill))
        batch[key] = torch.cat(padded)
    return batch
