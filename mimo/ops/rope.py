"""Rotary position frequencies of language models, and how queries and keys turn by them.

Letters: S tokens that this rank holds, B batch (1 when packed), N heads, D head size, K = D/2
rotary channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class MRope(nn.Module):
    """Multimodal rotary embedding: each of the K rotary channels follows one axis of the position.

    Takes the place of `GPTModel.rotary_pos_emb`. axes: (K,) int64, 0, 1 or 2 for channels that
    follow time, height or width.
    """

    def __init__(self, axes: Tensor, base: float) -> None:
        super().__init__()
        channel = torch.arange(len(axes), dtype=torch.float32)
        self.inv_freq: Tensor
        self.axes: Tensor
        self.register_buffer("inv_freq", base ** -(channel / len(axes)), persistent=False)
        self.register_buffer("axes", axes, persistent=False)

    def forward(
        self, position_ids: Tensor, mrope_section: object = None, cp_group: object = None
    ) -> Tensor:
        """position_ids (3, B, S) int64 -> frequencies (S, B, 1, D) fp32."""
        positions = position_ids.permute(2, 1, 0).to(self.inv_freq.dtype)  # (S, B, 3)
        freqs = positions[..., self.axes] * self.inv_freq  # (S, B, K)
        return torch.cat((freqs, freqs), dim=-1)[:, :, None, :]


def interleaved_axes(section: Sequence[int]) -> Tensor:
    """Channels of the three axes alternate, as in Qwen3-VL.

    Channel ``c`` of the K rotary channels rotates with the height position when ``c % 3 == 1``
    and ``c < 3·section[1]``, with the width position when ``c % 3 == 2`` and
    ``c < 3·section[2]``, else with the temporal one. Source: transformers
    `Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope`.
    """
    axes = torch.zeros(sum(section), dtype=torch.int64)
    for which in (1, 2):
        axes[which : 3 * section[which] : 3] = which
    return axes


def contiguous_axes(section: Sequence[int]) -> Tensor:
    """Each axis has one block of channels, time first, then height and width, as in Qwen2-VL.

    Source: transformers `Qwen2_5_VLRotaryEmbedding.recomposition_frequencies`. Megatron's class
    computes this too, but cuts the frequencies of packed sequences wrongly under context
    parallelism.
    """
    return torch.arange(3).repeat_interleave(torch.tensor(section))


def rotate(frequencies: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """Turn every pair of channels (c, c + K) of states (S, B, N, D), as many as there are.

    frequencies: angles (S, B, 1, D) fp32, the second half of the channels like the first. The bits
    are those of Megatron's unfused rotary embedding, which needs twice as many passes.
    """
    dtype, channels = states[0].dtype, {state.shape[-1] for state in states}
    assert channels == {frequencies.shape[-1]}, (
        f"frequencies of {frequencies.shape[-1]} channels for heads of {channels}"
    )
    cos, sin = frequencies.cos().to(dtype), frequencies.sin().to(dtype)
    return tuple(_Rotate.apply(state, cos, sin) for state in states)  # type: ignore[misc]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (first, second), own_sin = x.chunk(2, dim=-1), sin.chunk(2, dim=-1)[0]
    turned = x.new_empty(x.shape)
    of_first, of_second = turned.chunk(2, dim=-1)
    torch.mul(second, -own_sin, out=of_first)
    torch.mul(first, own_sin, out=of_second)
    return turned.add_(x * cos)


class _Rotate(torch.autograd.Function):
    """The gradient turns back: by the same angles, with the sine's sign changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, -sin), None, None
