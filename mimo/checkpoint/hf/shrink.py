"""Make a tiny random copy of any image-text-to-text class of transformers.

The copy has one layer of each kind that the original has, in the same order. Sizes are chosen by
the names of keys, which the classes share; `_EXCEPTIONS` has what a few classes need beyond that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

MODALITIES = ("image", "video", "audio")
VOCABULARY = 640
FIRST_SPECIAL = 560
_WIDTH, _HEAD, _TEXT_HEAD = 64, 16, 32
PATCH, PATCHES_A_SIDE = 4, 4
_MAX_LAYERS = 6

# Sizes by key: the first pattern that matches the whole key applies.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?", VOCABULARY),
    (
        r"(moe|shared_expert|moe_shared_expert|shared_experts)_intermediate_size|share_expert_dim",
        32,
    ),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size)(_mlp)?|mlp_dim|d_ff", 96),
    (r".*hidden_size|embed_dim|d_model|output_dim|projection_dim|word_embed_proj_dim", _WIDTH),
    (r"projector_(in|out)put_dim|vision_output_dim|image_token_embed_dim", _WIDTH),
    (r"hidden_size_per_layer_input", 16),
    (r"(.*_)?(num_|n_)?(attention_)?heads|num_sliding_attention_heads|index(er)?_n_heads", 4),
    (r"(qk_nope|v|index|indexer|linear(_key|_value)?|mamba)_head_dim|d_kv", _HEAD),
    (r"qk_rope_head_dim", 8),
    (r"linear_num_key_heads", 2),
    (r"kv_lora_rank|q_lora_rank|laurel_rank|hc_lowrank", 16),
    (r"(moe_)?num_(local_)?experts|n_routed_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|top_k_experts", 2),
    (r"n_group|topk_group", 1),
    (r"patch_size", PATCH),
    (r"(force_)?image_size", PATCH * PATCHES_A_SIDE),
    (r"num_position_embeddings|num_patches", PATCHES_A_SIDE**2),
    (r"sliding_window(_size)?|attention_chunk_size", 8),
    (r"max_position_embeddings|original_max_position_embeddings", 256),
    (r"mm_tokens_per_image", PATCHES_A_SIDE**2 // 4),
    (r"downsample_channels|output_channels", _WIDTH),
    (r"pos_emb_height|pos_emb_width", PATCHES_A_SIDE * 2),
    (r"mm_posemb_size|position_embedding_size|adapter_(in|out)_dim", _WIDTH),
    (r"adapter_input_size|num_embeddings", _WIDTH),
    (r"base_channels", 32),
    (r"index_topk|index_block_size", 4),
    (r"index_topk_blocks|index_kpool", 2),
)
_DEPTHS = (
    *("num_hidden_layers", "depth", "num_layers", "encoder_layers", "decoder_layers", "layers"),
    *("n_layers", "conf_num_hidden_layers", "resampler_depth", "num_decoder_layers"),
)
# Lists of numbers of layers, and single numbers of layers.
_LAYER_INDICES = re.compile(
    r"moe_layers|full_attn_idxs|rope_scaling_layers|fullatt_block_indexes|global_attn_indexes"
    r"|deepstack_visual_indexes|cross_attention_layers|intermediate_layers_indices|ple_layer_ids"
    r"|local_layer_ids|mlp_only_layers|insert_layer_id"
)
_TOKEN = re.compile(
    r".*_token_(id|ids|index)|(im|image|slice)_(start|end|newline|patch)_id|newline_id|eod_token_id"
)
_PLACEHOLDER = re.compile(rf"({'|'.join(MODALITIES)})_token_(id|index)")
_LAYER_COUNTS = ("first_k_dense_replace", "num_kv_shared_layers")

# Values of published configurations that the class's default lacks, by `model_type` of the
# configuration or of a part. Sizes are shrunk like all others.
_MISSING: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"mrope_section": [16, 24, 24]},
    "qwen2_5_vl_text": {"mrope_section": [16, 24, 24]},
    "qwen2_5_omni_text": {"mrope_section": [16, 24, 24]},
    "qwen3_vl_text": {"mrope_section": [24, 20, 20]},
    "qwen3_vl_moe_text": {"mrope_section": [24, 20, 20]},
    "qwen3_omni_moe_text": {"mrope_section": [24, 20, 20]},
    "qwen3_5_text": {"mrope_section": [11, 11, 10]},
    "qwen3_5_moe_text": {"mrope_section": [11, 11, 10]},
    "ernie4_5_vl_moe_text": {"mrope_section": [22, 22, 20]},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652, "vision_end_token_id": 151653},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652, "vision_end_token_id": 151653},
    "paddleocr_vl_text": {"mrope_section": [16, 24, 24]},
    "glm4v_text": {"mrope_section": [8, 12, 12]},
    "glm4v_moe_text": {"mrope_section": [8, 12, 12]},
    "glm_ocr_text": {"mrope_section": [8, 12, 12]},
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    "step3p5": {"sliding_window": 512},
    "hunyuan_vl_text": {"head_dim": 128, "mrope_section": [16, 16, 16, 16]},
    "deepseek_ocr2_text": {
        **{"mlp_layer_types": ["dense", *["sparse"] * 11], "num_experts_per_tok": 6},
    },
    "granite4_vision": {"downsample_rate": "2/4"},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 16, "indexer_kv_heads": 2, "indexer_head_dim": 128},
        **{"indexer_budget": 8, "indexer_compress_ratio": 2},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
}
# Small values that the rules do not give, by `model_type`.
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "aria": {
        "projector_patch_to_query_dict": {16: 4},
        "max_value_projector_patch_to_query_dict": 4,
    },
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0], [-2, 1]],
        "spatial_target_layers": [0, 0, 1, 1],
    },
    "qwen4_exp_text": {"indexer_kv_heads": 1, "indexer_head_dim": _TEXT_HEAD},
    # Height and width have equal sections.
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]}
    },
    # The tower reads the number in the whole configuration, too.
    **{key: {"insert_layer_id": 1} for key in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")},
    "dots3_note_text": {"head_dim": 24},  # dimensions with and without rotation
    "muse_glimmer": {"out_hidden_size": _WIDTH * 4},
    "muse_spark": {"out_hidden_size": _WIDTH * 4},
    "llama4_vision_model": {"intermediate_size": _WIDTH * 4},  # what pixel_shuffle leaves
}


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration of the same class and kinds of layers, small enough for one core."""
    original = _complete(config)
    ids: dict[int, int] = {}
    for number in sorted(set(_token_ids(original))):
        ids[number] = FIRST_SPECIAL + len(ids)
    small = _shrink(original, ids)
    for key in ("model_type", "transformers_version", "architectures"):
        small.pop(key, None)
    return type(config)(**small)


