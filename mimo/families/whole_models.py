"""Configuration, shapes and matrices of the halves of a vision-language model."""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

from mimo.families.flops import Product
from mimo.families.hf_config import Config

_EXPERTS = ".experts."


def configuration_of(config: Config) -> dict[str, Any]:
    """Return the configuration in JSON types, without the version, path and dtype of its writer."""
    left_out = ("transformers_version", "_name_or_path", "dtype")
    return json.loads(json.dumps({k: v for k, v in config.items() if k not in left_out}))


def transformers_config_of(configuration: Mapping[str, Any]) -> Any:
    """Return transformers' object of a configuration."""
    from transformers import AutoConfig  # late: it takes seconds to import

    keys = dict(configuration)
    return AutoConfig.for_model(keys.pop("model_type"), **keys)


def half_shapes(configuration: Mapping[str, Any], of_language: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a half by its name; of tied ones only the first."""
    return _shapes(json.dumps(configuration, sort_keys=True))[of_language]


@functools.lru_cache(maxsize=8)
def _shapes(configuration: str) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    import torch

    from mimo.engines.fsdp.halves import build_whole, language_parameters

    whole = build_whole(transformers_config_of(json.loads(configuration)), torch.float32)
    of_language = language_parameters(whole)
    shapes = {name: tuple(param.shape) for name, param in whole.named_parameters()}
    language = {name: shape for name, shape in shapes.items() if name in of_language}
    return {n: shape for n, shape in shapes.items() if n not in of_language}, language


def parameter_products(
    shapes: Mapping[str, tuple[int, ...]], per: str, experts: float = 1.0
) -> list[Product]:
    """Return the matrices that inputs are multiplied by; a lookup table counts as empty.

    experts: the share of experts that are used.
    """
    products = []
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        rows, columns = shape[0], math.prod(shape[1:])
        if "embed_tokens" in name or "position_embedding" in name or "pos_embed" in name:
            rows = columns = 0
        elif _EXPERTS in name:
            columns = round(columns * experts)
        products.append(Product(name, per, (rows, columns)))
    return products
