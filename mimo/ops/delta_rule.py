"""The gated delta rule and its causal convolution over packed segments.

A head's state S (D, E) maps keys to values. A token decays it, corrects the value that it holds for
the token's key by a share β, and reads it with the token's query:
    S ← exp(g) S,    S ← S + k (β (v - Sᵀ k))ᵀ,    o = Sᵀ q
Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464). The corrections y
of a chunk of tokens solve one triangular system (Yang et al. 2024, arXiv 2406.06484), so only the
states between chunks are computed one after the other. With c the sum of g since the chunk began:
    (I + A) y = β (v - exp(c) k S),    A_ij = β_i exp(c_i - c_j) k_i·k_j for j < i
    o = exp(c) q S + P y,              P_ij = exp(c_i - c_j) q_i·k_j     for j ≤ i
    S' = exp(c_C) S + kᵀ (exp(c_C - c) y)

Letters: T packed tokens, K key heads, V value heads, R = V/K, D and E sizes of a key and a value;
n chunks, C tokens of a chunk or channels of a convolution, m segments, W window of a convolution.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

CHUNK = 64
_CHUNKS_AT_ONCE = 16  # enough to fill a GPU; more would only cost memory
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Stretch:
    """Consecutive chunks of a few segments, which advance together.

    sizes: segments at each step, at last those that go on in the next stretch; the segments of a
        step are the first of those of the step before. begins: whether they begin here.
    tokens: (n, C) int64, step by step; a chunk that is not full repeats its last token.
    real: int64 places in the flattened ``tokens`` that are no repetition.
    """

    sizes: tuple[int, ...]
    begins: bool
    tokens: Tensor
    real: Tensor

    def read(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(T, ...) -> (n, C, ...)."""
        return x.index_select(0, self.tokens.flatten()).to(dtype).unflatten(0, self.tokens.shape)

    def write(self, target: Tensor, chunks: Tensor) -> None:
        """Copy chunks (n, C, ...) to their tokens of ``target`` (T, ...)."""
        rows = chunks.flatten(0, 1).index_select(0, self.real).to(target.dtype)
        target.index_copy_(0, self.tokens.flatten().index_select(0, self.real), rows)


