"""Models of transformers without memory for their weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig


def on_meta(config: PretrainedConfig, attention: str, dtype: torch.dtype) -> Any:
    """The whole model of a configuration, which is not changed, with weights in ``dtype``.

    Buffers, such as rotary frequencies, are in at least fp32.
    """
    config = copy.deepcopy(config)
    text_only = config.get_text_config() is config
    kind = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
    wide = dtype if dtype == torch.float64 else torch.float32
    with torch.device("meta"):
        whole = kind.from_config(
            config, dtype=wide, attn_implementation=attention, trust_remote_code=False
        )
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(dtype)
    return whole


@torch.no_grad()
def restore_buffers(part: Any) -> None:
    """Buffers that no checkpoint has, such as rotary frequencies, off meta and with their values.

    By the code with which transformers itself does so when it loads a model.
    """
    for name, module in part.named_modules():
        lost = [key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for key in lost:
            old = module.get_buffer(key)
            unset = torch.nan if old.is_floating_point() else -1
            module._buffers[key] = torch.full_like(old, unset, device="cpu")
        if lost:
            part._init_weights(module)
        for key in lost:
            new = module.get_buffer(key)
            if (new.isnan() | (new == -1)).any():
                raise ValueError(f"engine = fsdp: transformers does not say what {name}.{key} is")
