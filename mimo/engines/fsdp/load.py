"""From a module on meta to one with weights: each rank gets memory for its own slices and fills it.

Nobody reads or holds a whole tensor that is cut.

Letters: R rows, C columns of a tensor of transformers, seen as a matrix of its first dimension by
all others; a vector has one column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from mimo.engines.fsdp.context import FsdpContext, Wrapper
from mimo.engines.fsdp.sharding import held

Reader = Callable[[str, slice, slice], Tensor | None]
"""``(key, rows, columns)`` -> these rows of a tensor, by its name in transformers' memory, and of a
matrix these columns of them, in any dtype. Of anything but a matrix all columns are asked for, as
``slice(None)``, and come in any shape; None leaves them blank. It is asked once for each parameter,
adapters included."""


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
    places = _places(module)
    lost = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    assert not lost, f"nobody knows what {lost[0]} is; see `restore_buffers`"
    module._apply(
        lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device, copy=False)
    )
    for (first, own_name), *others in places.values():
        for part, name in others:  # tied ones have been parted
            setattr(part, name, getattr(first, own_name))


def _places(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter is found, by identity; a tied one in several places."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((part, name))
    return places
