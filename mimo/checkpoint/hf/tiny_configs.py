"""Configurations of tiny checkpoints, with the sizes in ``tiny_families.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES: dict[str, dict[str, Any]] = yaml.safe_load(
    (files("mimo.checkpoint.hf") / "tiny_families.yaml").read_text(encoding="utf-8")
)
_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 3e-4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.03,
}


def tiny_config(
    family: str, vocab_size: int, token_ids: Mapping[str, int], tied: bool
) -> PreTrainedConfig:
    """Return the configuration of transformers. token_ids: by token."""
    from transformers import AutoConfig

    sizes = deepcopy(FAMILIES[family])  # transformers may change it
    text = {**_TEXT, "vocab_size": vocab_size, **sizes["text"]}
    if "vision" not in sizes or family == "gemma3":  # the others have the key in the whole alone
        text["tie_word_embeddings"] = tied
    text |= {key: token_ids[token] for key, token in sizes["text_ids"].items()}
    if "vision" not in sizes:
        return AutoConfig.for_model(family, **text)
    ids = {key: token_ids[token] for key, token in sizes.get("ids", {}).items()}
    parts = {"text_config": text, "vision_config": sizes["vision"]}
    return AutoConfig.for_model(
        family, **parts, **sizes.get("whole", {}), **ids, tie_word_embeddings=tied
    )


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
