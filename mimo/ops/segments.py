"""Packed sequences: the segments of a lane, and which of its tokens a rank holds.

Under context parallelism every segment is cut into 2·C equal chunks, and rank r holds chunk r
followed by chunk 2·C-1-r of each segment in order (zigzag: causal work is even over ranks).

Letters: T packed tokens of a lane, C context-parallel ranks, S sequence of this rank, B batch (1
when packed), H hidden, n chosen tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.device import send, send_together


class Form(Protocol):
    """A form of layer: all that its plan depends on besides the segments. Hashable."""

    def plan_of(self, segments: PackedSegments) -> Any:
        """Return the plan in host tensors: dataclasses, tuples and dicts."""
        ...


@dataclass(kw_only=True)
class PackedSegments:
    """The segments of a packed sequence, as tensors and as plain integers.

    lengths: tokens of each segment; they sum to the packed length T of the whole lane, even under
        context parallelism. Padding at the end is a segment, too.
    sample_tokens: tokens of each segment that are no padding.
    items: (start, length) in the lane, ascending, of items whose tokens see each other in both
        directions.
    windows: the parts of segments that some layers attend inside; see `WindowAttention`.
    plans: the plan of each form of layer, of its attention or of its experts.

    Layers of Megatron and Transformer Engine read the other fields, those of Megatron's
    `PackedSeqParams`. Bounds are (segments + 1,) int32.
    """

    lengths: tuple[int, ...]
    sample_tokens: tuple[int, ...]
    items: tuple[tuple[int, int], ...] = ()
    windows: PackedSegments | None = None
    # Not copied by `dataclasses.replace`: its tensors may be on another device.
    plans: dict[Form, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    qkv_format: str = "thd"
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    cu_seqlens_q_padded: Tensor
    cu_seqlens_kv_padded: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    pad_between_seqs: bool
    local_cp_size: None = None
    cp_group: None = None
    total_tokens: None = None
    seq_idx: None = None
    tokens_per_sample: None = None

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        real: Sequence[int] | None = None,
        items: tuple[tuple[int, int], ...] = (),
        tail: int = 0,
    ) -> PackedSegments:
        """Build it from ``lengths``, padding included; empty segments are dropped.

        real: lengths without padding; None if there is no padding. Megatron's rotary embedding
        reads the padded bounds, Transformer Engine both. tail: length of the last segment if it is
        nothing but padding; attention takes it for real.
        """
        real = lengths if real is None else real
        kept = [(int(n), int(m)) for n, m in zip(lengths, real, strict=True) if n > 0]
        padded = tuple(n for n, _ in kept)
        pads = any(m < n for n, m in kept)
        host_bounds = bounds_of(padded), bounds_of([m for _, m in kept])
        padded_bounds, *real_bounds = send_together(
            host_bounds[: 1 + pads], partial(send, device=device)
        )
        bounds = real_bounds[0] if pads else padded_bounds
        longest = max(padded, default=0)
        return cls(
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=padded_bounds,
            cu_seqlens_kv_padded=padded_bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            # Else Transformer Engine compares the bounds on the device in every layer.
            pad_between_seqs=pads,
            lengths=padded,
            sample_tokens=(*(m for _, m in kept[:-1]), 0) if tail else tuple(m for _, m in kept),
            items=items,
        )

    def prepare(
        self, forms: Iterable[Form], copy: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Make the plans for layers of these forms ahead, in any thread.

        copy: brings a host tensor to the device before the layers run, called once; None for a copy
            on the current stream.
        """
        forms = dict.fromkeys(forms)
        if self.windows is not None:
            self.windows.prepare(forms, copy)
        missing = [form for form in forms if form not in self.plans]
        if not missing:
            return
        copy = copy or partial(send, device=self.cu_seqlens_q.device)
        host_plans = tuple(form.plan_of(self) for form in missing)
        self.plans.update(zip(missing, to_device(host_plans, copy), strict=True))

    def plan(self, form: Form) -> Any:
        """Return the plan for layers of this form on the device; make it if it is missing."""
        if form not in self.plans:
            self.prepare((form,))
        return self.plans[form]


def bounds_of(lengths: Sequence[int]) -> Tensor:
    """Return (len(lengths) + 1,) int32: where each stretch begins, and the end of the last."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def to_device(plan: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    """Return the same dataclasses, tuples and dicts, with all tensors sent by one ``copy``.

    A tensor in several places stays one tensor.
    """
    tensors = {id(tensor): tensor for tensor in _tensors(plan)}
    sent = send_together(list(tensors.values()), copy)
    return deepcopy(plan, dict(zip(tensors, sent, strict=True)))


def _tensors(plan: Any) -> Iterator[Tensor]:
    if isinstance(plan, Tensor):
        yield plan
    elif isinstance(plan, tuple):
        for part in plan:
            yield from _tensors(part)
    elif isinstance(plan, dict):
        yield from _tensors(tuple(plan.values()))
    elif is_dataclass(plan):
        for item in fields(plan):
            yield from _tensors(getattr(plan, item.name))


def held_chunks(
    lengths: tuple[int, ...], cp_size: int, cp_rank: int
) -> Iterator[tuple[range, range]]:
    """Yield (tokens of the segment, tokens of the chunk) for each chunk of a rank, in its order.

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
        for number in (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank):
            first = start + number * chunk
            yield range(start, start + length), range(first, first + chunk)
        start += length


