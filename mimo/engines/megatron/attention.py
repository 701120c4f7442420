"""Core attention for layer specs, packed or dense, with context parallelism and windows.

Letters: T packed tokens of a lane, N heads, G key/value heads, D head size, S sequence, B batch,
C context-parallel ranks (1 without).

Megatron's local core attention refuses packed sequences and context parallelism, so this one
serves every layer that Transformer Engine does not. Segments of a packed sequence never see each
other.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from mimo.device import send
from mimo.engines.megatron.acceleration import TRANSFORMER_ENGINE, this_machine
from mimo.engines.megatron.layers.attention_plan import AttentionPlan, LayerForm
from mimo.engines.megatron.layers.context_parallel import gather_lane
from mimo.engines.megatron.layers.kernel_choice import (
    AttentionCase,
    KernelChoice,
    choose_kernel,
)
from mimo.engines.megatron.layers.windows import WindowAttention
from mimo.engines.megatron.segments import PackedSegments, brought

logger = logging.getLogger(__name__)


def core_attention(config: TransformerConfig, causal: bool) -> type[nn.Module]:
    """Transformer Engine's attention if it is the best for all layers of ``config``, else ours."""
    window = None if config.window_size is None else config.window_size[0] + 1
    case = _case(config, causal, window, whole_items=False)
    if choose_kernel(case, config.params_dtype, this_machine()).kernel != TRANSFORMER_ENGINE:
        return CoreAttention
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return TEDotProductAttention


def _case(
    config: TransformerConfig, causal: bool, window: int | None, whole_items: bool
) -> AttentionCase:
    assert config.kv_channels is not None, "Megatron's config fills in the head size"
    return AttentionCase(
        config.kv_channels, causal, config.context_parallel_size, window, whole_items
    )


@functools.cache
def _say_once(case: AttentionCase, choice: KernelChoice, on_gpu: bool) -> None:
    logger.info("core attention, %s: %s", case, choice)
    if on_gpu and choice.dense_mask:
        logger.warning(
            "core attention, %s: no kernel here takes it without dense masks, which is slow (%s); "
            "train in bf16 and install flash-attn",
            case,
            choice.reason,
        )


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

    whole_items: whether segments may have items whose tokens see each other.

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
        whole_items: bool = False,
        **unused: object,
    ) -> None:
        super().__init__()
        self.attn_mask_type = attn_mask_type
        if softmax_scale is None:
            assert config.kv_channels is not None, "Megatron's config fills in the head size"
            self.scale = float(config.kv_channels**-0.5)
        else:
            self.scale = softmax_scale
        self.cp = None
        cp_rank = 0
        if config.context_parallel_size > 1:
            assert pg_collection is not None, "context parallelism needs its group"
            self.cp = pg_collection.cp
            cp_rank = self.cp.rank()
        window = _window(config, layer_number)
        causal = attn_mask_type == AttnMaskType.causal
        machine = this_machine()
        # Where it is installed, but not the best for all layers, ours take the next best.
        own = replace(machine, installed=machine.installed - {TRANSFORMER_ENGINE})
        case = _case(config, causal, window, whole_items)
        choice = choose_kernel(case, config.params_dtype, own)
        _say_once(case, choice, machine.capability is not None)
        self.form = LayerForm(choice.kernel, causal, window, config.context_parallel_size, cp_rank)

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
        assert attn_mask_type in (None, self.attn_mask_type), "a layer keeps its mask type"
        form = self.form
        if packed_seq_params is not None:
            assert isinstance(packed_seq_params, PackedSegments), "packed metadata without lengths"
            plan = packed_seq_params.plan(form)
            return self._attend(form, query, key, value, plan)
        # A batch is ``batch`` segments of one length.
        length, batch = query.shape[:2]
        plan = _batch_plan(form, length * form.cp_size, batch, query.device)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._attend(form, q, k, v, plan)
        return out.flatten(1).unflatten(0, (batch, length)).transpose(0, 1).contiguous()

    def _attend(
        self, form: LayerForm, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan
    ) -> Tensor:
        if plan.lane is not None:
            assert self.cp is not None, "plans of a lone rank have no lane"
            both = gather_lane(torch.cat((key, value), dim=1), plan.lane, self.cp)
            key, value = both.chunk(2, dim=1)
        return form.attend(query, key, value, plan, self.scale)


@functools.lru_cache(maxsize=8)
def _batch_plan(form: LayerForm, length: int, batch: int, device: torch.device) -> AttentionPlan:
    """Of ``batch`` segments of one ``length``; the same in all layers and mostly in all steps."""
    plan: AttentionPlan = brought(
        form.plan((length,) * batch, ()), functools.partial(send, device=device)
    )
    return plan


def forms_in(modules: Iterable[nn.Module]) -> frozenset[LayerForm]:
    """Of all layers inside, for `PackedSegments.prepare`; Transformer Engine's need no plan."""
    inside = (part for module in modules for part in module.modules())
    return frozenset(part.form for part in inside if isinstance(part, CoreAttention))


def kernels_in(modules: Iterable[nn.Module]) -> str:
    """Which kernels compute the core attention of the layers inside: "24 x flash_attn_3"."""
    found: Counter[str] = Counter()
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, Attention):
            core: Any = part.core_attention
            core = core.core if isinstance(core, WindowAttention) else core
            found[core.form.kernel if isinstance(core, CoreAttention) else TRANSFORMER_ENGINE] += 1
    return ", ".join(f"{count} x {kernel}" for kernel, count in sorted(found.items())) or "none"
