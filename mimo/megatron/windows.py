"""Window attention: some layers attend inside whole segments, others inside windows of them.

A window here is a part of a segment in which every token sees every other, such as a square of an
image's patches; tokens are ordered so that each window is a stretch of its segment. The block hands
all its layers one and the same metadata, also when it recomputes them, so that carries both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from mimo.megatron.segments import PackedSegments


@dataclass(kw_only=True)
class WindowedSegments(PackedSegments):
    """Packed segments and, for the layers that want them, the windows that they are cut into."""

    windows: PackedSegments

    @classmethod
    def from_both(
        cls, lengths: Sequence[int], windows: Sequence[int], device: torch.device
    ) -> WindowedSegments:
        """Metadata for segments of these ``lengths`` whose windows have the lengths ``windows``."""
        segments = PackedSegments.from_lengths(lengths, device)
        inner = PackedSegments.from_lengths(windows, device)
        assert sum(inner.lengths) == sum(segments.lengths), "windows must fill the segments"
        return cls(**vars(segments), windows=inner)


class WindowLayer(TransformerLayer):
    """A layer that attends inside windows; must be given `WindowedSegments`."""

    def forward(
        self, *args: Any, packed_seq_params: PackedSegments | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As `TransformerLayer`, with the windows for segments."""
        assert isinstance(packed_seq_params, WindowedSegments), "a window layer needs windows"
        output = super().forward(*args, packed_seq_params=packed_seq_params.windows, **kwargs)
        return cast("tuple[Tensor, Tensor | None]", output)
