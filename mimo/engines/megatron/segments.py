"""Packed sequences: which tokens form a segment, and which blocks of attention that gives.

Letters: T packed tokens of a lane, C context-parallel ranks, L rows of a block.

Under context parallelism every segment is cut into 2·C equal chunks, and rank r holds chunk r
followed by chunk 2·C-1-r of each segment in order (zigzag: causal work is even over ranks).
"""

from __future__ import annotations

import copy as copying
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mimo.device import send, send_together

if TYPE_CHECKING:
    from mimo.ops.attention_plan import LayerForm


@dataclass(kw_only=True)
class PackedSegments(PackedSeqParams):
    """Megatron's packed-sequence metadata plus the segment lengths as plain integers.

    The integers spare every layer a device-to-host copy. `lengths` sums to the packed length T,
    that of the whole lane even under context parallelism; padding at the end is a separate segment.
    items: (start, length) in the lane, ascending, of the items whose tokens see each other in both
    directions; empty where attention is merely causal.
    windows: the parts of segments that some layers attend inside; see `WindowAttention`.
    plans: by form, how core attention treats the segments; see `prepare`.
    """

    lengths: tuple[int, ...]
    items: tuple[tuple[int, int], ...] = ()
    windows: PackedSegments | None = None
    # Not handed on by `dataclasses.replace`: its tensors may be on another device.
    plans: dict[LayerForm, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        real: Sequence[int] | None = None,
        items: tuple[tuple[int, int], ...] = (),
    ) -> PackedSegments:
        """Metadata for self-attention over segments of these ``lengths`` (zeros are dropped).

        lengths: tokens of each segment, including padding after its real ones.
        real: without that padding, at most the length; None when there is no padding.
        Megatron's rotary embedding reads the padded bounds, Transformer Engine both.
        """
        real = lengths if real is None else real
        kept = [(int(n), int(m)) for n, m in zip(lengths, real, strict=True) if n > 0]
        assert all(0 <= m <= n for n, m in kept), f"real lengths {real} exceed padded {lengths}"
        padded = tuple(n for n, _ in kept)
        pads = any(m < n for n, m in kept)
        ends = [bounds_of(padded)]
        if pads:
            ends.append(bounds_of([m for _, m in kept]))
        padded_bounds, *rest = send_together(ends, partial(send, device=device))
        bounds = rest[0] if pads else padded_bounds
        longest = max(padded, default=0)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=padded_bounds,
            cu_seqlens_kv_padded=padded_bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            # Set here, else Transformer Engine compares the bounds on the device in every layer.
            pad_between_seqs=pads,
            lengths=padded,
            items=items,
        )

    def prepare(
        self, forms: Iterable[LayerForm], copy: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Plan for the layers of these forms and bring the plans to the device, by one copy.

        A layer whose form is not prepared does so itself; ahead of time, in any thread, it spares
        the layers that work. copy: brings a host tensor to the device, so that it is there before
        the layers run; None for a copy on the current stream.
        """
        forms = dict.fromkeys(forms)
        if self.windows is not None:
            self.windows.prepare(forms, copy)
        missing = [form for form in forms if form not in self.plans]
        if not missing:
            return
        assert self.cu_seqlens_q is not None, "made by from_lengths"
        copy = copy or partial(send, device=self.cu_seqlens_q.device)
        found = tuple(form.plan(self.lengths, self.items) for form in missing)
        self.plans.update(zip(missing, brought(found, copy), strict=True))

    def plan(self, form: LayerForm) -> Any:
        """What layers of this form work by, with tensors on the device."""
        if form not in self.plans:
            self.prepare((form,))
        return self.plans[form]


def bounds_of(lengths: Sequence[int]) -> Tensor:
    """(len(lengths) + 1,) int32: where each stretch of these lengths begins, and the end."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def brought(plan: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    """The same dataclasses, tuples and dicts with all their tensors brought by one ``copy``.

    A tensor that stands in several places stays one tensor.
    """
    tensors = {id(tensor): tensor for tensor in _tensors(plan)}
    sent = dict(zip(tensors, send_together(list(tensors.values()), copy), strict=True))
    return _replaced(plan, sent)


def _tensors(plan: Any) -> Iterator[Tensor]:
    if isinstance(plan, Tensor):
        yield plan
    elif isinstance(plan, tuple):
        for part in plan:
            yield from _tensors(part)
    elif isinstance(plan, dict):
        yield from _tensors(tuple(plan.values()))
    elif is_dataclass(plan):
        for one in fields(plan):
            yield from _tensors(getattr(plan, one.name))


def _replaced(plan: Any, sent: dict[int, Tensor]) -> Any:
    if isinstance(plan, Tensor):
        return sent[id(plan)]
    if isinstance(plan, tuple):
        return tuple(_replaced(part, sent) for part in plan)
    if isinstance(plan, dict):
        return {key: _replaced(part, sent) for key, part in plan.items()}
    if is_dataclass(plan) and not isinstance(plan, type):
        made = copying.copy(plan)
        for one in fields(plan):
            object.__setattr__(made, one.name, _replaced(getattr(plan, one.name), sent))
        return made
    return plan


@dataclass(frozen=True)
class AttentionBlocks:
    """Independent pieces of one attention call, each some queries against a stretch of keys.

    queries: rows of each block; the blocks follow each other in this rank's packed order.
    keys: (first, end) of each block's keys in the whole lane's packed order.
    The last query of a block stands on its last key, the query before on the key before, and so
    on. With `causal` no query sees a later key.
    window: how many keys a query sees of those up to its own, its own included; None for all.
    Where neither is set, every query sees every key, wherever they stand.
    """

    queries: tuple[int, ...]
    keys: tuple[tuple[int, int], ...]
    causal: bool
    window: int | None = None

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Number of keys of each block."""
        return tuple(end - first for first, end in self.keys)

    @property
    def keys_follow_each_other(self) -> bool:
        """Whether the blocks' keys laid end to end are the lane's keys themselves."""
        ends = [0, *(end for _, end in self.keys)]
        return all(first == end for (first, _), end in zip(self.keys, ends, strict=False))


def held_chunks(
    lengths: tuple[int, ...], cp_size: int, cp_rank: int
) -> Iterator[tuple[range, range]]:
    """The chunks that a rank holds, in its order: the tokens of the segment, and of the chunk.

    Without context parallelism a segment is one chunk.
    Raises ValueError for a segment that 2·cp does not divide.
    """
    start, multiple = 0, 2 * cp_size if cp_size > 1 else 1
    for length in lengths:
        if length % multiple:
            raise ValueError(
                f"language.grid.cp = {cp_size}: a segment of {length} tokens is not a multiple of "
                f"2·cp = {multiple}; pad it to {-(-length // multiple) * multiple}"
            )
        chunk = length // multiple
        for which in (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank):
            first = start + which * chunk
            yield range(start, start + length), range(first, first + chunk)
        start += length


def attention_blocks(
    lengths: tuple[int, ...], causal: bool, window: int | None, cp_size: int, cp_rank: int
) -> AttentionBlocks:
    """What rank ``cp_rank`` of ``cp_size`` computes for segments of these padded ``lengths``.

    One block per chunk held. Raises ValueError for a segment that 2·cp does not divide.
    """
    assert causal or window is None, "a sliding window needs causal attention"
    queries: list[int] = []
    keys: list[tuple[int, int]] = []
    for segment, own in held_chunks(lengths, cp_size, cp_rank):
        oldest = segment.start if window is None else own.start - window + 1
        queries.append(len(own))
        keys.append((max(segment.start, oldest), own.stop if causal else segment.stop))
    return AttentionBlocks(tuple(queries), tuple(keys), causal, window)


@functools.lru_cache(maxsize=256)
def zigzag_indices(lengths: tuple[int, ...], cp_size: int, cp_rank: int) -> Tensor:
    """Positions in the lane that a context-parallel rank holds, in its order: (T/cp,) int64.

    The same as Transformer Engine's `thd_get_partitioned_indices`.
    lengths: of the segments, padded. Raises ValueError for one that 2·cp does not divide.
    """
    own = [torch.arange(c.start, c.stop) for _, c in held_chunks(lengths, cp_size, cp_rank)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *own])


@dataclass(frozen=True)
class LaneOrder:
    """Both ways between the lane and the shares of all context-parallel ranks laid end to end.

    to_lane: (T,) int64, where each token of the lane stands in the shares. to_shares: the inverse.
    """

    to_lane: Tensor
    to_shares: Tensor


def zigzag_order(lengths: tuple[int, ...], cp_size: int) -> LaneOrder:
    """Host tensors. Raises ValueError for a segment that 2·cp does not divide."""
    shares = torch.cat([zigzag_indices(lengths, cp_size, rank) for rank in range(cp_size)])
    return LaneOrder(to_lane=torch.argsort(shares), to_shares=shares)
