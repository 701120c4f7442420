"""The gated delta rule and its causal convolution inside packed segments.

A head's state S (D, E) maps keys to values. A token decays it, corrects the value that it holds for
the token's key by a share β, and reads it with the token's query:
    S ← exp(g) S,    S ← S + k (β (v - Sᵀ k))ᵀ,    o = Sᵀ q
Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464). The corrections y
of a chunk of tokens solve one triangular system (Yang et al. 2024, arXiv 2406.06484), so only the
states S between chunks are computed one after the other. With c, the sum of g since the chunk
began, and the last token's c':
    (I + A) y = β (v - exp(c) k S),    A_ij = β_i exp(c_i - c_j) k_i·k_j for j < i
    o = exp(c) q S + P y,              P_ij = exp(c_i - c_j) q_i·k_j     for j ≤ i
    S ← exp(c') S + kᵀ (exp(c' - c) y)

Letters: T packed tokens, K key heads, V value heads, R = V/K, D and E sizes of a key and a value;
n chunks, C tokens of a chunk or channels of a convolution, m segments, W window of a convolution.
"""

import functools
import importlib
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mimo.device import send
from mimo.ops.acceleration import FLA, delta_rule_kernel
from mimo.ops.segments import bounds_of

CHUNK = 32
"""Tokens of a chunk at most; a power of two. On a CPU 64 takes 1.15 times as long."""

_TOKENS_AT_ONCE = 512  # of a stretch, before heads; more cost memory. Not tuned on a GPU


@dataclass(frozen=True)
class Stretch:
    """Consecutive chunks of a few segments, which advance together.

    sizes: segments at each step, then those that go on in the next stretch. The segments of a step
        are the first of those of the step before.
    tokens: (n, C) int64, step by step; a chunk that is not full repeats its last token.
    real, rows: int64 places in the flattened ``tokens`` that are no repetition, and their tokens.
    """

    sizes: tuple[int, ...]
    tokens: Tensor
    real: Tensor
    rows: Tensor

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x (T, ...) -> (n, C, ...)."""
        return x.index_select(0, self.tokens.flatten()).to(dtype).unflatten(0, self.tokens.shape)

    def scatter(self, chunks: Tensor, target: Tensor) -> None:
        """Copy chunks (n, C, ...) without repetitions to their rows of ``target`` (T, ...)."""
        real = chunks.flatten(0, 1).index_select(0, self.real)
        target.index_copy_(0, self.rows, real.to(target.dtype))

    def gather_gradient(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x (T, ...) -> (n, C, ...), zero at repetitions."""
        chunks = x.new_zeros(self.tokens.numel(), *x.shape[1:], dtype=dtype)
        chunks.index_copy_(0, self.real, x.index_select(0, self.rows).to(dtype))
        return chunks.unflatten(0, self.tokens.shape)


