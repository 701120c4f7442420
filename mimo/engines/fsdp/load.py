"""Models of transformers without memory for their weights, and how they get it.

Each rank gets memory for its own slices and fills it: nobody reads or holds a whole tensor that is
cut.

Letters: R rows, C columns of a tensor of transformers, seen as a matrix of its first dimension by
all others; a vector has one column.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from mimo.engines.fsdp.context import FsdpContext, Wrapper
from mimo.engines.fsdp.sharding import held

Reader = Callable[[str, slice, slice], Tensor | None]
"""``(key, rows, columns)`` -> these rows of a tensor, by its name in transformers' memory, and of a
matrix these columns of them, in any dtype. Of anything but a matrix all columns are asked for, as
``slice(None)``, and come in any shape; None leaves them blank. It is asked once for each parameter,
adapters included."""


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


@torch.no_grad()
def load(module: nn.Module, ctx: FsdpContext, device: torch.device, reader: Reader) -> None:
    """Give a `Wrapper` that was built on meta, cut and sharded its memory and its weights.

    They come from ``reader``, in the order of `named_parameters`. No collective; every rank reads
    for itself.
    Raises ValueError for a tensor of another shape than asked for.
    """
    materialise(module, device)
    names = cast("Wrapper", module).hf_names
    for name, param in module.named_parameters():
        own = held(param, ctx.mesh)
        rows, columns = own.values.shape
        if not rows:
            continue  # fewer rows than ranks
        cut = slice(own.column, own.column + columns) if len(own.shape) == 2 else slice(None)
        found = reader(names[name], slice(own.row, own.row + rows), cut)
        if found is None:
            continue
        if found.numel() != own.values.numel():
            raise ValueError(f"{names[name]}: {list(found.shape)}, not {rows} rows of {own.shape}")
        own.values.copy_(found.reshape(rows, columns))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Memory on the device for weights that are on meta, with anything in it; the rest moves there.

    Tied weights stay tied. Buffers have their values already.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # a tied parameter has several
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((part, name))
    lost = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    assert not lost, f"nobody knows what {lost[0]} is; see `restore_buffers`"
    module._apply(
        lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device, copy=False)
    )
    for (first, own_name), *others in places.values():
        for part, name in others:  # tied ones have been parted
            setattr(part, name, getattr(first, own_name))
