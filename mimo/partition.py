"""Gives each language rank its part of sequences: context parallel first, then sequence parallel.

Context parallelism (CP) cuts every segment of a packed sequence, or every sequence of a batch,
into 2·cp equal chunks; CP rank r gets chunks r and 2·cp-1-r, one segment after the other. So with
causal attention all ranks have the same work (zigzag; these are the indices of Transformer
Engine's `thd_get_partitioned_indices`). Sequence parallelism (SP) then scatters what a CP rank has
of the whole sequence in tp equal parts over its tensor-parallel group.

Embeddings get both. Labels and loss mask get CP only, because logits come back gathered from SP.
Position ids stay whole: the rotary embedding picks what a rank needs.

Letters: B batch (1 for packed), S sequence (T packed tokens), H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.megatron.attention import PackedSegments
from mimo.megatron.sequence import scatter_sequence


@functools.lru_cache(maxsize=64)
def zigzag_indices(lengths: tuple[int, ...], cp_size: int, cp_rank: int) -> Tensor:
    """Positions of a sequence that a CP rank holds, in its order: (sum(lengths)/cp,) int64.

    lengths: padded tokens of each segment, all multiples of 2·cp_size (ValueError otherwise).
    """
    parts, start = [], 0
    for length in lengths:
        chunk, rest = divmod(length, 2 * cp_size)
        if rest:
            raise ValueError(
                f"language.grid.cp: a segment of {length} tokens is not a multiple of "
                f"2 · cp = {2 * cp_size}; pad it to {(chunk + 1) * 2 * cp_size}"
            )
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
        start += length
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


class PartitionAdapter:
    """Cuts sequences over explicit groups of one language rank; exists on language ranks only.

    cp, tp: this rank's context- and tensor-parallel groups. sequence_parallel: whether embeddings
    are scattered over ``tp``. No communication happens in a forward; the backward of the SP
    scatter all-gathers over ``tp``, so all of its ranks take part.
    """

    def __init__(
        self, cp: dist.ProcessGroup, tp: dist.ProcessGroup, sequence_parallel: bool
    ) -> None:
        self.cp = cp
        self.tp = tp
        self.sequence_parallel = sequence_parallel

    def shard(
        self,
        embeddings: Tensor | None,
        labels: Tensor,
        loss_mask: Tensor,
        packed_seq_params: PackedSegments | None,
    ) -> tuple[Tensor | None, Tensor, Tensor, PackedSegments | None]:
        """This rank's part of a microbatch.

        embeddings: (S, B, H), equal on all ranks -> (S/(cp·tp), B, H) with SP, else (S/cp, B, H);
            None on later pipeline stages. labels, loss_mask: (B, S) -> (B, S/cp).
        packed_seq_params: the segments of a packed sequence, handed through whole; None for a
            batch.
        Raises ValueError, naming the recipe key, for lengths that do not divide.
        """
        if embeddings is not None:
            embeddings = self.shard_embeddings(embeddings, packed_seq_params)
        return (
            embeddings,
            self.slice_tokens(labels, packed_seq_params),
            self.slice_tokens(loss_mask, packed_seq_params),
            packed_seq_params,
        )

    def shard_embeddings(
        self, embeddings: Tensor, packed_seq_params: PackedSegments | None
    ) -> Tensor:
        """The embeddings' part of `shard`."""
        return self._scatter(self._cut(embeddings, 0, packed_seq_params))

    def slice_tokens(self, tokens: Tensor, packed_seq_params: PackedSegments | None) -> Tensor:
        """(B, S) -> (B, S/cp), CP only: for labels, loss masks, and token ids before the lookup."""
        return self._cut(tokens, 1, packed_seq_params)

    def _cut(self, tensor: Tensor, dim: int, packed_seq_params: PackedSegments | None) -> Tensor:
        if self.cp.size() == 1:
            return tensor
        lengths: Sequence[int] = [tensor.shape[dim]]
        if packed_seq_params is not None:
            lengths = packed_seq_params.lengths
            assert sum(lengths) == tensor.shape[dim], (
                f"segments of {sum(lengths)} tokens for a sequence of {tensor.shape[dim]}"
            )
        index = zigzag_indices(tuple(lengths), self.cp.size(), self.cp.rank())
        return tensor.index_select(dim, index.to(tensor.device))

    def _scatter(self, embeddings: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return embeddings
        cp, tp = self.cp.size(), self.tp.size()
        if embeddings.shape[0] % tp:
            chunks = 2 * cp if cp > 1 else 1
            raise ValueError(
                f"language.grid.sp: a sequence of {embeddings.shape[0] * cp} tokens is not a "
                f"multiple of {chunks * tp} (language.grid.tp {tp}, cp {cp}); pad it"
            )
        return scatter_sequence(embeddings, self.tp)
