"""Inputs for a tiny model of any image-text-to-text class, as its processor would give them.

Letters: L tokens of a sample.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from mimo.checkpoint.hf.shrink import FIRST_SPECIAL, PATCH, PATCHES_A_SIDE
from mimo.engines.fsdp.halves import MODALITIES, OutputForm, base_of, features


@dataclass(frozen=True)
class Sample:
    """One sample: text with placeholders, and its items.

    input_ids: (L,) int64, placeholders included.
    items: by modality, the arguments of `get_<modality>_features` of each item, in the order of its
    placeholders. Items of equal trailing shapes concatenate along dimension 0.
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
    config, base = whole.config, base_of(whole)
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(3, FIRST_SPECIAL - 50, (length,), generator=generator).tolist()

    def edge_token(modality: str, edge: str) -> list[int]:
        names = (f"{kind}_{edge}_token_id" for kind in (modality, "vision"))
        return [token for name in names if (token := getattr(config, name, None))][:1]

    def item(modality: str, number: int) -> tuple[list[int], dict[str, Tensor]]:
        names = set(inspect.signature(getattr(base, f"get_{modality}_features")).parameters)
        shapes = _audio if modality == "audio" else _visual
        arguments = {
            name: torch.randn(value, generator=generator).sigmoid()
            if isinstance(value, tuple)
            else value
            for name, value in shapes(config, modality, names, number).items()
        }
        token: Any = placeholder(config, modality) or placeholder(config, "image")
        before, after = (edge_token(modality, edge) for edge in ("start", "end"))
        rows = [token] * count_rows(whole, modality, arguments)
        return [*before, *rows, *after], arguments

    def sample(parts: list[str]) -> Sample:
        ids, items = text(4), {}
        for number, modality in enumerate(parts):
            tokens, arguments = item(modality, number)
            items.setdefault(modality, []).append(arguments)
            ids += tokens + text(3 + number)
        return Sample(torch.tensor(ids + text(3)), items)

    present = [m for m in MODALITIES if hasattr(base, f"get_{m}_features")]
    if getattr(config, "audio_config", None) is None and "audio" in present:
        present.remove("audio")
    visual = [m for m in present if m == "image"] or present[:1]
    return [sample(visual * 2), sample([]), sample(present)]


def count_rows(whole: PreTrainedModel, modality: str, arguments: Mapping[str, Any]) -> int:
    """Return the number of embeddings that the tower gives for items of a modality."""
    with torch.no_grad():
        output = features(whole, modality, arguments)
    if getattr(output, "pooler_output", None) is None and hasattr(output, "deepstack_features"):
        (_, embeddings), *_ = output.deepstack_features  # Granite 4: (layer, features)
        output = SimpleNamespace(pooler_output=embeddings)
    return len(OutputForm.of(output).rows(output))


_Arguments = dict[str, Tensor | tuple[int, ...]]
_SQUARE_PATCHES = ("kimi_k25", "paddleocr_vl")  # their patches come as pictures


