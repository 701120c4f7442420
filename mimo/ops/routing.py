"""Experts of sparse layers: the choice of each token's experts, and products with their weights.

The choice is deterministic: experts with equal probabilities are taken in the order of their
numbers, so all layouts choose alike.

Letters: T tokens that this rank routes, E experts, k experts of a token, S packed samples; n rows,
I inputs and O outputs of an expert's linear.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from mimo.ops.layers import linear
from mimo.ops.segments import PackedSegments, zigzag_indices


@dataclass(frozen=True)
class Choice:
    """The experts of each token.

    logits, probabilities: (T, E), at least fp32. weights: (T, k) of the chosen experts' outputs.
    experts: (T, k) int64, the best first.
    """

    logits: Tensor
    probabilities: Tensor
    weights: Tensor
    experts: Tensor


def choose_experts(tokens: Tensor, router: Tensor, top_k: int, normalize: bool) -> Choice:
    """tokens (T, H), router (E, H) -> the ``top_k`` experts with the largest probabilities.

    The softmax is over all experts, before the choice. normalize: let the weights sum to 1.
    Source: transformers `Qwen3VLMoeTextTopKRouter`, which does not specify the order of ties.
    """
    wide = torch.promote_types(tokens.dtype, torch.float32)
    logits = functional.linear(tokens.to(wide), router.to(wide))
    probabilities = logits.softmax(dim=-1)
    order = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices
    experts = order[:, :top_k]
    weights = probabilities.gather(1, experts)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Choice(logits, probabilities, weights, experts)


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens that a rank routes, as tensors on the device.

    sample: (T,) int64, each token's packed sample; S for padding. inverse_length: (S + 1,) fp64,
    1 / tokens of each sample; 0 for padding. real: (n,) int64, those of the rank's own tokens that
    are no padding, where its own are the ones that it sends to experts; None if all are real.
    loads: of layers that are balanced together, by number: those of `count_loads` over all ranks
    that share the samples.
    """

    sample: Tensor
    inverse_length: Tensor
    real: Tensor | None
    loads: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_real(self) -> Tensor:
        """(T,) bool: whether a token is no padding."""
        return self.inverse_length.index_select(0, self.sample) > 0


@dataclass(frozen=True)
class TokenShare:
    """A rank's share of a lane's tokens, and the part of it that the rank sends to experts.

    Under sequence parallelism both are its slice; else it routes the tokens of its tensor-parallel
    group, and sends one of ``tp_size`` parts.
    """

    cp_size: int = 1
    cp_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False

    def plan_of(self, segments: PackedSegments) -> RoutedTokens:
        """Return the plan in host tensors."""
        counts = segments.sample_tokens
        sample = torch.full((sum(segments.lengths),), len(counts))
        start = 0
        for number, (length, count) in enumerate(zip(segments.lengths, counts, strict=True)):
            sample[start : start + count] = number
            start += length
        sample = sample[zigzag_indices(segments.lengths, self.cp_size, self.cp_rank)]
        # Without sequence parallelism the last part is padded.
        each = -(-len(sample) // self.tp_size)
        part = sample[self.tp_rank * each : (self.tp_rank + 1) * each]
        real = (part < len(counts)).nonzero().flatten()
        lengths = torch.tensor([*counts, 0], dtype=torch.float64)
        return RoutedTokens(
            sample=part if self.sequence_parallel else sample,
            inverse_length=torch.where(lengths > 0, 1 / lengths.clamp(min=1), 0.0),
            real=real if len(real) < each else None,
        )


def balance_slopes(routed: RoutedTokens, loads: Tensor) -> Tensor:
    """Return (T, E): the factors of probabilities whose sum is the balancing loss times tokens.

    Of a sample of n tokens the loss is E · sum_e f_e · P_e, where f_e is the number of its tokens
    that chose e, and P_e the sum of their probabilities of e, both over n. loads: (S + 1, E), the
    f_e times n. Source: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, for k experts.
    """
    slopes = loads * routed.inverse_length[:, None].to(loads.dtype) * loads.shape[1]
    return slopes.index_select(0, routed.sample)


def balance_over_layers(choice: Choice, routed: RoutedTokens, loads: Tensor, layer: int) -> Tensor:
    """Return the balancing loss (), times tokens, of a layer with these ``loads``.

    The gradient is that of a loss over all layers, where loads are means over layers: by the time
    of a backward all layers have put theirs into ``routed``.
    Source: transformers `load_balancing_loss_func`.
    """
    routed.loads[layer] = loads
    return cast("Tensor", _BalanceOverLayers.apply(choice.probabilities, routed, loads))


class _BalanceOverLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, routed: RoutedTokens, loads: Tensor) -> Tensor:
        ctx.routed = routed
        return (probabilities * balance_slopes(routed, loads)).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        loads = torch.stack([*ctx.routed.loads.values()]).mean(0)
        return gradients[0] * balance_slopes(ctx.routed, loads), None, None


def count_loads(choice: Choice, routed: RoutedTokens) -> Tensor:
    """Return (S + 1, E), how many tokens of each sample chose each expert; the last for padding."""
    num_experts = choice.logits.shape[1]
    chosen = routed.sample[:, None] * num_experts + choice.experts
    size = len(routed.inverse_length) * num_experts
    ones = choice.logits.new_ones(chosen.numel())
    loads = choice.logits.new_zeros(size).index_add(0, chosen.flatten(), ones)
    return loads.view(-1, num_experts)


def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """rows (n, I), those of the first expert first, weights (E, O, I) -> (n, O).

    counts: (E,) int64, the rows of each expert. One without rows gets a gradient of zeros.
    """
    sizes_fit = all(size % 8 == 0 for size in weights.shape[1:])  # for its strides
    if rows.dtype == torch.bfloat16 and sizes_fit and len(rows):
        ends = counts.cumsum(0, dtype=torch.int32)
        weights = weights.view_as(weights)
        if weights.requires_grad:
            # Some kernels leave an idle expert's gradient undefined (pytorch issue 172439).
            idle = (counts == 0)[:, None, None]
            weights.register_hook(lambda gradient: gradient.masked_fill(idle, 0))
        return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    parts = zip(rows.split(counts.tolist()), weights.unbind(), strict=True)
    return torch.cat([linear(part, weight) for part, weight in parts])