@functools.lru_cache(maxsize=256)
def zigzag_indices(lengths: tuple[int, ...], cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions in the lane that a rank holds, in its order: (T/cp,) int64.

    Equals Transformer Engine's `thd_get_partitioned_indices`. lengths: of the segments, padded.
    Raises ValueError for one that 2·cp does not divide.
    """
    chunks = [torch.arange(c.start, c.stop) for _, c in held_chunks(lengths, cp_size, cp_rank)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *chunks])


@dataclass(frozen=True)
class LaneOrder:
    """The permutation between a lane and the joined shares of its context-parallel ranks.

    to_lane: (T,) int64, each lane token's index in the shares. to_shares: the inverse.
    """

    to_lane: Tensor
    to_shares: Tensor


def zigzag_order(lengths: tuple[int, ...], cp_size: int) -> LaneOrder:
    """Return host tensors. Raises ValueError for a segment that 2·cp does not divide."""
    shares = torch.cat([zigzag_indices(lengths, cp_size, rank) for rank in range(cp_size)])
    return LaneOrder(to_lane=torch.argsort(shares), to_shares=shares)


@dataclass(frozen=True)
class LaneForm:
    """The form of layers whose plan is the order of the lane."""

    cp_size: int

    def plan_of(self, segments: PackedSegments) -> LaneOrder:
        return zigzag_order(segments.lengths, self.cp_size)


def gather_lane(share: Tensor, order: LaneOrder, group: dist.ProcessGroup) -> Tensor:
    """This rank's zigzag share (T/C, ...) -> the whole lane's tokens (T, ...) in packed order.

    Every rank of the group calls it and takes part in its backward, which returns the sum of all
    ranks' gradients of this rank's share. order: on the device of ``share``.
    """
    whole, expected = share.shape[0] * group.size(), len(order.to_lane)
    assert expected == whole, f"{expected} tokens in segments, {whole} on the ranks"
    return cast("Tensor", _GatherLane.apply(share, order, group))


class _GatherLane(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, order: LaneOrder, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.order = group, order
        gathered = share.new_empty(share.shape[0] * group.size(), *share.shape[1:])
        dist.all_gather_into_tensor(gathered, share.contiguous(), group=group)
        return gathered.index_select(0, order.to_lane)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (whole,) = gradients
        by_rank = whole.index_select(0, ctx.order.to_shares)
        share = whole.new_empty(whole.shape[0] // ctx.group.size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(share, by_rank, group=ctx.group)
        return share, None, None


def insert_embeddings(text: Tensor, embeddings: Tensor, positions: Tensor) -> Tensor:
    """text (S, B, H), embeddings (n, H), positions (n,) int64 local -> (S, B, H).

    Position b·S + s is token s of sequence b. The text embedding of a placeholder gets no gradient,
    the embedding placed there does. Even with n = 0 the result depends on ``embeddings``, so that a
    backward reaches the bridge. Raises ValueError if their numbers differ.
    """
    if embeddings.shape[0] != positions.shape[0]:
        raise ValueError(
            f"{embeddings.shape[0]} embeddings arrived for {positions.shape[0]} positions"
        )
    places = sequence_first(positions, text)
    flat = text.flatten(0, 1).index_copy(0, places, embeddings.to(text.dtype))
    return flat.view(text.shape)


def sequence_first(positions: Tensor, hidden: Tensor) -> Tensor:
    """Positions b·S + s in a batch -> s·B + b, indices into ``hidden`` (S, B, H) flattened."""
    length, batch = hidden.shape[:2]
    return positions if batch == 1 else positions % length * batch + positions // length


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x (T, ...), rows (n,) int64 on its device, with repetitions -> (n, ...).

    The gradient of a 16-bit row is summed in fp32: a GPU would round after every addition. Unlike
    the gradient of ``x[rows]`` it needs no sorting; on a GPU its order is not fixed, unless PyTorch
    uses deterministic algorithms.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x.index_select(0, rows)
    return cast("Tensor", _GatherRows.apply(x, rows))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.num_rows = rows, x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sum_rows(gradients[0], ctx.rows, ctx.num_rows), None


def sum_rows(x: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """x (n, ...), rows (n,) int64 on its device -> (num_rows, ...), sums over equal ``rows``.

    The adjoint of `gather_rows`. 16-bit values are summed in fp32; a GPU sums in no fixed order.
    """
    return cast("Tensor", _SumRows.apply(x, rows, num_rows))


class _SumRows(torch.autograd.Function):
    """Sum of rows that, unlike `index_add`, keeps nothing of ``x`` for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, num_rows: int) -> Tensor:
        ctx.rows = rows
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.new_zeros((num_rows, *x.shape[1:]), dtype=wide)
        return total.index_add_(0, rows, x.to(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.rows), None, None