def _visual(config: PretrainedConfig, modality: str, names: set[str], number: int) -> _Arguments:
    """Return the arguments of `get_image_features` or `get_video_features` of one item.

    A tuple is the shape of random numbers. number: of the item, for images of different sizes.
    """
    vision = getattr(config, "vision_config", None) or config
    patch = getattr(vision, "patch_size", PATCH)
    patch = patch if isinstance(patch, int) else patch[0]
    side = getattr(vision, "image_size", None) or patch * PATCHES_A_SIDE
    height, width = (side, side) if isinstance(side, int) else side
    h = 2 * getattr(vision, "spatial_merge_size", 2)
    w = h * (1 + number % 2)
    is_video, flat = modality == "video", 3 * patch**2
    frames = (2,) if is_video else ()
    shape: tuple[int, ...] = (1, *frames, 3, height, width)
    others: _Arguments = {}

    if f"{modality}_grid_thw" in names:
        t = getattr(vision, "temporal_merge_size", 1) if is_video else 1
        depth = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", 1)
        is_square = config.model_type in _SQUARE_PATCHES
        shape = (t * h * w, *((3, patch, patch) if is_square else (depth * flat,)))
        others = {f"{modality}_grid_thw": torch.tensor([[t, h, w]])}
        if f"{modality}_merge_sizes" in names:
            others[f"{modality}_merge_sizes"] = torch.tensor([2])
        if is_video and hasattr(config, "position_id_per_seconds"):
            others["video_second_per_grid"] = torch.tensor([1.0])  # the positions need it
    elif "image_grid_hw" in names:
        shape, others = (h * w, flat), {"image_grid_hw": torch.tensor([[h, w]])}
    elif f"{modality}_position_ids" in names:
        pool = getattr(vision, "pooling_kernel_size", 1)
        if hasattr(vision, "model_patch_size"):  # pooled before they become patches
            flat, pool = 3 * vision.model_patch_size**2, 1
        grid = torch.cartesian_prod(torch.arange(2 * pool), torch.arange(2 * pool)).flip(-1)
        shape = (*(frames or (1,)), len(grid), flat)
        others = {f"{modality}_position_ids": grid.expand(shape[0], -1, -1)}
        if is_video:
            others["num_frames_per_video"] = torch.tensor([shape[0]])
    elif (targets := "target_sizes_videos" if is_video else "target_sizes") in names:
        shape, others = (1, 3, patch, h * w * patch), {targets: torch.tensor([[h, w]])}
    elif "spatial_shapes" in names:
        shape = (1, PATCHES_A_SIDE**2, flat)
        others["spatial_shapes"] = torch.tensor([[PATCHES_A_SIDE, PATCHES_A_SIDE]])
        others["pixel_attention_mask"] = torch.ones(1, shape[1], dtype=torch.int64)
    elif "tile_fine_mask" in names:
        shape = (1, 2, 3, height, width)
        others["pixel_attention_mask"] = torch.ones(1, 2, dtype=torch.bool)
    elif "pixel_attention_mask" in names:
        shape = (1, 1, 3, height, width)
        others["pixel_attention_mask"] = torch.ones(1, 1, height, width, dtype=torch.int64)
    elif "image_sizes" in names and getattr(config, "image_grid_pinpoints", None):
        # An overview and the two tiles of a picture twice as wide or twice as high as a tile.
        size = [[height, 2 * width], [2 * height, width]][number % 2]
        shape, others = (1, 3, 3, height, width), {"image_sizes": torch.tensor([size])}
    elif "image_sizes" in names and vision.model_type == "pixtral":
        shape = (1, 3, height, width * (1 + number % 2))
        others["image_sizes"] = torch.tensor([shape[2:]])
    elif config.model_type == "fuyu":
        shape = (1, PATCHES_A_SIDE, flat)
    elif "high_res_pixel_values" in names:
        side = config.high_res_vision_config.image_size
        others["high_res_pixel_values"] = (1, 3, side, side)
    pixels = "pixel_values_videos" if "pixel_values_videos" in names else "pixel_values"
    return {pixels: shape} | others


def _audio(config: PretrainedConfig, modality: str, names: set[str], number: int) -> _Arguments:
    """Return the arguments of `get_audio_features` of one item; tuples as in `_visual`."""
    audio, frames = config.audio_config, 40
    keys = ("num_mel_bins", "audio_embed_dim", "input_feat_size", "feature_size")
    bins = next((n for key in keys if (n := getattr(audio, key, None))), 128)
    if "input_values" in names:
        shape = (1, 4 * audio.samples_per_token)
        mask = torch.ones(shape, dtype=torch.int64)
        return {"input_values": shape, "input_values_mask": mask}
    if "feature_attention_mask" in names:
        mask = torch.ones(1, frames, dtype=torch.int64)
        return {"input_features": (1, bins, frames), "feature_attention_mask": mask}
    mask = torch.ones(1, frames, dtype=torch.bool)
    return {"input_features": (1, frames, bins), "input_features_mask": mask}


def concatenate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate items as processors do for a batch: along dimension 0.

    Smaller items are padded, positions with -1, others with 0. MiniCPM-V's patches are
    concatenated along the last dimension.
    """
    batch: dict[str, Tensor] = {}
    for key in items[0]:
        tensors = [item[key] for item in items]
        if any(name.startswith("target_sizes") for name in items[0]) and key.startswith("pixel"):
            batch[key] = torch.cat(tensors, -1)
            continue
        largest = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
        fill = -1 if "position_ids" in key else 0
        padded = []
        for t in tensors:
            missing = [n for d in range(t.ndim - 1, 0, -1) for n in (0, largest[d] - t.shape[d])]
            padded.append(pad(t, missing, value=fill))
        batch[key] = torch.cat(padded)
    return batch
