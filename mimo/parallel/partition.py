"""Splits sequences over language ranks: context parallelism (CP), then sequence parallelism (SP).

CP gives every rank its zigzag share of each segment of a packed sequence, or of each sequence of a
batch; see `mimo.ops.segments`. SP then scatters a CP rank's share over its tensor-parallel group,
in tp equal parts. Embeddings get both. Labels and loss mask get CP only, because logits come back
gathered from SP, and so do position ids, because queries and keys do.

Letters: B batch (1 for packed), S sequence (T packed tokens), H hidden.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from mimo.engines.megatron.config import scatter_sequence
from mimo.ops.segments import PackedSegments, zigzag_indices
from mimo.parallel.grids import sequence_multiple


class PartitionAdapter:
    """Splits sequences over explicit groups of one language rank.

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

    def shard_embeddings(
        self, embeddings: Tensor, packed_seq_params: PackedSegments | None
    ) -> Tensor:
        """(S, B, H), equal on all ranks -> (S/(cp·tp), B, H) with SP, else (S/cp, B, H).

        packed_seq_params: the segments of a packed sequence; None for a batch.
        Raises ValueError, naming the recipe key, for lengths that do not divide.
        """
        embeddings = self._cut(embeddings, 0, packed_seq_params)
        if not self.sequence_parallel:
            return embeddings
        cp, tp = self.cp.size(), self.tp.size()
        tokens, multiple = embeddings.shape[0] * cp, sequence_multiple(cp, tp, sp=True)
        if tokens % multiple:
            raise ValueError(
                f"language.grid.sp: a sequence of {tokens} tokens is not a multiple of {multiple} "
                f"(language.grid.tp {tp}, cp {cp}); pad it"
            )
        return scatter_sequence(embeddings, group=self.tp)

    def slice_tokens(self, tokens: Tensor, packed_seq_params: PackedSegments | None) -> Tensor:
        """(B, S) -> (B, S/cp), CP only: labels, masks, positions, token ids before the lookup.

        packed_seq_params: the segments of a packed sequence; None for a batch. Raises ValueError,
        naming the recipe key, for lengths that do not divide.
        """
        return self._cut(tokens, 1, packed_seq_params)

    def _cut(self, tensor: Tensor, dim: int, packed_seq_params: PackedSegments | None) -> Tensor:
        if self.cp.size() == 1:
            return tensor
        lengths = (tensor.shape[dim],)
        if packed_seq_params is not None:
            lengths = packed_seq_params.lengths
            assert sum(lengths) == tensor.shape[dim], (
                f"segments of {sum(lengths)} tokens for a sequence of {tensor.shape[dim]}"
            )
        index = zigzag_indices(lengths, self.cp.size(), self.cp.rank())
        return tensor.index_select(dim, index.to(tensor.device))
