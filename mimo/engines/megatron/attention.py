"""Attention for layer specs, packed or dense, with context parallelism and windows.

Letters: T packed tokens of a lane, N heads, G key/value heads, D head size, K pairs of rotary
channels, S sequence, B batch, C context-parallel ranks (1 without).

Megatron's local core attention refuses packed sequences and context parallelism, so this one
serves every layer that Transformer Engine does not. Segments of a packed sequence never see each
other.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from mimo.engines.megatron.delta_net import GatedDeltaNet
from mimo.engines.megatron.experts import SparseMLP
from mimo.ops.acceleration import (
    TRANSFORMER_ENGINE,
    AttentionCase,
    best_kernel,
    choose_kernel,
    this_machine,
)
from mimo.ops.attention_plan import AttentionPlan, LayerForm, batch_plan
from mimo.ops.layers import rotate
from mimo.ops.segments import Form, PackedSegments, gather_lane

logger = logging.getLogger(__name__)


class SelfAttention(MegatronSelfAttention):
    """Megatron's self-attention with rotary frequencies that are already cut for this rank.

    For packed sequences Megatron would pick each segment's frequencies in every layer, by bounds
    that the host reads from the device.
    """

    _frequencies: Tensor | None = None  # during a forward

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any):
        """Run Megatron's forward. rotary_pos_emb: (S, B, 1, 2K) fp32; None for no rotation."""
        self._frequencies = rotary_pos_emb
        try:
            return super().forward(*args, rotary_pos_emb=None, **kwargs)
        finally:
            self._frequencies = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Queries (S, B, N, D), keys and values (S, B, G, D), the first two rotated; any gates."""
        parts: tuple[Any, ...] = super().get_query_key_value_tensors(*args, **kwargs)
        query, key, *rest = parts
        frequencies = self._frequencies
        if frequencies is None:
            return parts
        assert len(frequencies) == len(query), (
            f"frequencies of {len(frequencies)} tokens for {len(query)} tokens of this rank"
        )
        return (*rotate(frequencies, query, key), *rest)

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x (S, B, N·D), gate (S, B, N, D) -> x · sigmoid(gate) in their dtype.

        Megatron's goes through fp32, also from fp64.
        """
        return x * gate.reshape(x.shape).sigmoid()


def core_attention(config: TransformerConfig, causal: bool) -> type[nn.Module]:
    """Return Transformer Engine's attention if it is best for all layers, else ours."""
    window = None if config.window_size is None else config.window_size[0] + 1
    case = _case(config, causal, window)
    choice = choose_kernel(case, config.params_dtype, this_machine())
    if choice.kernel != TRANSFORMER_ENGINE:
        return CoreAttention
    logger.info("core attention, %s: %s", case, choice)
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return TEDotProductAttention


def _case(
    config: TransformerConfig, causal: bool, window: int | None, whole_items: bool = False
) -> AttentionCase:
    assert config.kv_channels is not None, "Megatron's config fills in the head size"
    return AttentionCase(
        config.kv_channels, causal, config.context_parallel_size, window, whole_items
    )


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Return how many keys a query of this layer sees, its own included; None for all before it."""
    size, skips = config.window_size, cast("Any", config.window_attn_skip_freq)
    if size is None or not is_layer_window_attention(size, skips, layer_number):
        return None
    return size[0] + 1


class CoreAttention(nn.Module):
    """Core attention for layer specs; has no parameters.

    whole_items: whether segments may have items whose tokens see each other.

    Packed (`PackedSegments`): q (T/C, N, D), k, v (T/C, G, D) -> (T/C, N, D), where the rank
    holds two chunks of every segment (see `mimo.ops.segments`).
    Dense: q (S/C, B, N, D), k, v (S/C, B, G, D) -> (S/C, B, N·D), two chunks of S.
    Under context parallelism every rank of the group calls it: keys and values are all-gathered,
    their gradients reduce-scattered.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        whole_items: bool = False,
        **unused: object,
    ) -> None:
        super().__init__()
        self.attn_mask_type = attn_mask_type
        causal = attn_mask_type == AttnMaskType.causal
        case = _case(config, causal, window_of(config, layer_number), whole_items)
        self.scale = float(case.head_size**-0.5) if softmax_scale is None else softmax_scale
        self.cp, cp_rank = None, 0
        if case.cp_size > 1:
            assert pg_collection is not None, "context parallelism needs its group"
            self.cp = pg_collection.cp
            cp_rank = self.cp.rank()
        kernel = best_kernel(case, config.params_dtype, this_machine())
        self.form = LayerForm(kernel, case.causal, case.window, case.cp_size, cp_rank)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
    ) -> Tensor:
        """Attend, as the class says. Raises ValueError for a dense mask or bias."""
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("dense attention masks and biases are not supported; pack segments")
        assert attn_mask_type in (None, self.attn_mask_type), "a layer keeps its mask type"
        if packed_seq_params is not None:
            return self._attend(query, key, value, packed_seq_params.plan(self.form))
        # A batch is ``batch`` segments of one length.
        length, batch = query.shape[:2]
        plan = batch_plan(self.form, length * self.form.cp_size, batch, query.device)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._attend(q, k, v, plan)
        return out.flatten(1).unflatten(0, (batch, length)).transpose(0, 1).contiguous()

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        if plan.lane is not None:
            assert self.cp is not None, "the plan of a lone rank has no lane"
            both = gather_lane(torch.cat((key, value), dim=1), plan.lane, self.cp)
            key, value = both.chunk(2, dim=1)
        return self.form.attend(query, key, value, plan, self.scale)


class WindowAttention(nn.Module):
    """Core attention inside `PackedSegments.windows` instead of segments.

    A window is a stretch of a segment, such as a square of an image's patches, in which every token
    sees every other.
    """

    def __init__(self, core: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.core = core(**options)

    def forward(
        self, *args: Any, packed_seq_params: PackedSegments | None = None, **kwargs: Any
    ) -> Tensor:
        """Attend inside the windows; see `CoreAttention.forward`."""
        windows = packed_seq_params and packed_seq_params.windows
        assert windows is not None, "window attention needs windows"
        return self.core(*args, packed_seq_params=windows, **kwargs)


def forms_in(modules: Iterable[nn.Module]) -> frozenset[Form]:
    """Collect the forms of all layers inside, for `PackedSegments.prepare`.

    Transformer Engine's attention needs no plan, and linear attention only under context
    parallelism.
    """
    inside = (part for module in modules for part in module.modules())
    kinds = (CoreAttention, GatedDeltaNet, SparseMLP)
    forms = (part.form for part in inside if isinstance(part, kinds))
    return frozenset(form for form in forms if form is not None)
