"""Kernels of the core attention: the same blocks by SDPA, flash-attn or PyTorch's varlen.

Letters: Q query rows of this rank, T key rows of the lane, N heads, G key/value heads,
D head size, B blocks in one dense call, L and K its longest block's queries and keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from mimo.engines.megatron.segments import AttentionBlocks

Kernel = Callable[[Tensor, Tensor, Tensor, AttentionBlocks, float], Tensor]
"""q (Q, N, D), k and v (T, G, D), blocks, softmax scale -> (Q, N, D)."""

# Causal blocks of a bucket are padded to its longest; a shorter one may waste at most half.
_SHORTEST_TO_LONGEST = 0.5


@dataclass(frozen=True)
class _Bucket:
    """Blocks that run in one dense call; tensors are on the device of q.

    queries (B, L), keys (B, K): int64 rows of q and of k, short blocks padded by repetition.
    num_queries, num_keys: (B,) int64, the real ones.
    take: (rows,) int64 positions in the flattened (B, L) that are real; None when all are.
    square: whether each block has as many keys as queries, so that plain causal masking fits.
    """

    queries: Tensor
    keys: Tensor
    num_queries: Tensor
    num_keys: Tensor
    take: Tensor | None
    square: bool


def _cut_to_window(blocks: AttentionBlocks) -> AttentionBlocks:
    """Pieces of at most ``window`` queries: work then grows with the window, not the block."""
    if blocks.window is None:
        return blocks
    queries, keys = [], []
    for rows, (first, end) in zip(blocks.queries, blocks.keys, strict=True):
        for start in range(0, rows, blocks.window):
            count = min(blocks.window, rows - start)
            last = end - (rows - start - count)
            queries.append(count)
            keys.append((max(first, last - count - blocks.window + 1), last))
    return AttentionBlocks(tuple(queries), tuple(keys), blocks.causal, blocks.window)


def _stretch(first: int, length: int, padded: int) -> Tensor:
    return torch.arange(first, first + padded).clamp_(max=first + length - 1)


@functools.lru_cache(maxsize=64)
def _buckets(
    blocks: AttentionBlocks, device: torch.device
) -> tuple[tuple[_Bucket, ...], Tensor | None]:
    """Group blocks into dense calls; the second value restores the order of the queries.

    Blocks of unequal lengths share a call only if they are causal: their real rows never see the
    padding after them. Kept on the device, because all layers ask for the same.
    """
    blocks = _cut_to_window(blocks)
    q, k = blocks.queries, blocks.key_lengths
    starts = [0, *accumulate(q)]
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
            groups[-1].append(i)
        else:
            groups.append([i])
    buckets, origin = [], []
    for group in groups:
        longest, most_keys = q[group[0]], k[group[0]]
        take = [torch.arange(row * longest, row * longest + q[i]) for row, i in enumerate(group)]
        is_full = all(q[i] == longest for i in group)
        queries = torch.stack([_stretch(starts[i], q[i], longest) for i in group])
        keys = torch.stack([_stretch(blocks.keys[i][0], k[i], most_keys) for i in group])
        buckets.append(
            _Bucket(
                queries=queries.to(device),
                keys=keys.to(device),
                num_queries=torch.tensor([q[i] for i in group], device=device),
                num_keys=torch.tensor([k[i] for i in group], device=device),
                take=None if is_full else torch.cat(take).to(device),
                square=all(k[i] == q[i] for i in group),
            )
        )
        origin += [torch.arange(starts[i], starts[i] + q[i]) for i in group]
    back = torch.argsort(torch.cat(origin)).to(device) if len(q) > 1 else None
    return tuple(buckets), back


def _visible(bucket: _Bucket, window: int | None) -> Tensor:
    """(B, 1, L, K) bool: keys that each query of a causal bucket sees, at least one.

    Built anew in every call: masks of long sequences are too large to keep.
    """
    longest, most_keys = bucket.queries.shape[1], bucket.keys.shape[1]
    device = bucket.queries.device
    row = torch.arange(longest, device=device)[None].minimum(bucket.num_queries[:, None] - 1)
    place = (row + (bucket.num_keys - bucket.num_queries)[:, None])[:, :, None]  # its own key
    key = torch.arange(most_keys, device=device)
    seen = key <= place
    if window is not None:
        seen &= key > place - window
    return seen[:, None]


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """(..., G, D) -> (..., N, D): each key/value head once per query head that reads it."""
    groups = num_heads // x.shape[-2]
    return x.repeat_interleave(groups, dim=-2) if groups > 1 else x


def sdpa(q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scale: float) -> Tensor:
    """Exact attention per block by batched SDPA, on any device and in any dtype.

    Measured on a CPU, 4,096 tokens in 16 segments: 135 ms against 230-7,200 ms for a padded
    mask, a block-diagonal mask or nested tensors.
    """
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    buckets, back = _buckets(blocks, q.device)
    outputs = []
    for bucket in buckets:
        rows = ((q, bucket.queries), (k, bucket.keys), (v, bucket.keys))
        qb, kb, vb = (x[i].transpose(1, 2) for x, i in rows)  # (B, L, N, D) -> (B, N, L, D)
        windowed = blocks.window is not None and blocks.window < bucket.keys.shape[1]
        plain = blocks.causal and bucket.square and not windowed
        masked = blocks.causal and not plain
        out = nn.functional.scaled_dot_product_attention(
            qb,
            kb,
            vb,
            attn_mask=_visible(bucket, blocks.window) if masked else None,
            is_causal=plain,
            scale=scale,
        )
        out = out.transpose(1, 2).flatten(0, 1)
        outputs.append(out if bucket.take is None else out[bucket.take])
    packed = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return packed if back is None else packed[back]


@dataclass(frozen=True)
class _Packed:
    """Blocks as variable-length kernels take them.

    query_bounds, key_bounds: (blocks + 1,) int32. rows: int64 rows of k and v, block by block;
    None when they are all rows in order.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    rows: Tensor | None
    most_queries: int
    most_keys: int
    window_size: tuple[int, int]


