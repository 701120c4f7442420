"""Sizes of tiny checkpoints: about a million weights, and a layer of every kind that a family has.

What differs inside a published model differs here too: heads from groups, the scale of Gemma's
attention from its head size, its two rotary bases, windows from images. And no number is what
transformers or our settings have for it when nothing is said: an importer that overlooks it would
compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
_HEAD_SIZE = 32
_PATCH_2_5, _PATCH_3, _PATCH_GEMMA = 9, 10, 10  # pixels
_GEMMA_SIDE, _GEMMA_ROWS = 40, 4  # pixels of an image, and its rows


@dataclass(frozen=True)
class Family:
    """How a family's tiny checkpoint is made.

    config(vocab_size, ids of tokens by word, tied) makes the config of transformers.
    tied: whether the output layer is tied to the embedding; not what the family does by default.
    files: the JSON files of its processors, by name; none for a model of text alone.
    """

    config: Callable[[int, Mapping[str, int], bool], PreTrainedConfig]
    tied: bool
    files: Mapping[str, Mapping[str, Any]]


def _qwen_ids(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _qwen2_5_vl(vocab_size: int, ids: Mapping[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config={
            **_TEXT,
            "vocab_size": vocab_size,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 6, 6],
            },
        },
        # Windows of 2 x 2 rows, every second layer sees the whole image.
        vision_config={
            **_QWEN_VISION,
            "patch_size": _PATCH_2_5,
            "window_size": 6 * _PATCH_2_5,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 3,
        },
        tie_word_embeddings=tied,
        **_qwen_ids(ids),
    )


def _qwen3_vl(vocab_size: int, ids: Mapping[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(
        text_config={
            **_TEXT,
            "vocab_size": vocab_size,
            "head_dim": _HEAD_SIZE,
            "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            **_QWEN_VISION,
            "patch_size": _PATCH_3,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
        },
        tie_word_embeddings=tied,
        **_qwen_ids(ids),
    )


def _gemma3_sizes(vocab_size: int, ids: Mapping[str, int], tied: bool) -> dict[str, Any]:
    """Of the language model."""
    return {
        **_TEXT,
        "vocab_size": vocab_size,
        "head_dim": _HEAD_SIZE,
        "query_pre_attn_scalar": 40,
        # Shorter than an image, whose rows see each other all the same.
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 3_000.0},
            "full_attention": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 100_000.0,
            },
        },
        "pad_token_id": ids["<pad>"],
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<eos>"],
        "tie_word_embeddings": tied,
    }


def _gemma3(vocab_size: int, ids: Mapping[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Gemma3Config

    return Gemma3Config(
        text_config=_gemma3_sizes(vocab_size, ids, tied),
        vision_config={
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
        initializer_range=0.025,
        mm_tokens_per_image=_GEMMA_ROWS,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
        tie_word_embeddings=tied,
    )


def _qwen3(vocab_size: int, ids: Mapping[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(
        **_TEXT,
        vocab_size=vocab_size,
        head_dim=_HEAD_SIZE,
        eos_token_id=ids["<|im_end|>"],
        rope_parameters={"rope_type": "default", "rope_theta": 30_000.0},
        tie_word_embeddings=tied,
    )


def _qwen2(vocab_size: int, ids: Mapping[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Qwen2Config

    return Qwen2Config(
        **_TEXT,
        vocab_size=vocab_size,
        eos_token_id=ids["<|im_end|>"],
        rope_parameters={"rope_type": "default", "rope_theta": 30_000.0},
        tie_word_embeddings=tied,
    )


def _gemma3_text(vocab_size: int, ids: Mapping[str, int], tied: bool) -> PreTrainedConfig:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**_gemma3_sizes(vocab_size, ids, tied))


_PIXELS = {"image_mean": [0.45, 0.47, 0.43], "image_std": [0.3, 0.27, 0.33]}
_PATCHES = {"merge_size": 3, "temporal_patch_size": 3}
# From one row to four by four.
_ROW_2_5, _ROW_3 = (3 * _PATCH_2_5) ** 2, (3 * _PATCH_3) ** 2  # pixels
_SIZE_3 = {"shortest_edge": _ROW_3, "longest_edge": 16 * _ROW_3}

# Files beside the weights, with the keys that the published folders have.
_QWEN2_5_FILES: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": _PATCH_2_5,
        **_PATCHES,
        "min_pixels": _ROW_2_5,
        "max_pixels": 16 * _ROW_2_5,
        **_PIXELS,
    }
}
_QWEN3_FILES: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": _PATCH_3,
        **_PATCHES,
        "size": _SIZE_3,
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
}
_GEMMA3_FILES: dict[str, dict[str, Any]] = {
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
}

FAMILIES = {
    "qwen2_5_vl": Family(_qwen2_5_vl, tied=True, files=_QWEN2_5_FILES),
    "qwen3_vl": Family(_qwen3_vl, tied=True, files=_QWEN3_FILES),
    "gemma3": Family(_gemma3, tied=False, files=_GEMMA3_FILES),
    "qwen2": Family(_qwen2, tied=True, files={}),
    "qwen3": Family(_qwen3, tied=True, files={}),
    "gemma3_text": Family(_gemma3_text, tied=False, files={}),
}


_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "out_hidden_size",
)
_DEPTHS = ("num_hidden_layers", "depth")


def widened(config: PreTrainedConfig, width: int, num_layers: int | None) -> PreTrainedConfig:
    """The same architecture in a larger size: hidden sizes times ``width``.

    Heads of the language model become more, those of a Qwen tower wider. num_layers: of the
    language model and of the tower; None for as many as there are.
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
