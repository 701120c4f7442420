"""Self-attention that turns queries and keys by the frequencies of exactly the tokens it holds.

Letters: S tokens that this rank attends from (all T packed tokens of a lane, without context
parallelism), B batch (1 when packed), N heads, D head size.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import attention
from torch import Tensor

from mimo.ops.layers import rotate


class SelfAttention(attention.SelfAttention):
    """Megatron's, with frequencies that are already cut for this rank: packed or not, all alike.

    For packed sequences Megatron would pick the frequencies of each segment itself, in every layer,
    by bounds that it reads from the device, for which the host waits.
    """

    _frequencies: Tensor | None = None  # during a forward

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any):
        """As Megatron's. rotary_pos_emb: (S, B, 1, D) fp32; None for no rotation."""
        self._frequencies = rotary_pos_emb
        try:
            return super().forward(*args, rotary_pos_emb=None, **kwargs)
        finally:
            self._frequencies = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Queries (S, B, N, D), keys and values (S, B, G, D), the first two turned."""
        parts: tuple[Any, ...] = super().get_query_key_value_tensors(*args, **kwargs)
        query, key, *rest = parts
        frequencies = self._frequencies
        if frequencies is None:
            return parts
        assert len(frequencies) == len(query), (
            f"frequencies of {len(frequencies)} tokens for {len(query)} tokens of this rank"
        )
        return (*rotate(frequencies, query, key), *rest)