@functools.lru_cache(maxsize=64)
def stretches(lengths: tuple[int, ...], chunk: int, device: torch.device) -> tuple[Stretch, ...]:
    """Cut segments into stretches, each about the square root of its segments' chunks long.

    A state is kept only where a stretch begins, and a backward recomputes one stretch at a time.
    Segments of about the same length go together. The chunks of a short segment are short.
    """
    bounds = bounds_of(lengths).tolist()
    segments = [range(start, end) for start, end in pairwise(bounds)]
    segments = sorted(filter(None, segments), key=len, reverse=True)
    cut = []
    while segments:
        size = min(chunk, 1 << (len(segments[0]) - 1).bit_length())
        num_steps = -(-len(segments[0]) // size)
        num_together = math.ceil(math.sqrt(num_steps))
        width = max(1, _TOKENS_AT_ONCE // (num_together * size))
        group = [segment for segment in segments[:width] if len(segment) > size // 2]
        segments = segments[len(group) :]
        counts = [sum(len(s) > step * size for s in group) for step in range(num_steps + 1)]
        for first in range(0, num_steps, num_together):
            last = min(first + num_together, num_steps)
            chunks = [
                segment[step * size : (step + 1) * size]
                for step in range(first, last)
                for segment in group[: counts[step]]
            ]
            starts, ends = torch.tensor([(c.start, c.stop) for c in chunks]).T[..., None]
            tokens = starts + torch.arange(size)
            real = (tokens < ends).flatten().nonzero()[:, 0]
            tokens = tokens.minimum(ends - 1)
            indices = (tokens, real, tokens.flatten()[real])
            sizes = tuple(counts[first : last + 1])
            cut.append(Stretch(sizes, *(send(x, device) for x in indices)))
    return tuple(cut)


def _advance(
    sizes: tuple[int, ...],
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the chunks of a stretch, all of one dtype; return outputs and the state after them.

    sizes: of the `Stretch`. state: (m, K, D, R·E); m = 0 in a stretch where its segments begin.
    query, key: (n, C, K, D). value and the outputs: (n, C, V, E). log_decay, beta: (n, C, V).
    """
    C, K, D = key.shape[1:]
    R = value.shape[2] // K
    both = torch.cat([key, query], dim=1).transpose(1, 2).contiguous()  # (n, K, 2C, D)
    both = both * (both.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    key, query = both.split(C, dim=2)
    # From here on (n, K, R, C, ...).
    value = value.unflatten(2, (K, R)).permute(0, 2, 3, 1, 4)
    beta, log_decay = (x.unflatten(2, (K, R)).permute(0, 2, 3, 1) for x in (beta, log_decay))
    beta, total = beta[..., None], log_decay.cumsum(-1)[..., None]
    # An exponent that is always 0 is left out of autograd: its gradient is 0, but rounding noise
    # would exceed the whole gradient of a fast decay.
    decay, ends = total.exp(), total[..., -1:, :] - total[..., :-1, :]
    until_end = functional.pad(ends, (0, 0, 0, 1)).exp()
    # Above the diagonal the exponents are positive, and might overflow.
    later = torch.ones(C, C, dtype=torch.bool, device=key.device).triu(1)
    itself = torch.eye(C, dtype=torch.bool, device=key.device)
    ratio = (total - total.mT).masked_fill(itself, 0.0).masked_fill(later, -torch.inf).exp()
    inverse = torch.linalg.solve_triangular(  # of I + A, as it ignores the diagonal
        beta * ratio * (key @ key.mT)[:, :, None],
        torch.eye(C, dtype=key.dtype, device=key.device),
        upper=False,
        unitriangular=True,
    )
    scores = ratio * (query @ key.mT)[:, :, None]
    tensors = (both, value, beta, decay, until_end, inverse, scores)
    steps = zip(*(x.split(list(sizes[:-1])) for x in tensors), sizes[1:], strict=True)
    outputs = []
    for both, value, beta, decay, until_end, inverse, scores, kept in steps:
        has_state, error, inter = len(state) > 0, value, None
        if has_state:
            # All value heads of a key head at once, so that keys and queries are not repeated.
            read_key, read_query = _by_value_head(both @ state, R).split(C, dim=3)
            error, inter = value - decay * read_key, decay * read_query
        change = inverse @ (beta * error)
        output = scores @ change
        outputs.append(output if inter is None else output + inter)
        following = both[:kept, :, :C].mT @ _by_key_head((until_end * change)[:kept])
        if has_state:
            faded = _by_value_head(state[:kept], R) * decay[:kept, ..., -1:, :]
            following = following + _by_key_head(faded)
        state = following
    output = torch.cat(outputs).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return output * D**-0.5, state


def _by_value_head(x: Tensor, num_heads: int) -> Tensor:
    """(m, K, D, R·E) -> (m, K, R, D, E)."""
    return x.unflatten(3, (num_heads, -1)).transpose(2, 3)


def _by_key_head(x: Tensor) -> Tensor:
    """(m, K, R, D, E) -> (m, K, D, R·E)."""
    return x.transpose(2, 3).flatten(3)


class _DeltaRule(torch.autograd.Function):
    """Keeps its inputs, and a state where a stretch begins."""

    @staticmethod
    def forward(ctx: Any, lengths: tuple[int, ...], chunk: int, *inputs: Tensor) -> Tensor:
        _, key, value, _, _ = inputs
        (K, D), (V, E) = key.shape[1:], value.shape[1:]
        wide = torch.promote_types(value.dtype, torch.float32)
        ctx.stretches = stretches(lengths, chunk, value.device)
        state = value.new_zeros(0, K, D, V // K * E, dtype=wide)
        output, states = torch.empty_like(value), []
        for stretch in ctx.stretches:
            states.append(state)
            chunks = (stretch.gather(x, wide) for x in inputs)
            out, state = _advance(stretch.sizes, state, *chunks)
            stretch.scatter(out, output)
        ctx.save_for_backward(*inputs, *states, state)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, (*states, grad_state) = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        totals = [torch.empty_like(x) for x in inputs]
        for stretch, state in zip(reversed(ctx.stretches), reversed(states), strict=True):
            chunks = (stretch.gather(x, state.dtype) for x in inputs)
            leaves = [x.detach().requires_grad_() for x in (state, *chunks)]
            with torch.enable_grad():
                outputs = _advance(stretch.sizes, *leaves)
            grad_output = stretch.gather_gradient(gradients[0], state.dtype)
            grad_state, *parts = torch.autograd.grad(
                outputs, leaves, (grad_output, grad_state), materialize_grads=True
            )
            for part, total in zip(parts, totals, strict=True):
                stretch.scatter(part, total)
        return None, None, *totals


@functools.lru_cache(maxsize=64)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Bounds of segments on the device and on the host, int64, copied once for all layers."""
    host = bounds_of([length for length in lengths if length]).long()
    return send(host, device), host


def _by_fla(*inputs: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Apply the kernels of flash-linear-attention (GPU only)."""
    bounds, host_bounds = _bounds(lengths, inputs[0].device)
    output, _ = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule(
        *(x[None] for x in inputs),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds,
        cu_seqlens_cpu=host_bounds,
    )
    return output[0]


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    lengths: tuple[int, ...],
) -> Tensor:
    """Apply the gated delta rule inside each packed segment.

    query, key: (T, K, D), L2-normalised inside; the query is then scaled by D ** -0.5.
    value: (T, V, E); value head h reads key head h // R.
    log_decay: (T, V) fp32 (fp64 for an fp64 model), at most 0. beta: (T, V).
    lengths: tokens of each segment, which sum to T; each begins with a state of zero.
    Returns (T, V, E) in the dtype of ``value``. PyTorch's form computes in fp32 (fp64 for fp64),
    the kernels of flash-linear-attention partly in the dtype of ``value``.
    """
    inputs = query, key, value, log_decay, beta
    if len(value) and delta_rule_kernel(key.shape[2], value.dtype) == FLA:
        return _by_fla(*inputs, lengths=lengths)
    return cast("Tensor", _DeltaRule.apply(lengths, CHUNK, *inputs))


def segment_conv(x: Tensor, weight: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """x (T, C), weight (C, W) -> (T, C): causal depthwise convolution in each segment, then SiLU.

    lengths: tokens of each segment, which sum to T; zeros precede a segment's first token.
    """
    if not len(x):
        return functional.silu(x * weight[:, -1])
    C, W = weight.shape
    parts = [segment for segment in x.split(lengths) if len(segment)]
    padding = x.new_zeros(W - 1, C)
    padded = torch.cat([rows for segment in parts for rows in (padding, segment)])
    # As an image of one column, channels last: two-dimensional kernels need no copy of it.
    image = padded.T[None, ..., None].contiguous(memory_format=torch.channels_last)
    y = functional.conv2d(image, weight[:, None, :, None], groups=C)[0, ..., 0].T
    # Between two segments the window covers both.
    sizes = [size for segment in parts for size in (len(segment), W - 1)]
    return functional.silu(torch.cat(y.split(sizes[:-1])[::2]))
