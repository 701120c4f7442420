"""Rotary position frequencies of language models.

Letters: S sequence (all T packed tokens of a lane, or one of B samples), B batch (1 when packed),
D head size, K = D/2 rotary channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class _MRope(nn.Module, ABC):
    """Multimodal rotary embedding: each of the K rotary channels follows one axis of the position.

    Takes the place of `GPTModel.rotary_pos_emb`. Returns the frequencies of the whole sequence;
    under context parallelism `LanguageModel` cuts them.

    section: channels that follow time, height and width.
    """

    def __init__(self, head_size: int, section: Sequence[int], base: float) -> None:
        super().__init__()
        channels = head_size // 2
        if len(section) != 3 or sum(section) != channels:
            raise ValueError(
                f"mrope_section {list(section)} must be three numbers that sum to half the head "
                f"size, {channels}"
            )
        exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        self.inv_freq: Tensor
        self.axis: Tensor
        self.register_buffer("inv_freq", base**-exponent, persistent=False)
        self.register_buffer("axis", self.axes(section), persistent=False)

    @staticmethod
    @abstractmethod
    def axes(section: Sequence[int]) -> Tensor:
        """(K,) int64: 0, 1 or 2 for channels that follow time, height or width."""

    def forward(
        self, position_ids: Tensor, mrope_section: object = None, cp_group: object = None
    ) -> Tensor:
        """position_ids (3, B, S) int64 -> frequencies (S, B, 1, D) fp32."""
        positions = position_ids.permute(2, 1, 0).to(self.inv_freq.dtype)  # (S, B, 3)
        freqs = positions[..., self.axis] * self.inv_freq  # (S, B, K)
        return torch.cat((freqs, freqs), dim=-1)[:, :, None, :]


class InterleavedMRope(_MRope):
    """Channels of the three axes alternate, as in Qwen3-VL.

    Channel ``c`` of the K rotary channels rotates with the height position when ``c % 3 == 1``
    and ``c < 3·section[1]``, with the width position when ``c % 3 == 2`` and
    ``c < 3·section[2]``, else with the temporal one. Source: transformers
    `Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope`.
    """

    @staticmethod
    def axes(section: Sequence[int]) -> Tensor:
        """See the class."""
        axis = torch.zeros(sum(section), dtype=torch.int64)
        for which in (1, 2):
            axis[which : 3 * section[which] : 3] = which
        return axis


class ContiguousMRope(_MRope):
    """Each axis has one block of channels, time first, then height and width, as in Qwen2-VL.

    Source: transformers `Qwen2_5_VLRotaryEmbedding.recomposition_frequencies`. Megatron's
    class computes this too, but cuts the frequencies of packed sequences wrongly under context
    parallelism.
    """

    @staticmethod
    def axes(section: Sequence[int]) -> Tensor:
        """See the class."""
        return torch.arange(3).repeat_interleave(torch.tensor(section))