# Keys that the number of an item's embeddings depends on.
_GEOMETRY = re.compile(
    r"patch_size|(force_)?image_size|num_position_embeddings|num_patches|mm_tokens_per_image"
    r"|pos_emb_(height|width)|image_grid_pinpoints|(max_value_)?projector_patch_to_query_dict"
)


def narrow(config: PretrainedConfig) -> PretrainedConfig:
    """Return a small configuration whose towers return as many embeddings for each item."""
    small = shrink(config)
    _restore_geometry(small, config)
    return small


def _restore_geometry(small: PretrainedConfig, original: PretrainedConfig) -> None:
    for key, value in vars(original).items():
        if hasattr(value, "to_dict"):  # a part
            _restore_geometry(getattr(small, key), value)
        elif _GEOMETRY.fullmatch(key) and value is not None:
            setattr(small, key, value)


def _complete(config: PretrainedConfig) -> dict[str, Any]:
    """Return a configuration as a dict, with the values of `_MISSING`."""
    values = config.to_dict()
    parts = config.sub_configs
    if values.get("vision_config", 0) is None:  # no tower at all: take all that the class has
        values |= {k: part().to_dict() for k, part in parts.items() if values.get(k) is None}

    def complete(part: dict[str, Any]) -> None:
        for key, value in _MISSING.get(part.get("model_type") or "", {}).items():
            if key == "mrope_section":
                part["rope_parameters"].setdefault(key, list(value))
            elif part.get(key) is None or (
                key == "rope_parameters" and "full_attention" not in part[key]
            ):
                part[key] = value
        for key, value in part.items():
            if isinstance(value, dict) and key.endswith("_config"):
                complete(value)

    complete(values)
    return values


