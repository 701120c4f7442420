"""Core attention for layer specs, packed or dense, with context parallelism and windows.

Letters: T packed tokens of a lane, N heads, G key/value heads, D head size, S sequence, B batch,
C context-parallel ranks (1 without).

Megatron's local core attention refuses packed sequences and context parallelism, so this one
serves every layer that Transformer Engine does not. Segments of a packed sequence never see each
other.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from mimo.device import has_gpu
from mimo.engines.megatron.layers.attention_kernels import KERNELS, repeat_heads
from mimo.engines.megatron.layers.context_parallel import gather_lane
from mimo.engines.megatron.layers.item_attention import attend_with_items, item_blocks
from mimo.engines.megatron.segments import PackedSegments, attention_blocks, check_divisible

logger = logging.getLogger(__name__)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def choose_kernel(dtype: torch.dtype) -> str:
    """Name of the best core attention for this machine and dtype; the choice is logged once."""
    if not has_gpu():
        name, reason = "sdpa", "no GPU"
    elif dtype not in (torch.bfloat16, torch.float16):
        name, reason = "sdpa", f"variable-length kernels take 16-bit inputs, not {dtype}"
    elif _installed("transformer_engine"):
        name, reason = "transformer_engine", "Transformer Engine is installed"
    else:
        name, reason = _own_kernel(), "Transformer Engine is not installed"
    logger.info("core attention: %s (%s)", name, reason)
    return name


def _own_kernel() -> str:
    """The best kernel of `CoreAttention` for 16-bit tensors on a GPU."""
    for name, package in (
        ("flash_attn", "flash_attn"),
        ("torch_varlen", "torch.nn.attention.varlen"),
    ):
        if _installed(package):
            return name
    return "sdpa"


def core_attention(config: TransformerConfig) -> type[nn.Module]:
    """Transformer Engine's attention if it is installed and supports ``config``, else ours.

    Its ring exchange of keys refuses sliding windows, and its other forms of context parallelism
    refuse packed sequences or few heads.
    """
    windows_over_ranks = config.window_size is not None and config.context_parallel_size > 1
    if choose_kernel(config.params_dtype) == "transformer_engine" and not windows_over_ranks:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return TEDotProductAttention
    return CoreAttention


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """Keys that a query of this layer sees, its own included; None when it sees all before it."""
    skips: Any = config.window_attn_skip_freq
    if config.window_size is None or not is_layer_window_attention(
        config.window_size, skips, layer_number
    ):
        return None
    before, after = config.window_size
    assert before >= 0 and after == 0, f"window_size {config.window_size} is not causal"
    return before + 1


class CoreAttention(nn.Module):
    """Core attention for layer specs; has no parameters.

    Packed (`PackedSegments`): q (T/C, N, D), k, v (T/C, G, D) -> (T/C, N, D), where the rank
    holds two chunks of every segment (see `segments`).
    Dense: q (S/C, B, N, D), k, v (S/C, B, G, D) -> (S/C, B, N·D), two chunks of S.
    Under context parallelism every rank of the group calls forward and backward alike: keys and
    values are all-gathered, their gradients reduce-scattered.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: object,
    ) -> None:
        super().__init__()
        self.attn_mask_type = attn_mask_type
        if softmax_scale is None:
            assert config.kv_channels is not None, "Megatron's config fills in the head size"
            self.scale = float(config.kv_channels**-0.5)
        else:
            self.scale = softmax_scale
        kernel = choose_kernel(config.params_dtype)
        self.kernel = KERNELS[_own_kernel() if kernel == "transformer_engine" else kernel]
        self.cp = None
        if config.context_parallel_size > 1:
            assert pg_collection is not None, "context parallelism needs its group"
            self.cp = pg_collection.cp
        self.window = _window(config, layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Raises ValueError for a dense mask or bias, which no caller of ours needs."""
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("dense attention masks and biases are not supported; pack segments")
        causal = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        if packed_seq_params is not None:
            assert isinstance(packed_seq_params, PackedSegments), "packed metadata without lengths"
            lengths, items = packed_seq_params.lengths, packed_seq_params.items
            return self._packed(query, key, value, lengths, causal, items)
        if self.cp is None and self.window is None:
            return self._dense(query, key, value, causal)
        # A batch is ``batch`` segments of one length.
        length, batch = query.shape[:2]
        whole = length * (self.cp.size() if self.cp is not None else 1)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._packed(q, k, v, (whole,) * batch, causal)
        return out.flatten(1).unflatten(0, (batch, length)).transpose(0, 1).contiguous()

    def _packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        causal: bool,
        items: tuple[tuple[int, int], ...] = (),
    ) -> Tensor:
        size, rank = 1, 0
        if self.cp is not None:
            size, rank = self.cp.size(), self.cp.rank()
        check_divisible(lengths, size)  # before any communication
        if self.cp is not None:
            both = gather_lane(torch.cat((key, value), dim=1), lengths, self.cp)
            key, value = both.chunk(2, dim=1)
        if items:
            assert causal, "without causal attention all tokens of a segment see each other"
            parts = item_blocks(lengths, items, self.window, size, rank, query.device)
            return attend_with_items(self.kernel, query, key, value, parts, self.scale)
        blocks = attention_blocks(lengths, causal, self.window, size, rank)
        return self.kernel(query, key, value, blocks, self.scale)

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=self.scale
        )
        return out.permute(2, 0, 1, 3).flatten(2)
