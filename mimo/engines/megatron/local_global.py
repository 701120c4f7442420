"""Decoder layers of the Gemma-3 kind: norms on both sides of attention and MLP, two kinds of layer.

Local layers see a sliding window of keys and rotate fast with the position; global layers see all
keys and rotate slowly. Which is which follows from the layer's number in the whole model, so a
pipeline changes nothing.

Letters: S sequence (all T packed tokens of a lane, or one of B samples), B batch (1 when packed),
D head size, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from mimo.engines.megatron.attention import CoreAttention
from mimo.engines.megatron.config import LoRA
from mimo.engines.megatron.deepstack import DeepStackLayer
from mimo.engines.megatron.stack import layer_spec, norm_of

_LOCAL, _GLOBAL = 0, 1

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class LocalGlobalRope(nn.Module):
    """Rotary frequencies of plain positions for both kinds of layer, side by side.

    Takes the place of `GPTModel.rotary_pos_emb`; `LocalGlobalLayer` picks its kind. All three
    rows of the position ids are the same, so only the first is read.
    global_factor: global frequencies are divided by it (linear scaling).
    """

    def __init__(
        self, head_size: int, local_base: float, global_base: float, global_factor: float
    ) -> None:
        super().__init__()
        exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        frequencies = torch.stack((local_base**-exponent, global_base**-exponent / global_factor))
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(
        self, position_ids: Tensor, mrope_section: object = None, cp_group: object = None
    ) -> Tensor:
        """position_ids (3, B, S) int64 -> local and global frequencies (S, B, 2, D) fp32."""
        positions = position_ids[0].t().to(self.inv_freq.dtype)[:, :, None, None]
        freqs = positions * self.inv_freq  # (S, B, 2, D / 2)
        return torch.cat((freqs, freqs), dim=-1)


class NormedAdd(nn.Module):
    """A bias-dropout-add that normalises what it adds to the residual stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.hidden_dropout == 0, "no family of ours has dropout"
        self.norm = norm_of(config)(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> BiasDropoutAdd:
        """The function that does it, in the form that Megatron asks for."""
        return self._add

    def _add(
        self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        """output, residual (S, B, H), bias (H,) -> (S, B, H)."""
        output, bias = output_with_bias
        return residual + self.norm(output if bias is None else output + bias)


class LocalGlobalLayer(DeepStackLayer):
    """A decoder layer that takes the rotary frequencies of its kind."""

    def forward(
        self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """rotary_pos_emb: (S, B, 2, D). Otherwise as `DeepStackLayer`."""
        config = self.config
        skips: Any = config.window_attn_skip_freq
        is_local = is_layer_window_attention(config.window_size, skips, self.layer_number)
        kind = _LOCAL if is_local else _GLOBAL
        own = rotary_pos_emb[:, :, kind : kind + 1]
        return super().forward(*args, rotary_pos_emb=own, **kwargs)


def local_global_layer_spec(config: TransformerConfig, lora: LoRA | None) -> ModuleSpec:
    """A causal layer of this kind, with norms before and after attention and MLP.

    Its core attention is always ours: Transformer Engine's cannot let the tokens of an item see
    each other.
    """
    return layer_spec(
        config,
        lora,
        causal=True,
        core=partial(CoreAttention, whole_items=True),
        add=ModuleSpec(module=NormedAdd, params={"config": config}),
        layer=LocalGlobalLayer,
    )
