"""Kernels of core attention: SDPA, flash-attn and PyTorch's varlen on the same blocks.

Letters: Q query rows of a call, T key rows of the lane, N heads, G key/value heads,
D head size, B blocks in one dense call, L and K its longest block's queries and keys.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mimo.ops.segments import bounds_of, gather_rows

# Causal blocks of a bucket are padded to its longest; a shorter one wastes at most half.
_SHORTEST_TO_LONGEST = 0.5
# Queries times keys of a dense mask, which PyTorch converts to the inputs' dtype. A block with more
# is cut into pieces of its queries.
LARGEST_MASK = 2**24


@dataclass(frozen=True)
class AttentionBlocks:
    """The independent blocks of one attention call: some queries against a stretch of keys each.

    queries: number of each block's queries; blocks follow each other in this rank's packed order.
    keys: (first, end) of each block's keys in the whole lane's packed order. The last query of a
        block stands on its last key, the query before on the key before, and so on.
    causal: no query sees a later key. window: keys that a query sees up to its own, included; None
        for all. With neither, every query of a block sees every key.
    """

    queries: tuple[int, ...]
    keys: tuple[tuple[int, int], ...]
    causal: bool
    window: int | None = None

    @property
    def key_lengths(self) -> tuple[int, ...]:
        return tuple(end - first for first, end in self.keys)


@dataclass(frozen=True)
class Bucket:
    """Blocks that run in one dense call.

    queries (B, L), keys (B, K): int64 rows of q and of k, short blocks padded by repetition; None
    if they are all rows in order. num_queries, num_keys: (B,) int64, without padding.
    take: int64 positions in the flattened (B, L) that are no padding; None if all are.
    size: B, L and K. masked: whether it needs a mask.
    """

    queries: Tensor | None
    keys: Tensor | None
    num_queries: Tensor
    num_keys: Tensor
    take: Tensor | None
    size: tuple[int, int, int]
    masked: bool


@dataclass(frozen=True)
class DenseBlocks:
    """Blocks for SDPA. back: (Q,) int64 restores the order of queries; None if it is right."""

    buckets: tuple[Bucket, ...]
    back: Tensor | None
    causal: bool
    window: int | None


def _cut(blocks: AttentionBlocks) -> AttentionBlocks:
    """Cut causal blocks that need masks into pieces of their queries.

    With a window, a piece has at most that many queries: work grows with the window, not the block.
    """
    if not blocks.causal:
        return blocks
    window = blocks.window
    queries, keys = [], []
    for rows, (first, end) in zip(blocks.queries, blocks.keys, strict=True):
        piece = rows
        if window is not None:
            piece = min(window, max(1, LARGEST_MASK // (2 * window)))
        elif end - first != rows:
            piece = max(1, LARGEST_MASK // (end - first))
        for start in range(0, rows, piece):
            count = min(piece, rows - start)
            last = end - (rows - start - count)
            queries.append(count)
            oldest = first if window is None else max(first, last - count - window + 1)
            keys.append((oldest, last))
    return AttentionBlocks(tuple(queries), tuple(keys), blocks.causal, window)


def _stretch(first: int, length: int, padded: int) -> Tensor:
    return torch.arange(first, first + padded).clamp_(max=first + length - 1)


def _unless_in_order(rows: Tensor, num_rows: int) -> Tensor | None:
    flat = rows.flatten()
    return None if torch.equal(flat, torch.arange(num_rows)) else rows


def _grouped(blocks: AttentionBlocks) -> list[list[int]]:
    """Choose which blocks share a dense call.

    Blocks of one size; also unequal causal ones, whose rows never see the padding after them, if
    they need no mask larger than the limit.
    """
    q, k = blocks.queries, blocks.key_lengths
    order = sorted(range(len(q)), key=lambda i: (k[i] == q[i], -k[i], -q[i], i))
    groups: list[list[int]] = []
    for i in order:
        first = groups[-1][0] if groups else None
        if first is not None and (
            (q[i], k[i]) == (q[first], k[first])
            or (
                blocks.causal
                and (k[i] == q[i]) == (k[first] == q[first])
                and k[i] >= _SHORTEST_TO_LONGEST * k[first]
                and _SHORTEST_TO_LONGEST <= q[i] / q[first] <= 1
            )
        ):
            mask = (len(groups[-1]) + 1) * q[first] * k[first]
            if mask <= LARGEST_MASK or not _needs_mask(blocks, q[first], k[first]):
                groups[-1].append(i)
                continue
        groups.append([i])
    return groups


def _needs_mask(blocks: AttentionBlocks, queries: int, keys: int) -> bool:
    windowed = blocks.window is not None and blocks.window < keys
    return windowed or (blocks.causal and queries != keys)


def dense_blocks(blocks: AttentionBlocks) -> DenseBlocks:
    """Group blocks into dense calls; host tensors."""
    num_rows, num_keys = sum(blocks.queries), max((end for _, end in blocks.keys), default=0)
    blocks = _cut(blocks)
    q, k = blocks.queries, blocks.key_lengths
    starts = [0, *accumulate(q)]
    buckets, origin = [], []
    for group in _grouped(blocks):
        longest, most_keys = q[group[0]], k[group[0]]
        take = [torch.arange(row * longest, row * longest + q[i]) for row, i in enumerate(group)]
        is_full = all(q[i] == longest for i in group)
        queries = torch.stack([_stretch(starts[i], q[i], longest) for i in group])
        keys = torch.stack([_stretch(blocks.keys[i][0], k[i], most_keys) for i in group])
        buckets.append(
            Bucket(
                queries=_unless_in_order(queries, num_rows),
                keys=_unless_in_order(keys, num_keys),
                num_queries=torch.tensor([q[i] for i in group]),
                num_keys=torch.tensor([k[i] for i in group]),
                take=None if is_full else torch.cat(take),
                size=(len(group), longest, most_keys),
                masked=_needs_mask(blocks, longest, most_keys),
            )
        )
        origin += [torch.arange(starts[i], starts[i] + q[i]) for i in group]
    back = _unless_in_order(torch.argsort(torch.cat(origin)), num_rows) if origin else None
    return DenseBlocks(tuple(buckets), back, blocks.causal, blocks.window)


def _visible(bucket: Bucket, blocks: DenseBlocks) -> Tensor:
    """(B, 1, L, K) bool: the keys that each query of a bucket sees.

    Built in every call, because masks of long sequences are too large to keep.
    """
    _, longest, most_keys = bucket.size
    device = bucket.num_keys.device
    row = torch.arange(longest, device=device)[None].minimum(bucket.num_queries[:, None] - 1)
    place = (row + (bucket.num_keys - bucket.num_queries)[:, None])[:, :, None]  # its own key
    key = torch.arange(most_keys, device=device)
    if blocks.window is None:
        return (key <= place)[:, None]
    seen = key > place - blocks.window
    return (seen & (key <= place) if blocks.causal else seen)[:, None]


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """(..., G, D) -> (..., N, D): each key/value head once per query head that reads it."""
    groups = num_heads // x.shape[-2]
    return x.repeat_interleave(groups, dim=-2) if groups > 1 else x


def _batch(x: Tensor, rows: Tensor | None, batch: int, length: int) -> Tensor:
    """Rows of x (T, ...) as (B, L, ...)."""
    flat = x[: batch * length] if rows is None else gather_rows(x, rows.flatten())
    return flat.unflatten(0, (batch, length))


def sdpa(q: Tensor, k: Tensor, v: Tensor, blocks: DenseBlocks, scale: float) -> Tensor:
    """Attend per block by batched SDPA, on any device and in any dtype.

    Key/value heads are repeated: for groups, PyTorch would fall back to a kernel that builds all
    scores in fp32, with masks and on older GPUs.
    """
    outputs = []
    for bucket in blocks.buckets:
        batch, longest, most_keys = bucket.size
        qb = _batch(q, bucket.queries, batch, longest)
        kb, vb = (
            repeat_heads(_batch(x, bucket.keys, batch, most_keys), q.shape[1]) for x in (k, v)
        )
        out = nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (qb, kb, vb)),  # (B, L, N, D) -> (B, N, L, D)
            attn_mask=_visible(bucket, blocks) if bucket.masked else None,
            is_causal=blocks.causal and not bucket.masked,
            scale=scale,
        )
        out = out.transpose(1, 2).flatten(0, 1)
        outputs.append(out if bucket.take is None else out.index_select(0, bucket.take))
    packed = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return packed if blocks.back is None else packed.index_select(0, blocks.back)


@dataclass(frozen=True)
class VarlenBlocks:
    """Blocks for variable-length kernels.

    query_bounds, key_bounds: (blocks + 1,) int32, one tensor if they are equal.
    rows: int64 rows of k and v, block by block; None if they are all rows in order.
    window: keys that a query sees before and after its own; -1 for all.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    rows: Tensor | None
    most_queries: int
    most_keys: int
    window: tuple[int, int]
    causal: bool

    def arguments(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        """Return the first arguments of variable-length kernels. k, v: (T, G, D) of the lane."""
        if self.rows is not None:
            k, v = gather_rows(k, self.rows), gather_rows(v, self.rows)
        return q, k, v, self.query_bounds, self.key_bounds, self.most_queries, self.most_keys


def varlen_blocks(blocks: AttentionBlocks) -> VarlenBlocks:
    """Bring blocks into the form of variable-length kernels; host tensors."""
    query_bounds = bounds_of(blocks.queries)
    is_square = blocks.queries == blocks.key_lengths
    rows = None
    ends = [0, *(end for _, end in blocks.keys)]
    if [first for first, _ in blocks.keys] != ends[:-1]:  # else they are the lane's, in order
        rows = torch.cat([torch.arange(first, end) for first, end in blocks.keys])
    return VarlenBlocks(
        query_bounds=query_bounds,
        key_bounds=query_bounds if is_square else bounds_of(blocks.key_lengths),
        rows=rows,
        most_queries=max(blocks.queries),
        most_keys=max(blocks.key_lengths),
        window=(-1 if blocks.window is None else blocks.window - 1, 0 if blocks.causal else -1),
        causal=blocks.causal,
    )


def flash_attn(
    module: str, q: Tensor, k: Tensor, v: Tensor, blocks: VarlenBlocks, scale: float
) -> Tensor:
    """Attend by flash-attn's variable-length kernel in this module (GPU only)."""
    output = importlib.import_module(module).flash_attn_varlen_func(
        *blocks.arguments(q, k, v),
        softmax_scale=scale,
        causal=blocks.causal,
        window_size=blocks.window,
    )
    # Early releases of version 3 also return the log-sum-exp.
    return output[0] if isinstance(output, tuple) else output


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, blocks: VarlenBlocks, scale: float) -> Tensor:
    """Attend by PyTorch's variable-length kernel, always its flash-attn 2 (GPU only).

    It would prefer cuDNN on capability 9 and 10, which makes a plan for each new shape
    (pytorch#191576: 42 to 70 ms of the host).
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # the backward uses the forward's
        output = varlen_attn(
            *blocks.arguments(q, k, v),
            scale=scale,
            window_size=blocks.window,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    assert isinstance(output, Tensor), "varlen_attn was not asked for its log-sum-exp"
    return output


class Kernel(NamedTuple):
    """prepare: turns blocks into the kernel's form, frozen dataclasses of host tensors.

    attend: q (Q, N, D), k and v (T, G, D), this form on the device, softmax scale -> (Q, N, D).
    """

    prepare: Callable[[AttentionBlocks], Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]


KERNELS = {
    "sdpa": Kernel(dense_blocks, sdpa),
    "flash_attn_2": Kernel(varlen_blocks, partial(flash_attn, "flash_attn")),
    "flash_attn_3": Kernel(varlen_blocks, partial(flash_attn, "flash_attn_interface")),
    "torch_varlen": Kernel(varlen_blocks, torch_varlen),
}
