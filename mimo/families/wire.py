"""Patches as they are sent to a tower, which turns them into values on the device; dtypes by name.

Letters: P patches of all items of a forward, C numbers of each, W numbers of each that are sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from data.modalities.processor import WireForm
from mimo.device import send_together


@dataclass(frozen=True)
class WirePatches:
    """The patches of all items of a forward, grouped by form.

    parts: by form, (n, W). offsets: (3, 1, 1) int32, where each channel begins in a table. tables:
    by form, (3 · 256,) float32, or empty. order: (P,) int64, each patch's place in the
    concatenation of all parts; None if there is only one part.
    """

    forms: tuple[WireForm, ...]
    parts: tuple[Tensor, ...]
    offsets: Tensor
    tables: tuple[Tensor, ...]
    order: Tensor | None

    @classmethod
    def of(
        cls,
        items: Sequence[tuple[WireForm, Tensor]],
        join: Callable[[list[Tensor]], Tensor],
        copy: Callable[[Tensor], Tensor],
    ) -> Self:
        """Copy items to the device: the form of each and its patches (n, W), at least one item.

        join: copies the concatenation of host tensors. copy: copies one.
        """
        items = [item for item in items if len(item[1])] or items[:1]
        forms = tuple(dict.fromkeys(form for form, _ in items))
        offsets = torch.arange(0, 3 * 256, 256, dtype=torch.int32)[:, None, None]
        host = [offsets, *(torch.from_numpy(form.table()).flatten() for form in forms)]
        if len(forms) > 1:
            lengths = torch.tensor([len(patches) for _, patches in items])
            kinds = torch.tensor([forms.index(form) for form, _ in items])
            # The patches sorted by form are the parts; each one's place among them is the inverse.
            host.append(kinds.repeat_interleave(lengths).argsort(stable=True).argsort())
        offsets, *rest = send_together(host, copy)
        return cls(
            forms=forms,
            parts=tuple(
                join([patches for form, patches in items if form == kind]) for kind in forms
            ),
            offsets=offsets,
            tables=tuple(rest[: len(forms)]),
            order=rest[-1] if len(forms) > 1 else None,
        )

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return values (P, C) in the order of the items, equal to those of `WireForm.values`."""
        each = zip(self.forms, self.parts, self.tables, strict=True)
        values = [self._values_of(*part, dtype) for part in each]
        return values[0] if self.order is None else torch.cat(values)[self.order]

    def _values_of(self, form: WireForm, part: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        if form.normalise is None:
            return part.to(dtype)
        places = part.view(-1, 3, 1, form.width // 3) + self.offsets
        values = table.to(dtype).index_select(0, places.flatten()).view(places.shape)
        return values.expand(-1, -1, form.repeats, -1).reshape(-1, form.patch_dim)


DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def precision_of(dtype: torch.dtype) -> str:
    """Return the smallest ``train.precision`` that holds every number of this format."""
    # There is none for fp16; fp32 holds all of its numbers.
    wanted = torch.float32 if dtype == torch.float16 else dtype
    return next(name for name, known in DTYPES.items() if known == wanted)
