"""What the towers that take flat patches in merge-block order have in common.

A processor emits the patches of an image in blocks of merge × merge neighbours, so that every
merge² consecutive patches make one row.

Letters: I images, P patches of all images, M = merge² patches per row, N = P/M rows, D head size of
the tower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mimo.engines.megatron import ProcessGroupCollection, TransformerConfig


def check_heads(hidden_size: int, num_attention_heads: int) -> None:
    """Raise ValueError unless rows and columns can each turn half of every head's channels."""
    if hidden_size % (4 * num_attention_heads):
        raise ValueError(
            f"hidden_size {hidden_size} must be a multiple of 4 · num_attention_heads, "
            f"{4 * num_attention_heads}: rows and columns turn half of each head's channels, in "
            f"pairs"
        )


@dataclass(frozen=True)
class RowParts:
    """Which patches a rank of a tower embeds: all, or under sequence parallelism its part.

    Rank ``part`` of ``parts`` then has the patches of the part-th of equal parts of all rows; blank
    rows at the end make the parts equal.
    """

    merge: int
    parts: int
    part: int

    @classmethod
    def of(cls, merge: int, config: TransformerConfig, groups: ProcessGroupCollection) -> RowParts:
        """This rank's in a tower with this configuration."""
        if not config.sequence_parallel:
            return cls(merge, 1, 0)
        return cls(merge, groups.tp.size(), groups.tp.rank())

    def with_blanks(self, grids: Tensor) -> Tensor:
        """grids (I, 3) int64 as (t, h, w) in patches -> with a blank image behind if need be.

        The engine cannot run on no tokens at all: without any image each part is one blank row.
        """
        num_rows = int(grids.prod(1).sum()) // self.merge**2
        num_blank = -num_rows % self.parts if num_rows else self.parts
        if not num_blank:
            return grids
        return torch.cat((grids, torch.tensor([[1, self.merge, self.merge * num_blank]])))

    def own(self, values: Tensor, num_patches: int) -> Tensor:
        """values (P', ...) of the images' patches -> this rank's (num_patches/parts, ...).

        num_patches: with the blank ones, whose values are zeros where ``values`` has none.
        """
        size = num_patches // self.parts
        own = values[self.part * size : (self.part + 1) * size]
        if own.shape[0] == size:
            return own
        return torch.cat((own, own.new_zeros(size - own.shape[0], *own.shape[1:])))

    def sum_gradients(self, module: nn.Module) -> None:
        """Mark a module that sees this rank's patches only: gradients are summed over the ranks."""
        for param in module.parameters():
            param.sequence_parallel = self.parts > 1  # type: ignore[attr-defined]


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


@dataclass(frozen=True)
class WindowOrder:
    """Rows sorted by window: the squares that a frame is cut into, smaller at its far edges.

    Frames stay in order and together, so windows are stretches of frames. Source: transformers
    `get_vision_window_index`.

    rows: (N,) int64 on the CPU, the number in item order of each row in window order.
    lengths: patches of each window.
    """

    rows: Tensor
    lengths: tuple[int, ...]
    merge: int

    @classmethod
    def of(cls, places: Tensor, frames: list[int], merge: int, side: int) -> WindowOrder:
        """places (P, 2) and ``frames`` of the same images; side: rows along a window's edge."""
        corners = places[:: merge**2] // (merge * side)  # each row's window in its frame, (N, 2)
        rows_of_frames = torch.tensor(frames) // merge**2
        frame = torch.arange(len(frames)).repeat_interleave(rows_of_frames)
        base = int(corners.max()) + 1
        window = (frame * base + corners[:, 0]) * base + corners[:, 1]
        rows = window.argsort(stable=True)
        counts = window[rows].unique_consecutive(return_counts=True)[1]
        return cls(rows, tuple((counts * merge**2).tolist()), merge)

    def sort(self, values: Tensor) -> Tensor:
        """values (P, ...) of patches in item order -> in window order.

        Values of blank patches may be missing at the end: those stay behind all others.
        """
        of_rows = values.unflatten(0, (-1, self.merge**2))
        return of_rows[self.rows[: len(of_rows)].to(values.device)].flatten(0, 1)


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
