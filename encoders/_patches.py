"""What the towers that take flat patches in merge-block order have in common.

A processor emits the patches of an image in blocks of merge × merge neighbours, so that every
merge² consecutive patches make one row.

Letters: I images, P patches of all images, D head size of the tower.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def check_tower_grid(
    num_layers: int, num_attention_heads: int, ffn_hidden_size: int, tp: int, pp: int
) -> list[str]:
    """Problems of a tp × pp grid with a tower of these sizes, each one sentence."""
    problems = [
        f"tp={tp} must divide {key}, which is {size}"
        for key, size in (
            ("num_attention_heads", num_attention_heads),
            ("ffn_hidden_size", ffn_hidden_size),
        )
        if size % tp
    ]
    if num_layers % pp:
        problems.append(f"pp={pp} must divide num_layers, which is {num_layers}")
    return problems


def check_heads(hidden_size: int, num_attention_heads: int) -> None:
    """Raise ValueError unless rows and columns can each turn half of every head's channels."""
    if hidden_size % (4 * num_attention_heads):
        raise ValueError(
            f"hidden_size {hidden_size} must be a multiple of 4 · num_attention_heads, "
            f"{4 * num_attention_heads}: rows and columns turn half of each head's channels, in "
            f"pairs"
        )


def blank_grid(merge: int) -> Tensor:
    """(1, 3) the grid of one row, run in place of no images at all: the engine needs tokens."""
    return torch.tensor([[1, merge, merge]])


def frame_lengths(grids: Tensor) -> list[int]:
    """grids (I, 3) int64 as (t, h, w) in patches -> patches of every single frame."""
    return (grids[:, 1] * grids[:, 2]).repeat_interleave(grids[:, 0]).tolist()


def patch_places(grids: Tensor, merge: int) -> Tensor:
    """grids (I, 3) int64 as (t, h, w) in patches -> (P, 2) int64, row and column of each patch."""
    places = []
    for t, h, w in grids.tolist():
        block = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1)
        block = block.reshape(h // merge, merge, w // merge, merge, 2).transpose(1, 2)
        places.append(block.reshape(-1, 2).repeat(t, 1))
    return torch.cat(places)


class PatchRope(nn.Module):
    """Two-dimensional rotary frequencies: half of a head's channels turns with a patch's row,
    half with its column.
    """

    def __init__(self, head_size: int, base: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_size // 2, 2, dtype=torch.float32) / (head_size // 2)
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", base**-exponent, persistent=False)

    def forward(self, places: Tensor) -> Tensor:
        """places (P, 2) int64 on any device -> (P, 1, 1, D) fp32."""
        places = places.to(self.inv_freq.device, torch.float32)
        freqs = (places[:, :, None] * self.inv_freq).flatten(1)  # (P, D / 2)
        return torch.cat((freqs, freqs), dim=-1)[:, None, None, :]