def _token_ids(values: dict[str, Any]) -> Iterator[int]:
    """Yield the ids of special tokens in a configuration and its parts."""
    for key, value in values.items():
        if isinstance(value, dict) and key.endswith("_config"):
            yield from _token_ids(value)
        elif _TOKEN.fullmatch(key):
            for number in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(number, int) and number >= 0:
                    yield number


def _shrink(values: dict[str, Any], ids: dict[int, int]) -> dict[str, Any]:
    """Shrink one configuration, or one part, with `ids` from old special tokens to new ones."""
    exceptions = _EXCEPTIONS.get(values.get("model_type") or "", {})
    kept = _kept_layers(values)
    small: dict[str, Any] = {}
    for key, value in values.items():
        if key in exceptions:
            small[key] = exceptions[key]
        elif key == "per_layer_config" and value:
            overrides = {int(layer): v for layer, v in value.items()}
            small[key] = {
                new: {
                    k: 2 * _TEXT_HEAD if k == "head_dim" else _size(k, v) for k, v in part.items()
                }
                for new, old in enumerate(kept)
                if (part := overrides.get(old))
            }
        elif isinstance(value, dict) and key.endswith("_config"):
            small[key] = _shrink(value, ids)
        elif _TOKEN.fullmatch(key):
            small[key] = _small_id(key, value, ids)
        elif kept and key in _DEPTHS and isinstance(value, int):
            small[key] = len(kept)
        elif kept and key in _LAYER_COUNTS and value is not None:
            count = cast("int", value)
            bound = count if key == "first_k_dense_replace" else _depth(values) - count
            small[key] = sum((i < bound) == (key == "first_k_dense_replace") for i in kept)
        elif kept and _LAYER_INDICES.fullmatch(key) and value is not None:
            small[key] = (
                kept.index(value)
                if isinstance(value, int)
                else [new for new, old in enumerate(kept) if old in value]
            )
        elif key == "vision_feature_layer" and value is not None:
            layers = [value] if isinstance(value, int) else value
            layers = [min(max(layer, -2), 1) for layer in layers]
            small[key] = layers[0] if isinstance(value, int) else layers
        elif kept and key == "kv_source_layers":
            sources = cast("list[int]", value)
            small[key] = [
                kept.index(sources[i]) if sources[i] in kept else n for n, i in enumerate(kept)
            ]
        elif key == "image_grid_pinpoints" and value:
            side = PATCH * PATCHES_A_SIDE
            small[key] = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
        elif kept and isinstance(value, (list, tuple)) and len(value) == _depth(values):
            small[key] = [_size(key, value[i]) for i in kept]
        elif "drop" in key and isinstance(value, float):
            small[key] = 0.0
        elif isinstance(value, (list, tuple)):
            small[key] = [_size(key, v) for v in value]
        else:
            small[key] = _size(key, value)
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int):
        small["num_key_value_heads"] = 4 if groups == heads else min(groups, 2)
    if "head_dim" in values and "head_dim" not in exceptions and values["head_dim"]:
        small["head_dim"] = small.get("qk_rope_head_dim") or (
            _TEXT_HEAD if "vocab_size" in values and not _derives_head(values) else _HEAD
        )
    if values.get("qk_head_dim"):
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    if "rope_parameters" not in exceptions:
        _shrink_rotary(small)
    return small


def _derives_head(values: dict[str, Any]) -> bool:
    """Return whether the heads' sizes sum to the width; some classes derive one from the other."""
    return values["head_dim"] * (values.get("num_attention_heads") or 0) == values.get(
        "hidden_size"
    )


