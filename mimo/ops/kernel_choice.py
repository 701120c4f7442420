"""Which kernel computes the core attention of a layer.

`choose_kernel` is a pure function of what the layer asks, its dtype and what the machine offers, so
the whole table is tested without a GPU.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

import torch

from mimo.ops.acceleration import TRANSFORMER_ENGINE, Machine

logger = logging.getLogger(__name__)

SDPA = "sdpa"
_BEST_FIRST = (TRANSFORMER_ENGINE, "flash_attn_3", "flash_attn_2", "torch_varlen")
_LARGEST_HEAD = 256
_HOPPER = 9


@dataclass(frozen=True)
class AttentionCase:
    """What a layer asks of its core attention; segments are always laid end to end.

    causal: else all tokens of a segment see each other. cp_size: ranks that share each segment.
    window: keys that a query sees, its own included; None for all.
    whole_items: whether tokens of an item may see each other in both directions.
    """

    head_size: int
    causal: bool
    cp_size: int = 1
    window: int | None = None
    whole_items: bool = False


@dataclass(frozen=True)
class KernelChoice:
    """kernel: its name in `attention_kernels.KERNELS`, or `TRANSFORMER_ENGINE`.

    dense_mask: whether it needs a mask of queries times keys, and so work and memory for pairs
    that do not see each other. reason: why no better kernel was chosen, or why this one.
    """

    kernel: str
    dense_mask: bool
    reason: str


def choose_kernel(case: AttentionCase, dtype: torch.dtype, machine: Machine) -> KernelChoice:
    """The best kernel for a layer.

    All but SDPA take segments of any lengths and grouped heads as they are, and know windows and
    causal blocks with more keys than queries, which context-parallel ranks and text beside items
    have. SDPA runs everywhere and in every dtype, but for those two it needs masks.
    """
    plain = case.cp_size == 1 and case.window is None and not case.whole_items
    needs_mask = case.causal and not plain
    if machine.capability is None:
        return KernelChoice(SDPA, needs_mask, "no GPU")
    refusals = []
    for kernel in _BEST_FIRST:
        reason = "not installed"
        if kernel in machine.installed:
            reason = _refusal(kernel, case, dtype, machine.capability)
        if reason is None:
            return KernelChoice(kernel, False, "; ".join(refusals) or "first choice")
        refusals.append(f"{kernel}: {reason}")
    return KernelChoice(SDPA, needs_mask, "; ".join(refusals))


def _refusal(
    kernel: str, case: AttentionCase, dtype: torch.dtype, capability: tuple[int, int]
) -> str | None:
    """Why a kernel cannot take a case on such a GPU; None if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes 16-bit inputs, not {dtype}"
    if capability < (8, 0):
        return f"needs compute capability 8.0, not {capability[0]}.{capability[1]}"
    if case.head_size > _LARGEST_HEAD or case.head_size % 8:
        return f"takes heads of 8, 16, ... {_LARGEST_HEAD}, not {case.head_size}"
    if kernel == "flash_attn_3" and capability[0] != _HOPPER:
        return "runs on capability 9 (Hopper) only"
    if kernel == TRANSFORMER_ENGINE and case.whole_items:
        return "cannot let the tokens of an item see each other"
    if kernel == TRANSFORMER_ENGINE and case.window is not None and case.cp_size > 1:
        # Its other forms of context parallelism refuse packed sequences or few heads.
        return "its ring exchange of keys refuses sliding windows"
    return None


@functools.cache
def own_kernel(case: AttentionCase, dtype: torch.dtype, machine: Machine) -> str:
    """The best of `attention_kernels.KERNELS` for a layer; logged once.

    Transformer Engine's attention is a module of its own: where that cannot be had, or not for all
    layers, ours take the next best.
    """
    choice = choose_kernel(
        case, dtype, replace(machine, installed=machine.installed - {TRANSFORMER_ENGINE})
    )
    logger.info("core attention, %s: %s", case, choice)
    if machine.capability is not None and choice.dense_mask:
        logger.warning(
            "core attention, %s: no kernel here takes it without dense masks, which is slow (%s); "
            "train in bf16 and install flash-attn",
            case,
            choice.reason,
        )
    return choice.kernel
