"""Cross-entropy of hidden states under a head that is sharded over the vocabulary.

Logits exist only for one block of this rank's vocabulary at a time. The forward keeps their maximum
and sum of exponentials, and ranks exchange these instead of logits (Shoeybi et al. 2019,
"Megatron-LM", section 3). The backward recomputes each block's logits. Blocks cut the vocabulary,
not the tokens, so that a block's rows of the weight gradient are complete at once. (Transformer
Engine's fused cross-entropy takes whole logits.)

Letters: n tokens, H hidden, V vocabulary rows, padding included, P tensor-parallel ranks.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.ops.layers import product

LOGITS_AT_ONCE = 2**25
"""Logits of a block, of all tokens together: 128 MiB in fp32, enough to fill a GPU."""

_COLUMNS = 128  # blocks are multiples of it, as matrix kernels prefer


def _tokens_here(rows: int, num_tokens: int, group: dist.ProcessGroup) -> int:
    """The number of this shard's rows that are tokens; the others pad the vocabulary."""
    whole = rows * group.size()
    assert 0 < num_tokens <= whole, f"{num_tokens} tokens, but {whole} columns on the ranks"
    return min(max(num_tokens - group.rank() * rows, 0), rows)


def rows_at_once(num_hidden: int) -> int:
    """Return the vocabulary rows of a block for ``num_hidden`` tokens."""
    return max(LOGITS_AT_ONCE // max(num_hidden, 1) // _COLUMNS * _COLUMNS, _COLUMNS)


def _blocks(weight: Tensor, count: int, num_hidden: int) -> Iterator[tuple[int, Tensor]]:
    """Cut the first ``count`` rows of a weight into blocks: (first row, rows)."""
    rows = rows_at_once(num_hidden)
    for start in range(0, count, rows):
        yield start, weight[start : min(start + rows, count)]


def _scores(hidden: Tensor, rows: Tensor) -> Tensor:
    """Logits of a block, rounded to the dtype of the model, then in at least fp32."""
    logits = product(hidden, rows)
    return logits if logits.dtype == torch.float64 else logits.float()


def _label_column(place: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Each label's column (n, 1) of a block, and whether the label is in it (n,)."""
    column = place - start
    is_inside = (column >= 0) & (column < columns)
    return column.clamp(0, columns - 1)[:, None], is_inside


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        num_tokens: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        count = _tokens_here(weight.shape[0], num_tokens, group)
        place = labels - group.rank() * weight.shape[0]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        local_largest = hidden.new_full(labels.shape, -torch.inf, dtype=wide)
        total, score = hidden.new_zeros((2, *labels.shape), dtype=wide)
        for start, rows in _blocks(weight, count, hidden.shape[0]):
            scores = _scores(hidden, rows)
            column, is_inside = _label_column(place, start, rows.shape[0])
            score = scores.gather(1, column)[:, 0].where(is_inside, score)
            before, local_largest = local_largest, torch.maximum(local_largest, scores.amax(dim=1))
            total = total * (before - local_largest).exp()
            total += scores.sub_(local_largest[:, None]).exp_().sum(dim=1)
        largest = local_largest.clone()
        communicates = group.size() > 1 and labels.numel() > 0
        if communicates:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        # Only the rank that has the label knows its score.
        is_local = (place >= 0) & (place < count)
        score = (score - largest).where(is_local, 0)
        sums = torch.stack((total * (local_largest - largest).exp(), score))
        if communicates:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(hidden, weight, place, largest, sums[0])
        ctx.count = count
        # A label that is no token gives nan; else it would silently never be learnt.
        known = (labels >= 0) & (labels < num_tokens)
        return (sums[0].log() - sums[1]).where(known, torch.nan)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, place, largest, total = ctx.saved_tensors
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = torch.zeros_like(hidden, dtype=largest.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = torch.empty_like(weight)
            of_weight[ctx.count :].zero_()
        for start, rows in _blocks(weight, ctx.count, hidden.shape[0]):
            slope = _scores(hidden, rows).sub_(largest[:, None]).exp_().div_(total[:, None])
            column, is_inside = _label_column(place, start, rows.shape[0])
            slope.scatter_add_(1, column, is_inside.to(slope.dtype).neg()[:, None])
            slope = slope.mul_(gradients[0][:, None]).to(hidden.dtype)
            if of_hidden is not None:
                of_hidden += product(slope, rows.T)
            if of_weight is not None:
                product(slope.T, hidden.T, out=of_weight[start : start + rows.shape[0]])
        if of_hidden is not None:
            of_hidden = of_hidden.to(hidden.dtype)
        return of_hidden, of_weight, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, num_tokens: int, group: dist.ProcessGroup
) -> Tensor:
    """hidden (n, H), weight (V/P, H), labels (n,) int64 -> losses (n,) fp64 or fp32.

    Vocabulary rows from ``num_tokens`` on are padding: they change no loss and get a zero gradient.
    Every rank of ``group`` calls it with its rows of the weight, equal hidden states and equal
    labels in [0, num_tokens), and gets equal losses. Two all_reduces forward unless n is 0, none
    backward: the gradient of the weight is complete, that of the hidden states is this rank's
    share, which the caller sums over ``group``.
    """
    return cast("Tensor", _LinearCrossEntropy.apply(hidden, weight, labels, num_tokens, group))


def append_scalar(losses: Tensor, scalar: Tensor) -> Tensor:
    """losses (n,), scalar () -> (n + 1,), so that a backward of their sum reaches both."""
    return torch.cat((losses, scalar.to(losses.dtype)[None]))