def _depth(values: dict[str, Any]) -> int:
    return next((values[k] for k in _DEPTHS if isinstance(values.get(k), int)), 0)


def _kept_layers(values: dict[str, Any]) -> list[int]:
    """Return the indices of the layers to keep: the first of each kind, and at least two."""
    depth = _depth(values)
    if depth < 1:
        return []
    kinds: list[tuple[str, ...]] = [() for _ in range(depth)]
    shared = depth - (values.get("num_kv_shared_layers") or 0)
    for i in range(depth):
        kind = [f"dense {i < (values.get('first_k_dense_replace') or 0)}", f"own {i < shared}"]
        for key, value in values.items():
            if _LAYER_INDICES.fullmatch(key) and value is not None:
                # Two levels of DeepStack, as many as there are layers that take them.
                deep = key == "deepstack_visual_indexes"
                value = value[:2] if deep else value
                level = str(i) if deep and i in value else ""
                inside = i == value if isinstance(value, int) else i in value
                kind.append(f"{key} {inside}{level}")
            elif (
                isinstance(value, (list, tuple))
                and len(value) == depth
                and not _TOKEN.fullmatch(key)
            ):
                kind.append(f"{key} {value[i] == i if key == 'kv_source_layers' else value[i]}")
            elif key == "per_layer_config" and value:
                of_layers = cast("dict[Any, Any]", value)
                kind.append(str({int(k): v for k, v in of_layers.items()}.get(i)))
        kinds[i] = tuple(kind)
    kept = sorted(kinds.index(kind) for kind in set(kinds))
    if len(kept) > _MAX_LAYERS:  # then one layer for each value of each list
        seen: set[str] = set()
        kept = [i for i, kind in enumerate(kinds) if set(kind) - seen and not seen.update(kind)]
    if values.get("layer_types") and kinds[kept[-1]] != kinds[-1]:
        kept.append(depth - 1)  # some classes require the kind of the last layer
    while len(kept) < min(2, depth):
        kept = sorted({*kept, max(i for i in range(depth) if i not in kept)})
    return kept


def _size(key: str, value: Any) -> Any:
    """Return the small size for a key, or `value` where it is no size."""
    if isinstance(value, (list, tuple)):
        return [_size(key, v) for v in value]
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        for pattern, size in _SIZES:
            if re.fullmatch(pattern, key):
                return size
    return value


def _small_id(key: str, value: Any, ids: dict[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [ids.get(number, number) for number in value]
    if value is None and _PLACEHOLDER.fullmatch(key):
        modality = key.split("_")[0]
        return VOCABULARY - 1 - MODALITIES.index(modality)
    return ids.get(value, value) if isinstance(value, int) else value


def _shrink_rotary(small: dict[str, Any]) -> None:
    """Fit the sections of the rotary embedding, in place, to the small heads."""
    rope = small.get("rope_parameters") or small.get("rope_scaling")
    if not isinstance(rope, dict) or not rope:
        return
    head = small.get("head_dim") or _WIDTH // (small.get("num_attention_heads") or 4)
    for part in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if "original_max_position_embeddings" in part:
            part["original_max_position_embeddings"] = 64
        for key in ("mrope_section", "xdrope_section"):
            if part.get(key):
                factor = part.get("partial_rotary_factor", small.get("partial_rotary_factor")) or 1
                part[key] = _fit_sections(part[key], int(head * factor) // 2)


def _fit_sections(sections: list[int], total: int) -> list[int]:
    """Scale numbers to a sum of `total`, with at least one each where there is room."""
    result = [max(1, s * total // sum(sections)) for s in sections]
    while sum(result) != total:
        i = result.index(max(result))
        result[i] += 1 if sum(result) < total else -1
    return result


def build(config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build a model in evaluation mode, with random numbers in all weights, norms and biases.

    dtype: None for float32.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype or torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim < 2:  # norms, biases, gates, decay rates
                    parameter += 0.1 * torch.randn_like(parameter)
                else:
                    parameter.normal_(0, 0.7 * (parameter.numel() / parameter.shape[0]) ** -0.5)
    return model.eval()
