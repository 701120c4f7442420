"""Window attention: some layers attend inside whole segments, others inside windows of them.

A window here is a part of a segment in which every token sees every other, such as a square of an
image's patches; tokens are ordered so that each window is a stretch of its segment. The block hands
the same metadata to all its layers, also when it recomputes them, so the metadata carries both.

Only core attention chooses between the two. The rotary embedding walks over segments one by one,
and there are many windows, so it keeps to whole segments, which give the same frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from mimo.engines.megatron.layers.attention_plan import LayerForm
from mimo.engines.megatron.segments import PackedSegments


@dataclass(kw_only=True)
class WindowedSegments(PackedSegments):
    """Packed segments and, for the layers that use them, the windows that they are cut into."""

    windows: PackedSegments

    @classmethod
    def from_both(
        cls, lengths: Sequence[int], windows: Sequence[int], device: torch.device
    ) -> WindowedSegments:
        """Metadata for segments of these ``lengths`` whose windows have the lengths ``windows``."""
        segments = PackedSegments.from_lengths(lengths, device)
        inner = PackedSegments.from_lengths(windows, device)
        assert sum(inner.lengths) == sum(segments.lengths), "windows must fill the segments"
        given = {own.name: getattr(segments, own.name) for own in fields(segments) if own.init}
        return cls(**given, windows=inner)

    def prepare(
        self, forms: Iterable[LayerForm], copy: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """For the layers that see whole segments and for those that see windows."""
        forms = tuple(forms)
        super().prepare(forms, copy)
        self.windows.prepare(forms, copy)


class WindowAttention(nn.Module):
    """The core attention of other layers, with windows in place of segments."""

    def __init__(self, core: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.core = core(**options)

    def forward(
        self, *args: Any, packed_seq_params: PackedSegments | None = None, **kwargs: Any
    ) -> Tensor:
        """As the core attention of other layers; must be given `WindowedSegments`."""
        assert isinstance(packed_seq_params, WindowedSegments), "window attention needs windows"
        return self.core(*args, packed_seq_params=packed_seq_params.windows, **kwargs)