@functools.lru_cache(maxsize=64)
def _packed(blocks: AttentionBlocks, device: torch.device) -> _Packed:
    def bounds(lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)

    rows = None
    if not blocks.keys_follow_each_other:
        rows = torch.cat([torch.arange(first, end) for first, end in blocks.keys]).to(device)
    window = (-1, -1)
    if blocks.causal:
        window = (-1 if blocks.window is None else blocks.window - 1, 0)
    return _Packed(
        query_bounds=bounds(blocks.queries),
        key_bounds=bounds(blocks.key_lengths),
        rows=rows,
        most_queries=max(blocks.queries),
        most_keys=max(blocks.key_lengths),
        window_size=window,
    )


def flash_attn(q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scale: float) -> Tensor:
    """flash-attn's variable-length kernel (GPU only)."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    packed = _packed(blocks, q.device)
    if packed.rows is not None:
        k, v = k[packed.rows], v[packed.rows]
    return flash_attn_varlen_func(
        q,
        k,
        v,
        packed.query_bounds,
        packed.key_bounds,
        packed.most_queries,
        packed.most_keys,
        softmax_scale=scale,
        causal=blocks.causal,
        window_size=packed.window_size,
    )


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, blocks: AttentionBlocks, scale: float) -> Tensor:
    """PyTorch's variable-length kernel (GPU only; its backward does not run on a CPU)."""
    from torch.nn.attention.varlen import varlen_attn

    packed = _packed(blocks, q.device)
    if packed.rows is not None:
        k, v = k[packed.rows], v[packed.rows]
    output = varlen_attn(
        q,
        repeat_heads(k, q.shape[1]),
        repeat_heads(v, q.shape[1]),
        packed.query_bounds,
        packed.key_bounds,
        packed.most_queries,
        packed.most_keys,
        scale=scale,
        window_size=packed.window_size,
    )
    assert isinstance(output, Tensor), "varlen_attn was not asked for its log-sum-exp"
    return output


KERNELS: dict[str, Kernel] = {
    "sdpa": sdpa,
    "flash_attn": flash_attn,
    "torch_varlen": torch_varlen,
}
