"""Which kernel computes the core attention of a layer.

`choose_kernel` is a pure function of what the layer asks, its dtype and what the machine offers, so
the whole table is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mimo.engines.megatron.acceleration import TRANSFORMER_ENGINE, Machine

SDPA = "sdpa"

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

    def __str__(self) -> str:
        said = ["causal" if self.causal else "full", f"heads of {self.head_size}"]
        said += [f"cp {self.cp_size}"] if self.cp_size > 1 else []
        said += [f"sliding window of {self.window}"] if self.window is not None else []
        said += ["items seen whole"] if self.whole_items else []
        return ", ".join(said)


@dataclass(frozen=True)
class KernelChoice:
    """kernel: its name in `attention_kernels.KERNELS`, or `TRANSFORMER_ENGINE`.

    dense_mask: whether it needs a mask of queries times keys, and so work and memory for pairs
    that do not see each other. reason: why no better kernel was chosen, or why this one.
    """

    kernel: str
    dense_mask: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel}{' with dense masks' if self.dense_mask else ''} ({self.reason})"


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
    for name, refuses in _REFUSALS.items():
        reason = None if name in machine.installed else "not installed"
        reason = reason or _needs_other_inputs(case, dtype, machine.capability)
        reason = reason or refuses(case, machine.capability)
        if reason is None:
            return KernelChoice(
                name, dense_mask=False, reason="; ".join(refusals) or "first choice"
            )
        refusals.append(f"{name}: {reason}")
    return KernelChoice(SDPA, needs_mask, "; ".join(refusals))


def _needs_other_inputs(
    case: AttentionCase, dtype: torch.dtype, capability: tuple[int, int]
) -> str | None:
    """Why none of the GPU's kernels takes these inputs."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes 16-bit inputs, not {dtype}"
    if capability < (8, 0):
        return f"needs compute capability 8.0, not {capability[0]}.{capability[1]}"
    if case.head_size > _LARGEST_HEAD or case.head_size % 8:
        return f"takes heads of 8, 16, ... {_LARGEST_HEAD}, not {case.head_size}"
    return None


def _transformer_engine(case: AttentionCase, capability: tuple[int, int]) -> str | None:
    if case.whole_items:
        return "cannot let the tokens of an item see each other"
    if case.window is not None and case.cp_size > 1:
        # Its other forms of context parallelism refuse packed sequences or few heads.
        return "its ring exchange of keys refuses sliding windows"
    return None


def _flash_attn_3(case: AttentionCase, capability: tuple[int, int]) -> str | None:
    return None if capability[0] == _HOPPER else "runs on capability 9 (Hopper) only"


def _takes_all(case: AttentionCase, capability: tuple[int, int]) -> str | None:
    return None


# From the best to the last: why a kernel cannot take a case that it is installed for, or None.
_REFUSALS: dict[str, Callable[[AttentionCase, tuple[int, int]], str | None]] = {
    TRANSFORMER_ENGINE: _transformer_engine,
    "flash_attn_3": _flash_attn_3,
    "flash_attn_2": _takes_all,
    "torch_varlen": _takes_all,
}
