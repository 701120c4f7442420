"""Make a tiny random copy of any image-text-to-text class of transformers.

The copy has a layer of each kind that the original has, in the same order. Sizes are chosen by the
names of keys, which the classes share; tiny_classes.yaml has what a few need beyond that.
"""

import copy
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import torch
import yaml
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from mimo.engines.fsdp.halves import MODALITIES

VOCABULARY = 640
FIRST_SPECIAL = 560
PATCH, PATCHES_A_SIDE = 4, 4
_WIDTH, _HEAD, _TEXT_HEAD = 64, 16, 32
_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "decoder_layers", "layers")
_DEPTHS += ("n_layers", "conf_num_hidden_layers", "resampler_depth")
_TOKEN = re.compile(
    r".*_token_(id|ids|index)|(im|image|slice)_(start|end|newline|patch)_id|newline_id|eod_token_id"
)
_LAYER_COUNTS = ("first_k_dense_replace", "num_kv_shared_layers")
_PLACEHOLDER = re.compile(rf"({'|'.join(MODALITIES)})_token_(id|index)")

TABLES: dict[str, Any] = yaml.safe_load(
    (files("mimo.checkpoint.hf") / "tiny_classes.yaml").read_text(encoding="utf-8")
)
_SIZES = {size: re.compile("|".join(keys)) for size, keys in TABLES["sizes"].items()}


def sections(config: PretrainedConfig, name: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield the configurations inside ``config`` with their keys, then ``config`` itself."""
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from sections(value, name or key)
    yield name, config


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration of the same class and kinds of layers, small enough for one core."""
    complete = copy.deepcopy(config)
    if getattr(config, "vision_config", config) is None:  # no tower: take all that the class has
        for key, kind in config.sub_configs.items():
            if getattr(config, key) is None:
                setattr(complete, key, kind())
    for _, part in sections(complete):
        if "mrope_section" in part.ignore_keys_at_rope_validation:
            part.rope_parameters.setdefault("mrope_section", [1, 1, 1])
    small = _shrink(complete.to_dict(), {})
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


def _shrink(values: dict[str, Any], ids: dict[int, int]) -> dict[str, Any]:
    """Shrink one configuration, or one part. ids: new special tokens by old ones; extended."""
    depth = next((values[k] for k in _DEPTHS if isinstance(values.get(k), int)), 0)
    layers = {
        key: of_layers
        for key, value in values.items()
        if depth and (of_layers := _of_layers(key, value, depth)) is not None
    }
    kept = _kept_layers([repr([of[i] for of in layers.values()]) for i in range(depth)])

    def new_id(number: Any) -> Any:
        is_id = isinstance(number, int) and number >= 0
        return ids.setdefault(number, FIRST_SPECIAL + len(ids)) if is_id else number

    def shrunk(key: str, value: Any) -> Any:
        if key in layers:
            of_kept = [layers[key][i] for i in kept]
            if key in _LAYER_COUNTS:
                return sum(of_kept)
            if key in TABLES["layer_indices"]:
                return [new for new, is_in in enumerate(of_kept) if is_in]
            if key == "kv_source_layers":
                with_keys = [n for n, has_keys in enumerate(of_kept) if has_keys]
                return [max(m for m in with_keys if m <= n) for n in range(len(kept))]
            if key == "per_layer_config":
                return {new: _of_one_layer(part) for new, part in enumerate(of_kept) if part}
            value = of_kept
        if isinstance(value, dict) and key.endswith("_config"):
            return _shrink(value, ids)
        if value is None:
            is_placeholder = _PLACEHOLDER.fullmatch(key)
            return VOCABULARY - 1 - MODALITIES.index(key.split("_")[0]) if is_placeholder else None
        if key in TABLES["values"] and value:
            return TABLES["values"][key]
        if _TOKEN.fullmatch(key):
            return _each(value, new_id)
        if key == "vision_feature_layer":
            return _each(value, lambda layer: min(max(layer, -2), 1))
        if "drop" in key and isinstance(value, float):
            return 0.0
        if kept and key in _DEPTHS:
            return len(kept)
        return _each(value, lambda number: _size(key, number))

    small = {key: shrunk(key, value) for key, value in values.items()}
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int):
        small["num_key_value_heads"] = 4 if groups == heads else min(groups, 2)
    if "head_dim" in values:
        # In some classes the heads' sizes sum to the width.
        is_derived = (values["head_dim"] or 0) * (heads or 0) in (0, values.get("hidden_size"))
        wide = "vocab_size" in values and not is_derived
        small["head_dim"] = small.get("qk_rope_head_dim") or (_TEXT_HEAD if wide else _HEAD)
    if values.get("qk_head_dim"):
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    _shrink_rotary(small)
    return small | TABLES["configurations"].get(values.get("model_type") or "", {})


def _of_layers(key: str, value: Any, depth: int) -> list[Any] | None:
    """Return what a key says about each layer; None if it is about the whole."""
    layers = range(depth)
    if value is None or _TOKEN.fullmatch(key) or key in TABLES["values"]:
        return None
    if key in TABLES["layer_indices"]:
        return [i in value for i in layers]
    if key == "first_k_dense_replace":
        return [i < value for i in layers]
    if key == "num_kv_shared_layers":
        return [i >= depth - value for i in layers]
    if key == "kv_source_layers":
        return [value[i] == i for i in layers]
    if key == "per_layer_config":
        by_layer = {int(layer): part for layer, part in value.items()}
        return [by_layer.get(i) for i in layers]
    return list(value) if isinstance(value, (list, tuple)) and len(value) == depth else None


def _of_one_layer(part: dict[str, Any]) -> dict[str, Any]:
    return {k: 2 * _TEXT_HEAD if k == "head_dim" else _size(k, v) for k, v in part.items()}


def _kept_layers(kinds: list[str]) -> list[int]:
    """Return the indices of the layers to keep: the first of each kind, and at least two."""
    kept = sorted({kinds.index(kind) for kind in kinds})
    if kept and (len(kept) == 1 or kinds[kept[-1]] != kinds[-1]):
        kept = sorted({*kept, len(kinds) - 1})  # some classes require the kind of the last layer
    return kept


def _each(value: Any, function: Any) -> Any:
    """Apply a function to a value, or to all inside lists."""
    if isinstance(value, (list, tuple)):
        return [_each(v, function) for v in value]
    return function(value)


def _size(key: str, value: Any) -> Any:
    """Return the small size for a key, or `value` where it is no size."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return next((s for s, keys in _SIZES.items() if keys.fullmatch(key)), value)
    return value


def _shrink_rotary(small: dict[str, Any]) -> None:
    """Fit the sections of the rotary embedding, in place, to the small heads."""
    rope = small.get("rope_parameters") or {}
    head = small.get("head_dim") or _WIDTH // (small.get("num_attention_heads") or 4)
    for part in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if "original_max_position_embeddings" in part:
            part["original_max_position_embeddings"] = 64
        for key in ("mrope_section", "xdrope_section"):
            if part.get(key):
                factor = part.get("partial_rotary_factor", small.get("partial_rotary_factor")) or 1
                total, count = int(head * factor) // 2, len(part[key])
                equal = [max(1, total // count)] * (count - 1)  # height and width, in some classes
                part[key] = [*equal, total - sum(equal)]


def build(config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build a model in evaluation mode, with random numbers in all weights, norms and biases.

    dtype: None for float32.
    """
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
