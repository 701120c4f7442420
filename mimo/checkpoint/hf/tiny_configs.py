"""Sizes of tiny checkpoints: about a million weights, and every kind of layer of a family.

Sizes that differ inside a published model differ here too, such as heads and groups. No number is
the default of transformers or of our settings, so that a test fails if an importer overlooks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_HIDDEN = 128
_TEXT: dict[str, Any] = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 3e-4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.03,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_heads": 4,
    "spatial_merge_size": 3,
    "temporal_patch_size": 3,
    "out_hidden_size": _HIDDEN,
    "initializer_range": 0.03,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0},
}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_QWEN_TEXT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 30_000.0}}
_QWEN_END = {"eos_token_id": "<|im_end|>"}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_HEAD = {"head_dim": 32}
_GEMMA_TEXT: dict[str, Any] = {
    **_HEAD,
    "query_pre_attn_scalar": 40,
    # Shorter than an image, whose rows attend to each other all the same.
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 3_000.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100_000.0},
    },
}
_GEMMA_TEXT_IDS = {"pad_token_id": "<pad>", "bos_token_id": "<bos>", "eos_token_id": "<eos>"}
_PATCH_2_5, _PATCH_3, _PATCH_GEMMA = 9, 10, 10  # pixels
_GEMMA_SIDE, _GEMMA_ROWS = 40, 4  # pixels of an image, and its rows

_PIXELS = {"image_mean": [0.45, 0.47, 0.43], "image_std": [0.3, 0.27, 0.33]}
_PATCHES = {"merge_size": 3, "temporal_patch_size": 3}
# From one row to four by four.
_ROW_2_5, _ROW_3 = (3 * _PATCH_2_5) ** 2, (3 * _PATCH_3) ** 2  # pixels


@dataclass(frozen=True)
class Family:
    """The configuration of a family's tiny checkpoint.

    tied: whether the output layer is tied to the embedding; not the family's default.
    text, vision: transformers' configuration of the language model, beside `_TEXT`, and of the
    tower, if any. whole: of both. text_ids, ids: keys of the language model and of the whole whose
    values are ids of these tokens. files: the JSON files of its processors, by name.
    """

    tied: bool
    text: Mapping[str, Any]
    text_ids: Mapping[str, str]
    vision: Mapping[str, Any] | None = None
    whole: Mapping[str, Any] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


FAMILIES = {
    "qwen2_5_vl": Family(
        tied=True,
        text={
            "bos_token_id": None,
            "rope_parameters": {**_QWEN_ROPE, "mrope_section": [4, 6, 6]},
        },
        text_ids=_QWEN_END,
        # Windows of 2 x 2 rows, every second layer sees the whole image.
        vision={
            **_QWEN_VISION,
            "patch_size": _PATCH_2_5,
            "window_size": 6 * _PATCH_2_5,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 3,
        },
        ids=_QWEN_IDS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessor",
                "processor_class": "Qwen2_5_VLProcessor",
                "patch_size": _PATCH_2_5,
                **_PATCHES,
                "min_pixels": _ROW_2_5,
                "max_pixels": 16 * _ROW_2_5,
                **_PIXELS,
            }
        },
    ),
    "qwen3_vl": Family(
        tied=True,
        text={
            **_HEAD,
            "rope_parameters": {
                **_QWEN_ROPE,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
        },
        text_ids=_QWEN_END,
        vision={
            **_QWEN_VISION,
            "patch_size": _PATCH_3,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
        },
        ids=_QWEN_IDS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessorFast",
                "processor_class": "Qwen3VLProcessor",
                "patch_size": _PATCH_3,
                **_PATCHES,
                "size": {"shortest_edge": _ROW_3, "longest_edge": 16 * _ROW_3},
                **_PIXELS,
            },
            "video_preprocessor_config.json": {
                "video_processor_type": "Qwen3VLVideoProcessor",
                "processor_class": "Qwen3VLProcessor",
                "patch_size": _PATCH_3,
                **_PATCHES,
                "size": {"shortest_edge": _ROW_3, "longest_edge": 64 * _ROW_3},
                **_PIXELS,
            },
        },
    ),
    "gemma3": Family(
        tied=False,
        text=_GEMMA_TEXT,
        text_ids=_GEMMA_TEXT_IDS,
        vision={
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": _GEMMA_SIDE,
            "patch_size": _PATCH_GEMMA,
            "layer_norm_eps": 2e-4,
            "vision_use_head": False,
        },
        whole={"initializer_range": 0.025, "mm_tokens_per_image": _GEMMA_ROWS},
        ids={
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Gemma3ImageProcessor",
                "processor_class": "Gemma3Processor",
                "do_convert_rgb": None,
                "do_normalize": True,
                "do_pan_and_scan": None,
                "do_rescale": True,
                "do_resize": True,
                **_PIXELS,
                "image_seq_length": _GEMMA_ROWS,
                "pan_and_scan_max_num_crops": None,
                "pan_and_scan_min_crop_size": None,
                "pan_and_scan_min_ratio_to_activate": None,
                "resample": 2,
                "rescale_factor": 1 / 255,
                "size": {"height": _GEMMA_SIDE, "width": _GEMMA_SIDE},
            },
            "processor_config.json": {
                "image_seq_length": _GEMMA_ROWS,
                "processor_class": "Gemma3Processor",
            },
        },
    ),
    "qwen2": Family(tied=True, text=_QWEN_TEXT_ROPE, text_ids=_QWEN_END),
    "qwen3": Family(tied=True, text={**_QWEN_TEXT_ROPE, **_HEAD}, text_ids=_QWEN_END),
    "llama": Family(tied=False, text={**_QWEN_TEXT_ROPE, **_HEAD}, text_ids=_QWEN_END),
    "gemma3_text": Family(tied=False, text=_GEMMA_TEXT, text_ids=_GEMMA_TEXT_IDS),
}


def tiny_config(
    family: str, vocab_size: int, token_ids: Mapping[str, int], tied: bool
) -> PreTrainedConfig:
    """Return the configuration of transformers. token_ids: by token."""
    from transformers import AutoConfig

    sizes = FAMILIES[family]
    text = {**_TEXT, "vocab_size": vocab_size, **sizes.text}
    if sizes.vision is None or family == "gemma3":  # the others have the key in the whole alone
        text["tie_word_embeddings"] = tied
    text |= {key: token_ids[token] for key, token in sizes.text_ids.items()}
    if sizes.vision is None:
        return AutoConfig.for_model(family, **text)
    ids = {key: token_ids[token] for key, token in sizes.ids.items()}
    parts = {"text_config": text, "vision_config": dict(sizes.vision)}
    return AutoConfig.for_model(family, **parts, **sizes.whole, **ids, tie_word_embeddings=tied)


_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "out_hidden_size",
)
_DEPTHS = ("num_hidden_layers", "depth")


def widened(config: PreTrainedConfig, width: int, num_layers: int | None) -> PreTrainedConfig:
    """Return the same architecture with hidden sizes times ``width``.

    The language model gets more heads, a Qwen tower wider ones. num_layers: of the language model
    and of the tower; None keeps their numbers.
    """
    sizes = config.to_dict()
    for part in (sizes.get("text_config", sizes), sizes.get("vision_config", {})):
        for key in _WIDTHS:
            if key in part:
                part[key] *= width
        for key in _DEPTHS:
            if key in part and num_layers is not None:
                part[key] = num_layers
        if num_layers is not None and part.get("layer_types"):
            kinds = part["layer_types"]
            part["layer_types"] = [kinds[layer % len(kinds)] for layer in range(num_layers)]
    return type(config).from_dict(sizes)
