"""Losses on logits that are sharded over the vocabulary; whole logits never exist anywhere.

Letters: V vocabulary rows, padding included, P tensor-parallel ranks, ... any leading dims.
The maximum and the sum of exponentials are exchanged, not logits: Shoeybi et al. 2019,
"Megatron-LM", section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _tokens_here(logits: Tensor, num_tokens: int, group: dist.ProcessGroup) -> int:
    """How many of this shard's columns are tokens; the others pad the vocabulary."""
    columns = logits.shape[-1]
    whole = columns * group.size()
    assert 0 < num_tokens <= whole, f"{num_tokens} tokens, but {whole} columns on the ranks"
    return min(max(num_tokens - group.rank() * columns, 0), columns)


def _wide(logits: Tensor) -> Tensor:
    """In at least fp32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _largest(logits: Tensor) -> Tensor:
    """Maximum over the last dim; -inf where this shard has only padding."""
    if logits.shape[-1] == 0:
        return logits.new_full(logits.shape[:-1], -torch.inf)
    return logits.amax(dim=-1)


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)


def _gradient(
    slope: Tensor, gradient: Tensor, columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """slope (..., count) times the losses' gradient (...), rounded once; zero for padding.

    Returns the whole shard's gradient (..., columns) and its view of the tokens' columns.
    """
    found = torch.zeros(*slope.shape[:-1], columns, dtype=dtype, device=slope.device)
    tokens = found[..., : slope.shape[-1]]
    torch.mul(slope, gradient[..., None], out=tokens)
    return found, tokens


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, num_tokens: int, group: dist.ProcessGroup
    ) -> Tensor:
        count = _tokens_here(logits, num_tokens, group)
        scores = _wide(logits[..., :count])
        largest = _largest(scores)
        _all_reduce(largest, dist.ReduceOp.MAX, group)
        scores = scores - largest[..., None]
        place = labels - group.rank() * logits.shape[-1]
        here = (place >= 0) & (place < count)
        place = place.clamp(0, max(count - 1, 0))
        # [sum of exponentials, the label's score], the second only on the rank that has it.
        sums = torch.zeros(2, *labels.shape, dtype=scores.dtype, device=scores.device)
        if count:
            sums[1] = scores.gather(-1, place[..., None])[..., 0].where(here, sums[1])
            sums[0] = scores.exp_().sum(dim=-1)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(scores.div_(sums[0][..., None]), place, here)
        ctx.columns, ctx.dtype = logits.shape[-1], logits.dtype
        # Marked by nan: a label that is no token would otherwise silently never be learnt.
        known = (labels >= 0) & (labels < num_tokens)
        return (sums[0].log() - sums[1]).where(known, torch.nan)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, place, here = ctx.saved_tensors
        found, tokens = _gradient(probabilities, gradients[0], ctx.columns, ctx.dtype)
        if tokens.shape[-1]:
            own = probabilities.gather(-1, place[..., None])[..., 0] - here.to(probabilities.dtype)
            tokens.scatter_(-1, place[..., None], (own * gradients[0])[..., None].to(ctx.dtype))
        return found, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, num_tokens: int, group: dist.ProcessGroup
) -> Tensor:
    """Loss of every token: logits (..., V/P), labels (...) int64 -> (...), fp64 or fp32.

    Columns of the whole vocabulary from ``num_tokens`` on take no part: they change no loss and
    get a zero gradient. Every rank of ``group`` calls it, with its columns and equal labels in
    [0, num_tokens); each gets equal losses. Two all_reduces forward, none backward: each
    rank's gradient is complete for its columns.
    """
    loss = _CrossEntropy.apply(logits, labels, num_tokens, group)
    assert isinstance(loss, Tensor)
    return loss


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, num_tokens: int, group: dist.ProcessGroup
    ) -> Tensor:
        count = _tokens_here(student, num_tokens, group)
        scores, targets = _wide(student[..., :count]), _wide(teacher[..., :count])
        largest = torch.stack((_largest(scores), _largest(targets)))
        _all_reduce(largest, dist.ReduceOp.MAX, group)
        scores, targets = scores - largest[0][..., None], targets - largest[1][..., None]
        weights = targets.exp()
        parts = (scores.exp().sum(-1), weights.sum(-1), (weights * (targets - scores)).sum(-1))
        sums = torch.stack(parts)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        # Gradient of the student's scores: its probabilities minus the teacher's.
        difference = scores.exp_().div_(sums[0][..., None]) - weights.div_(sums[1][..., None])
        ctx.save_for_backward(difference)
        ctx.columns, ctx.dtype = student.shape[-1], student.dtype
        return sums[2] / sums[1] - sums[1].log() + sums[0].log()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (difference,) = ctx.saved_tensors
        found, _ = _gradient(difference, gradients[0], ctx.columns, ctx.dtype)
        return found, None, None, None


def vocab_parallel_kl(
    student: Tensor, teacher: Tensor, num_tokens: int, group: dist.ProcessGroup
) -> Tensor:
    """KL(teacher || student) of every token: two logits (..., V/P) -> (...), fp64 or fp32.

    For distillation: only the student gets a gradient. Otherwise as `vocab_parallel_cross_entropy`:
    the same sharding of both, padding takes no part, two all_reduces forward, none backward.
    """
    divergence = _Divergence.apply(student, teacher.detach(), num_tokens, group)
    assert isinstance(divergence, Tensor)
    return divergence
