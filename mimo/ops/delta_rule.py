"""The gated delta rule and its causal convolution over packed segments, in plain PyTorch.

A head's state S (D, E) maps keys to values. Token t decays it, writes by how much its value differs
from what the state holds for its key, and reads it with its query:
    S_t = exp(g_t) S_{t-1} + k_t β_t (v_t - exp(g_t) S_{t-1}ᵀ k_t)ᵀ,    o_t = S_tᵀ q_t
Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464). The writes of a
chunk of tokens solve one triangular system (Yang et al. 2024, arXiv 2406.06484), so only the states
between chunks are computed one after the other.

Letters: T packed tokens, K key heads, V value heads, R = V/K, D and E size of a key and a value
head; n chunks, C tokens of a chunk or channels of a convolution, m segments, W convolution window.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
_CHUNKS_AT_ONCE = 16


@dataclass(frozen=True)
class Stretch:
    """Consecutive chunks of a few segments, which advance together.

    steps: segments at each step, ordered so that those of a later step are the first of an earlier.
    kept: segments that go on afterwards. begins: whether they begin here, with a state of zero.
    tokens: (n, C) int64, step by step; a chunk that is not full repeats its last token.
    real: int64 places in the flattened ``tokens`` that are no repetition; None if all are.
    """

    steps: tuple[int, ...]
    kept: int
    begins: bool
    tokens: Tensor
    real: Tensor | None


@functools.lru_cache(maxsize=64)
def stretches(lengths: tuple[int, ...], chunk: int, device: torch.device) -> tuple[Stretch, ...]:
    """Cut segments into stretches of about the square root of a segment's chunks."""
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
            steps = sizes[first : min(first + every, num_steps)]
            chunks = [
                segment[step * chunk : (step + 1) * chunk]
                for step, size in enumerate(steps, first)
                for segment in together[:size]
            ]
            starts, stops = torch.tensor([(c.start, c.stop) for c in chunks]).T[..., None]
            tokens = starts + torch.arange(chunk)
            real = (tokens < stops).flatten().nonzero()[:, 0]
            cut.append(
                Stretch(
                    tuple(steps),
                    sizes[first + len(steps)],
                    first == 0,
                    tokens.minimum(stops - 1).to(device),
                    None if len(real) == tokens.numel() else real.to(device),
                )
            )
    return tuple(cut)


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _advance(
    stretch: Stretch, state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor
) -> tuple[Tensor, Tensor | None]:
    n, C, K, D = q.shape
    E, R = v.shape[-1], v.shape[2] // K
    q, k = (_normalise(x).transpose(1, 2) for x in (q, k))
    q = q * D**-0.5
    v = v.view(n, C, K, R, E).permute(0, 2, 3, 1, 4)
    b = b.view(n, C, K, R).permute(0, 2, 3, 1)[..., None]
    c = g.view(n, C, K, R).permute(0, 2, 3, 1).cumsum(-1)
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    ratio = (c[..., :, None] - c[..., None, :]).masked_fill(later, -torch.inf).exp()
    inverse = torch.linalg.solve_triangular(
        b * (k @ k.mT)[:, :, None] * ratio,
        torch.eye(C, dtype=q.dtype, device=q.device).expand(n, K, R, C, C),
        upper=False,
        unitriangular=True,
    )
    scores = (q @ k.mT)[:, :, None] * ratio
    decay, until_end = c.exp()[..., None], (c[..., -1:] - c).exp()[..., None]
    both = torch.cat([k, q], dim=2)
    parts = [x.split(stretch.steps) for x in (v, b, decay, until_end, inverse, scores, both, k)]
    after = (*stretch.steps[1:], stretch.kept)
    outputs = []
    for v_, b_, decay_, until_, inverse_, scores_, both_, k_, m in zip(*parts, after, strict=True):
        read = None
        if state is None:
            x = b_ * v_
        else:
            read = (both_ @ state[: len(v_)]).view(-1, K, 2 * C, R, E).transpose(2, 3)
            x = b_ * (v_ - decay_ * read[..., :C, :])
        y = inverse_ @ x
        out = scores_ @ y
        outputs.append(out if read is None else out + decay_ * read[..., C:, :])
        if m:
            written = (until_ * y)[:m].transpose(2, 3).reshape(m, K, C, R * E)
            written = k_[:m].mT @ written
            if state is not None:
                kept = state[:m].view(m, K, D, R, E) * decay_[:m, :, None, :, -1]
                written = written + kept.view(written.shape)
            state = written
        else:
            state = None
    out = torch.cat(outputs).permute(0, 3, 1, 2, 4).reshape(n, C, K * R, E)
    return out, state


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
    wide = torch.promote_types(value.dtype, torch.float32)
    inputs = [x.to(wide) for x in (query, key, value, log_decay, beta)]
    output, state = torch.zeros_like(inputs[2]), None
    for stretch in stretches(lengths, CHUNK, value.device):
        flat = stretch.tokens.flatten()
        chunks = [x.index_select(0, flat).unflatten(0, stretch.tokens.shape) for x in inputs]
        out, state = _advance(stretch, None if stretch.begins else state, *chunks)
        out, real = out.flatten(0, 1), stretch.real
        if real is not None:
            out, flat = out.index_select(0, real), flat.index_select(0, real)
        output = output.index_copy(0, flat, out)
    return output.to(value.dtype)


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