@functools.lru_cache(maxsize=64)
def stretches(lengths: tuple[int, ...], chunk: int, device: torch.device) -> tuple[Stretch, ...]:
    """Cut segments into stretches of about the square root of a segment's chunks.

    States are kept between stretches and computed again inside them, so both take little memory.
    """
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()
    segments = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    segments = sorted(filter(None, segments), key=len, reverse=True)
    cut = []
    while segments:
        num_steps = -(-len(segments[0]) // chunk)
        every = math.ceil(math.sqrt(num_steps))
        width = max(1, _CHUNKS_AT_ONCE // every)
        together, segments = segments[:width], segments[width:]
        sizes = [sum(len(s) > step * chunk for s in together) for step in range(num_steps)] + [0]
        for first in range(0, num_steps, every):
            last = min(first + every, num_steps)
            chunks = [
                segment[step * chunk : (step + 1) * chunk]
                for step in range(first, last)
                for segment in together[: sizes[step]]
            ]
            starts, stops = torch.tensor([(c.start, c.stop) for c in chunks]).T[..., None]
            tokens = starts + torch.arange(chunk)
            real = (tokens < stops).flatten().nonzero()[:, 0]
            tokens = tokens.minimum(stops - 1)
            steps = tuple(sizes[first : last + 1])
            cut.append(Stretch(steps, first == 0, tokens.to(device), real.to(device)))
    return tuple(cut)


def _per_key_head(x: Tensor) -> Tensor:
    """(m, K, R, C, E) -> (m, K, C, R·E), to multiply all value heads of a key head at once."""
    return x.transpose(2, 3).flatten(3)


class _Chunks:
    """Chunks of a stretch, and all that they compute without a state.

    query, key: (n, C, K, D). value: (n, C, V, E). log_decay, beta: (n, C, V).
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
    ) -> None:
        n, C, K, D = key.shape
        R = value.shape[2] // K
        both = torch.cat([key, query], dim=1).transpose(1, 2)  # (n, K, 2C, D)
        self.inverse_norm = (both.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt_()
        self.both = both * self.inverse_norm
        self.scale = D**-0.5
        self.both[:, :, C:] *= self.scale
        self.key = self.both[:, :, :C]
        # All others are (n, K, R, C, ...).
        self.value = value.unflatten(2, (K, R)).permute(0, 2, 3, 1, 4)
        self.beta = beta.unflatten(2, (K, R)).permute(0, 2, 3, 1)[..., None]
        total = log_decay.unflatten(2, (K, R)).permute(0, 2, 3, 1).cumsum(-1)[..., None]
        self.decay, self.until_end = total.exp(), (total[..., -1:, :] - total).exp()
        # The exponents above the diagonal are positive: masked first, as they may overflow.
        later = torch.ones(C, C, dtype=torch.bool, device=key.device).triu(1)
        self.ratio = (total - total.mT).masked_fill_(later, -torch.inf).exp_()
        products = self.both @ self.key.mT
        self.similarity = (products[:, :, None, :C] * self.ratio).tril_(-1)
        self.scores = products[:, :, None, C:] * self.ratio
        identity = torch.eye(C, dtype=key.dtype, device=key.device)
        self.inverse = torch.linalg.solve_triangular(
            self.beta * self.similarity, identity, upper=False, unitriangular=True
        )

    def by_step(self, sizes: Sequence[int], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Split tensors of n chunks into those of each step."""
        return list(zip(*(x.split(list(sizes[:-1])) for x in tensors), strict=True))


@dataclass
class _Step:
    """A step of m segments, of which h had a state: all, or none at their beginning.

    state: before the step, (h, K, D, R·E). read: (h, K, R, 2C, E), by keys and by queries.
    error: (m, K, R, C, E), what a value lacks. change: y, of the same shape.
    """

    state: Tensor
    read: Tensor
    error: Tensor
    change: Tensor


def _advance(sizes: Sequence[int], chunks: _Chunks, state: Tensor) -> tuple[list[_Step], Tensor]:
    """Run the steps of a stretch from a state (h, K, D, R·E); also return the state after them."""
    steps = []
    C, R = chunks.beta.shape[3], chunks.beta.shape[2]
    inputs = chunks.by_step(
        sizes,
        chunks.both,
        chunks.value,
        chunks.beta,
        chunks.decay,
        chunks.until_end,
        chunks.inverse,
    )
    for (both, value, beta, decay, until_end, inverse), kept in zip(inputs, sizes[1:], strict=True):
        h = len(state)
        read = (both[:h] @ state).unflatten(3, (R, -1)).transpose(2, 3)
        error = value.clone(memory_format=torch.contiguous_format)
        error[:h] -= decay[:h] * read[..., :C, :]
        change = inverse @ (beta * error)
        steps.append(_Step(state, read, error, change))
        following = both[:kept, :, :C].mT @ _per_key_head(until_end[:kept] * change[:kept])
        faded = state[:kept].unflatten(3, (R, -1)) * decay[: min(h, kept), :, None, :, -1]
        following[:h] += faded.flatten(3)
        state = following
    return steps, state


def _outputs(sizes: Sequence[int], chunks: _Chunks, steps: list[_Step]) -> Tensor:
    """(n, C, V, E)."""
    C = chunks.beta.shape[3]
    out = chunks.scores @ torch.cat([step.change for step in steps])
    for part, decay, step in zip(
        out.split(list(sizes[:-1])), chunks.decay.split(list(sizes[:-1])), steps, strict=True
    ):
        h = len(step.state)
        part[:h] += decay[:h] * step.read[..., C:, :]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


class _DeltaRule(torch.autograd.Function):
    """Keeps its inputs and the states between stretches."""

    @staticmethod
    def forward(ctx: Any, lengths: tuple[int, ...], chunk: int, *inputs: Tensor) -> Tensor:
        _, key, value, _, _ = inputs
        (K, D), (V, E) = key.shape[1:], value.shape[1:]
        wide = torch.promote_types(value.dtype, torch.float32)
        ctx.stretches = stretches(lengths, chunk, value.device)
        ctx.nothing = state = value.new_zeros(0, K, D, V // K * E, dtype=wide)
        output, states = torch.empty_like(value), []
        for stretch in ctx.stretches:
            state = ctx.nothing if stretch.begins else state
            states.append(state)
            chunks = _Chunks(*(stretch.read(x, wide) for x in inputs))
            steps, state = _advance(stretch.sizes, chunks, state)
            stretch.write(output, _outputs(stretch.sizes, chunks, steps))
        ctx.save_for_backward(*inputs, *states)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, states = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        totals = [torch.empty_like(x) for x in inputs]
        grad_state = ctx.nothing
        for stretch, state in zip(reversed(ctx.stretches), reversed(states), strict=True):
            chunks = _Chunks(*(stretch.read(x, state.dtype) for x in inputs))
            steps, _ = _advance(stretch.sizes, chunks, state)
            padded = state.new_zeros(stretch.tokens.numel(), *gradients[0].shape[1:])
            flat = stretch.tokens.flatten().index_select(0, stretch.real)
            rows = gradients[0].index_select(0, flat).to(state.dtype)
            padded.index_copy_(0, stretch.real, rows)
            grad_output = padded.unflatten(0, stretch.tokens.shape)
            parts, grad_state = _backward(stretch.sizes, chunks, steps, grad_output, grad_state)
            for total, part in zip(totals, parts, strict=True):
                stretch.write(total, part)
        return None, None, *totals


def _backward(
    sizes: Sequence[int],
    chunks: _Chunks,
    steps: list[_Step],
    grad_output: Tensor,
    grad_state: Tensor,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of chunks' inputs and of the first state, from those of outputs and the last state.

    grad_output: (n, C, V, E), zero where a chunk repeats its last token.
    """
    K, R, C = chunks.beta.shape[1:4]
    grad_output = grad_output.unflatten(2, (K, R)).permute(0, 2, 3, 1, 4).contiguous()
    grad_both = torch.zeros_like(chunks.both)
    grad_total = torch.zeros_like(chunks.beta)  # of c
    grad_change = chunks.scores.mT @ grad_output
    grad_error = torch.empty_like(grad_output)  # times beta: of the right-hand side
    views = chunks.by_step(
        sizes, chunks.both, chunks.beta, chunks.decay, chunks.until_end, chunks.inverse,
        grad_output, grad_both, grad_total, grad_change, grad_error,
    )  # fmt: skip
    for step, view in zip(reversed(steps), reversed(views), strict=True):
        both, beta, decay, until_end, inverse, d_output, d_both, d_total, d_change, d_error = view
        kept, h = len(grad_state), len(step.state)
        # Through the state after the step.
        key, until = both[:kept, :, :C], until_end[:kept]
        written = until * step.change[:kept]
        d_written = (key @ grad_state).unflatten(3, (R, -1)).transpose(2, 3)
        d_change[:kept] += until * d_written
        d_both[:kept, :, :C] += _per_key_head(written) @ grad_state.mT
        slope = (written * d_written).sum(-1, keepdim=True)
        d_total[:kept] -= slope
        d_total[:kept, ..., -1, :] += slope.sum(-2)
        both_states = (step.state[:kept] * grad_state[:h]).unflatten(3, (R, -1)).sum((2, 4))
        d_total[: len(both_states), ..., -1, 0] += (
            both_states * decay[: len(both_states), ..., -1, 0]
        )
        # Through the corrections, and reads of the state before the step.
        torch.matmul(inverse.mT, d_change, out=d_error)
        d_read = torch.cat([d_error[:h] * -beta[:h], d_output[:h]], dim=3)
        d_read *= decay[:h].repeat(1, 1, 1, 2, 1)
        slope = (d_read * step.read).sum(-1, keepdim=True)
        d_total[:h] += slope[..., :C, :] + slope[..., C:, :]
        d_read = _per_key_head(d_read)
        d_both[:h] += d_read @ step.state.mT
        before = both[:h].mT @ d_read
        faded = grad_state[:h].unflatten(3, (R, -1)) * decay[: min(h, kept), :, None, :, -1]
        before[:kept] += faded.flatten(3)
        grad_state = before
    change, error = (
        torch.cat(list(x)) for x in zip(*((s.change, s.error) for s in steps), strict=True)
    )
    grad_value = chunks.beta * grad_error
    # Through A and P.
    grad_beta = (grad_error * error).sum(-1, keepdim=True)
    grad_system = -(grad_error @ change.mT)
    slope = grad_system * chunks.similarity
    grad_beta += slope.sum(-1, keepdim=True)
    grad_system *= chunks.beta
    slope *= chunks.beta
    grad_scores = grad_output @ change.mT
    slope += grad_scores * chunks.scores
    grad_total += slope.sum(-1, keepdim=True) - slope.sum(-2)[..., None]
    grad_products = torch.stack(
        [grad_system.mul_(chunks.ratio).tril_(-1).sum(2), grad_scores.mul_(chunks.ratio).sum(2)], 2
    ).flatten(2, 3)
    grad_both += grad_products @ chunks.key
    grad_both[:, :, :C] += grad_products.mT @ chunks.both
    # Through the norms.
    unit = chunks.both
    unit[:, :, C:] /= chunks.scale
    grad_both[:, :, C:] *= chunks.scale
    grad_both -= unit * (unit * grad_both).sum(-1, keepdim=True)
    grad_both *= chunks.inverse_norm
    grad_key, grad_query = grad_both.transpose(1, 2).split(C, dim=1)
    grad_decay = grad_total.flip(3).cumsum(3).flip(3)
    outer = [x.permute(0, 3, 1, 2, 4).flatten(2, 3) for x in (grad_value, grad_decay, grad_beta)]
    return (grad_query, grad_key, outer[0], outer[1][..., 0], outer[2][..., 0]), grad_state


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
    Returns (T, V, E) in the dtype of ``value``, computed in fp32 (fp64 for fp64).
    """
    inputs = query, key, value, log_decay, beta
    return cast("Tensor", _DeltaRule.apply(lengths, CHUNK, *inputs))


def segment_conv(x: Tensor, weight: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """x (T, C), weight (C, W) -> (T, C): causal depthwise convolution in each segment, then SiLU.

    lengths: tokens of each segment, which sum to T; zeros precede a segment's first token.
    """
    length = torch.tensor(lengths, dtype=torch.int64)
    place = torch.arange(len(x)) - (length.cumsum(0) - length).repeat_interleave(length)
    place = place.to(x.device)[:, None]
    window = weight.shape[1]
    y = x * weight[:, -1]
    for back in range(1, min(window, len(x))):
        shifted = functional.pad(x[:-back], (0, 0, back, 0)) * (place >= back)
        y = y + shifted * weight[:, window - 1 - back]
    return functional.silu(y)
