"""Core attention of transformers' layers by the project's kernels, and the same by dense masks.

The kernels stand in transformers' registry of attention functions under `NAME` and `TOWER_NAME`. No
function for masks is registered under them, and transformers then builds none. Segments of a packed
sequence never see each other.

Letters: B sequences (1 for packed) of S tokens (T packed), N heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from mimo.ops.acceleration import AttentionCase, best_kernel, this_machine
from mimo.ops.attention_plan import LayerForm, batch_plan
from mimo.ops.segments import PackedSegments

NAME = "mimo_segments"
"""As `attn_implementation`."""
TOWER_NAME = "mimo_flash_segments"
"""Of towers: if "flash" is in it, transformers attends over all segments in one call."""

# What transformers hands to attention functions and no kernel of ours computes.
_REFUSED = {
    "softcap": "a soft cap on attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "dropout": "attention dropout",
}


class Segments:
    """Which tokens a forward pass attends over; goes through the layers by keyword.

    packings: the ways in which it packs its tokens, one in a language model; none for a batch,
    whose sequences are segments of one length. recompute: whether core attention is computed again
    in the backward pass.
    No dataclass: FSDP2 copies those in what a layer is called with, without the plans in them.
    """

    def __init__(self, packings: Iterable[PackedSegments], recompute: bool) -> None:
        self.packings, self.recompute = tuple(packings), recompute

    def of(self, bounds: Tensor | None) -> PackedSegments | None:
        """The packing with these bounds; without any the only one, if there is one."""
        own = (one for one in self.packings if bounds is None or one.cu_seqlens_q is bounds)
        return next(own, None)


def layer_form(
    head_size: int, dtype: torch.dtype, causal: bool = True, window: int | None = None
) -> LayerForm:
    """How layers attend that compute in ``dtype``. window: keys that a query sees, its own too."""
    case = AttentionCase(head_size, causal, window=window)
    return LayerForm(best_kernel(case, dtype, this_machine()), causal, window)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (B, N, S, D), key and value (B, G, S, D) of this rank's heads -> (B, S, N, D).

    cu_seq_lens_q: from a tower's layer, whose tokens see their whole segment: the bounds of those.
    Raises ValueError for what no kernel computes, such as a soft cap.
    """
    for name, what in _REFUSED.items():
        if others.get(name):
            raise ValueError(f"engine = fsdp: no kernel has {what} ({others[name]})")
    assert attention_mask is None, "what a query sees follows from the segments"
    batch, _, length, head_size = query.shape
    form = layer_form(head_size, query.dtype, cu_seq_lens_q is None, sliding_window)
    packed = segments.of(cu_seq_lens_q)
    plan = batch_plan(form, length, batch, query.device) if packed is None else packed.plan(form)
    scale = head_size**-0.5 if scaling is None else scaling
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if segments.recompute:
        out = checkpoint(form.attend, q, k, v, plan, scale, use_reentrant=False)
    else:
        out = form.attend(q, k, v, plan, scale)
    return out.unflatten(0, (batch, length)), None


AttentionInterface.register(TOWER_NAME, attend)
AttentionInterface.register(NAME, attend)


_SLIDING = "sliding_attention"
KINDS = ("full_attention", _SLIDING)
"""Of layers that segments are known to, as transformers calls them."""


def kinds(config: Any) -> tuple[str, ...]:
    """Of the layers of a text model of transformers, each once."""
    every = _SLIDING if getattr(config, "sliding_window", None) else KINDS[0]
    return tuple(dict.fromkeys(getattr(config, "layer_types", None) or [every]))


def windows(config: Any) -> list[int | None]:
    """Of every kind of layer: keys that a query sees; None for all."""
    return [config.sliding_window if kind == _SLIDING else None for kind in kinds(config)]


def dense_masks(packed: PackedSegments, config: Any, device: torch.device) -> Any:
    """The same for transformers' own attention: what its text models take as `attention_mask`.

    (1, 1, T, T) bool; by kind of layer if there are several. A query sees, of its own segment, the
    keys up to its own in its window, and the rest of its item.
    Source: transformers `create_masks_for_vision_model`, sliding AND (causal OR same item).
    """
    total = sum(packed.lengths)
    place = torch.arange(total, device=device)
    lengths = torch.tensor(packed.lengths, device=device)
    segment = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    item = torch.full_like(place, -1)
    for number, (start, length) in enumerate(packed.items):
        item[start : start + length] = number
    behind = place[:, None] - place
    seen = (behind >= 0) | ((item[:, None] == item) & (item >= 0))
    seen = (seen & (segment[:, None] == segment))[None, None]
    masks = [seen if window is None else seen & (behind < window) for window in windows(config)]
    return dict(zip(kinds(config), masks, strict=True)) if len(masks) > 1 else masks[0]
